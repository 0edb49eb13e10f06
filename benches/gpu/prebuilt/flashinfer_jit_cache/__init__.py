"""Prebuilt kernels where FlashInfer looks for them: `aot/<uri>/<uri>.so` next to this file.

It takes the place of the package of this name, whose kernels are for every shape and type.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
# FlashInfer refuses kernels of another release; `pack.sh` writes the one they were built for.
__version__ = (FOLDER / "version.txt").read_text().strip()


def get_jit_cache_dir() -> str:
    """Where FlashInfer looks before it compiles."""
    return str(FOLDER / "aot")
