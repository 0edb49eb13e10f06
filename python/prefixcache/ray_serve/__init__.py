"""Several engines under Ray Serve, and a router that sends a prompt where its prefix lies."""
