"""Where models that were fetched or converted are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """PREFIXCACHE_HOME, else prefixcache under the user's cache folder."""
    if home := os.environ.get("PREFIXCACHE_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prefixcache"
