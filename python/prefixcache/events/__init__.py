"""KV events: what the cache stores and removes, told to routers in the form that vLLM uses."""
