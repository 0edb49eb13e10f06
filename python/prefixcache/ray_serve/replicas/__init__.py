"""All replicas as one engine."""
