"""Decides what each step computes. Pure Python: no tensors here."""
