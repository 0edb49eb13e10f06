"""Why prompts were not cached: what is remembered of prompts and lost blocks, and reasons."""
