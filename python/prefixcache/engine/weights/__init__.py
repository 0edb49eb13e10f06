"""New weights for a running engine, and what versions of them are called."""
