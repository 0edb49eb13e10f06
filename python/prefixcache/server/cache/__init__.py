"""Endpoints about the cache."""
