"""Weights laid out for the kernels, in files that the next start maps."""
