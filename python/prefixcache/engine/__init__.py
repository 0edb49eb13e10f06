"""Joins scheduler, cache and runner into a loop."""
