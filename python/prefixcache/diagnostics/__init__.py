"""Why prompts were not cached: what is remembered of prompts and evicted blocks, and reasons."""
