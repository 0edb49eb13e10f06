"""Keeps answers to grammars: which tokens may follow, worked out in parallel with the model."""
