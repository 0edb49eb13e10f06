"""Chooses next tokens from logits."""
