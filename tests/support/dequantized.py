"""The dense model of a converted GGUF file, for tools that know no blocks and as an oracle."""

from __future__ import annotations

from pathlib import Path

from prefixcache.models.conversion import dequantize_folder


def save_dequantized(folder: Path, target: Path, dtype: str = "float32") -> Path:
    """Writes the folder's model with its numbers, rounded once to `dtype`, as safetensors."""
    target.mkdir()
    dequantize_folder(folder, target, dtype)
    return target
