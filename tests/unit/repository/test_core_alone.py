"""`prefixcache.core` can be taken without the server: it imports numpy and nothing else."""

import subprocess
import sys
from pathlib import Path

import prefixcache.core

SCRIPT = Path(__file__).parents[2] / "core_alone.py"


def test_the_core_imports_numpy_alone() -> None:
    shown = subprocess.run([sys.executable, SCRIPT], check=True, capture_output=True, text=True)
    assert shown.stdout.split() == ["prefixcache", "prefixcache._core", "prefixcache.core"]


def test_what_the_core_offers_is_documented() -> None:
    for name in prefixcache.core.__all__:
        offered = getattr(prefixcache.core, name)
        public = [part for part in vars(offered) if not part.startswith("_")]
        assert offered.__module__ == "prefixcache.core"
        assert offered.__doc__
        assert all(getattr(offered, part).__doc__ for part in public)
