"""Keeps answers to grammars: which tokens may follow, worked out beside the model."""
