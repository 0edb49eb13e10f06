"""The size of the KV cache while the engine serves: as asked for, and by itself."""
