"""How a model's files say that a text becomes one vector, in the words of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefixcache.config.model_config import read_json_object

POOLING_FILE = Path("1_Pooling", "config.json")
GGUF_POOLING = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}
"""The values of llama.cpp's `pooling_type`."""
_SWITCH = "pooling_mode_"


def read_pooling(folder: Path) -> str | None:
    """The mode that the folder's files name, "lasttoken" for one; None where they name none.

    Raises `ModelLoadError` for a file that cannot be read.
    """
    file = folder / POOLING_FILE
    return _mode(read_json_object(file)) if file.is_file() else None


def _mode(given: Mapping[str, Any]) -> str | None:
    """Newer files name the mode, older ones have a switch for each."""
    if isinstance(mode := given.get("pooling_mode"), str):
        return mode
    modes = [name.removeprefix(_SWITCH) for name in given if name.startswith(_SWITCH)]
    return "+".join(mode for mode in modes if given[_SWITCH + mode] is True) or None
