"""GGUF files by their names: one of many quantizations, and the parts of one that is split."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from prefixcache.exceptions import ModelLoadError

PREFERRED = (
    *("Q4_K_M", "Q4_K_XL", "MXFP4", "IQ4_XS", "IQ4_NL", "Q4_K_S", "Q4_0", "Q4_1"),
    *("Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "Q3_K_M", "Q3_K_L", "Q3_K_S", "Q2_K", "BF16", "F16"),
)
"""The quantizations of which a repository's file is taken when none is named, the first first."""

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
# Models of images, and tables that quantization is made with.
_NO_TEXT_MODEL = ("mmproj", "imatrix")


def choose(names: Iterable[str], wanted: str | None = None) -> list[str]:
    """The parts, in order, of one GGUF file among these names of files.

    `wanted` is a file's name, that of any of its parts, or a quantization as "Q4_K_M", in any case.
    Without it the first of `PREFERRED` is taken, or the only file. Of files that fit, the one with
    the shortest name is taken. Raises `ModelLoadError` with the names when none fits, or a part is
    missing.
    """
    groups = _grouped(names)
    if wanted is not None and wanted.endswith(".gguf"):
        wanted_stem = stem_of(wanted)
        fitting = [stem for stem in groups if wanted_stem in (stem, PurePosixPath(stem).name)]
    elif wanted is not None:
        fitting = _quantized(groups, wanted)
    else:
        preferred = (_quantized(groups, quantization) for quantization in PREFERRED)
        fitting = next(filter(None, preferred), list(groups) if len(groups) == 1 else [])
    if not fitting:
        said = "of a usual quantization" if wanted is None else f"for {wanted!r}"
        listed = ", ".join(f"{stem}.gguf" for stem in sorted(groups)) or "none"
        raise ModelLoadError(f"There is no GGUF file {said}. GGUF files: {listed}.")
    stem = min(fitting, key=lambda stem: (len(stem), stem))
    return _complete(stem, groups[stem])


def stem_of(name: str) -> str:
    """The name without its ending, and without the number of its part."""
    match = _PART.fullmatch(name)
    return name.removesuffix(".gguf") if match is None else match[1]


def parts_of(file: Path) -> list[Path]:
    """The files that a file is split into, itself where it is whole. Raises as `choose`."""
    names = [path.name for path in file.parent.glob("*.gguf")] if _PART.fullmatch(file.name) else []
    return [file.with_name(name) for name in choose(names, file.name)] if names else [file]


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        base = PurePosixPath(name).name
        if name.endswith(".gguf") and not base.lower().startswith(_NO_TEXT_MODEL):
            groups.setdefault(stem_of(name), []).append(name)
    return groups


def _quantized(stems: Iterable[str], quantization: str) -> list[str]:
    tag = re.compile(rf"(^|[-._/]){re.escape(quantization)}($|[-._/])", re.IGNORECASE)
    return [stem for stem in stems if tag.search(stem)]


def _complete(stem: str, names: list[str]) -> list[str]:
    matches = [_PART.fullmatch(name) for name in names]
    numbers = [(int(match[2]), int(match[3])) for match in matches if match is not None]
    if numbers:
        count = numbers[0][1]
        if numbers != [(number, count) for number in range(1, count + 1)]:
            raise ModelLoadError(f"Of {stem}.gguf, split in {count} parts, there is: {names}.")
    elif len(names) != 1:
        raise ModelLoadError(f"{stem}.gguf is there whole and in parts.")
    return names
