"""Flags and configurations as checked dataclasses."""
