"""Keeps answers to grammars: token masks, computed in parallel with the model."""
