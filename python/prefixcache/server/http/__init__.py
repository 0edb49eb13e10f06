"""Connections, bodies, access, errors and events of HTTP."""
