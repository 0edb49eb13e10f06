"""Recordings of what a cache is asked for, and of requests."""
