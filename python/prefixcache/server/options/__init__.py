"""Flags and bounds of `prefixcache serve`."""
