"""Decoders of the Llama family in our own layers, and where their weights come from."""
