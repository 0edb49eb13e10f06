"""Measuring, replaying and verifying, each against any server."""
