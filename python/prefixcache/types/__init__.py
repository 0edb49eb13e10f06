"""Plain data that every package shares."""
