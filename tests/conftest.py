"""Fixtures every test room uses. Torch is imported by tests, after `workers` set its threads."""

from __future__ import annotations

pytest_plugins = ["repeatable", "workers", "checkpoints"]
