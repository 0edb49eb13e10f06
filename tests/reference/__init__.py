"""Slow, obvious oracles: each says in plain Python what fast code must do."""
