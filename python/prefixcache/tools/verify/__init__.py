"""What `prefixcache verify` asks: the same greedy questions, with and without cache hits."""
