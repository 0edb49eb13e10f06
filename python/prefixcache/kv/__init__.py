"""The paged KV cache: blocks, tables and tensors."""
