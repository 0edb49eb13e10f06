"""KV events: what the cache stores and removes, sent to routers in the form that vLLM uses."""
