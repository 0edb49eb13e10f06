"""Commands, health and information."""
