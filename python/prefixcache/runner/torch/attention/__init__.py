"""Attention over the paged KV cache: one protocol, a backend per device."""
