"""The version that the server reports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    """That of a checkout which is not installed is unknown."""
    try:
        return version("prefixcache")
    except PackageNotFoundError:
        return "unknown"


VERSION = _installed()
