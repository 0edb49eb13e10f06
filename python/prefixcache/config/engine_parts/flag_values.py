"""What the text of a flag spells: memory, tokens, paths."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from prefixcache.config.checked import MAX_INT, ReadBy, is_count

_MOST_BYTES = 2**62
_DIGITS = re.compile(r"[0-9]{1,10}")
_TOKENS = re.compile(r"(\d{1,10}|\d{0,9}\.\d{1,9})([kmg]?)", re.IGNORECASE)
_SIZE = re.compile(r"(\d{0,30}\.?\d{1,30})\s*(([KMGT])(i?)B?|B)?", re.IGNORECASE)


def parse_memory(value: object) -> int | float:
    """Bytes of 1000000, "1000000", "2GiB" or "1.5 GB"; "2G" counts as "2GiB".

    A number with a point and no unit, as 0.5, is a share of what is free, more than 0 and at most
    1, and is returned as a float. Raises `ValueError` for anything else.
    """
    number = _read_size(value.strip()) if isinstance(value, str) else value
    most = 1 if isinstance(number, float) else _MOST_BYTES
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number <= most:
        raise ValueError("must be bytes, a size as 2GiB or 500MB, or a share as 0.5")
    return number


def _read_size(text: str) -> int | float | None:
    """None for text that is not a size.

    pydantic's `ByteSize` would read "2GiB too much" as 2 GiB, "5bit" as 0 bytes, and "2G" as 2 GB.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, unit, prefix, binary = match.groups()
    if unit is None:
        return float(number) if "." in number else int(number)
    decimal = prefix and not binary and unit.upper().endswith("B")
    power = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1000 if decimal else 1024) ** power)


def parse_bytes(value: object) -> int:
    """`parse_memory` without shares. Raises `ValueError`."""
    try:
        number = parse_memory(value)
    except ValueError:
        number = 0.0
    if isinstance(number, float):
        raise ValueError("must be bytes, or a size as 2GiB or 500MB")
    return number


def parse_path(value: object) -> Path:
    """A path, or the text of one. Raises `ValueError`."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError("must be a path")
    return Path(value)


def parse_folder(value: object) -> Path:
    """A path at which no file is in the way of a folder. Raises `ValueError`."""
    path = parse_path(value)
    if any(os.path.isfile(part) for part in (path, *path.parents)):
        raise ValueError("must be a folder or a new path, not a file")
    return path


def parse_folder_or_none(value: object) -> Path | Literal["none"]:
    """A folder as in `parse_folder`, or "none". Raises `ValueError`."""
    return "none" if value == "none" else parse_folder(value)


def parse_interval(value: object) -> int | Literal["none"]:
    """Tokens between two positions, of 64 or "64", or "none". Raises `ValueError`."""
    if value == "none":
        return "none"
    tokens = int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value
    if not (is_count(tokens) and tokens <= MAX_INT):
        raise ValueError("must be 'none', 0, or a number of tokens")
    return tokens


def parse_tokens(value: object) -> int:
    """Tokens of 8192, "8192", "8k" (8,000) or "8K" (8,192), as in vLLM. Raises `ValueError`."""
    tokens = value
    if isinstance(value, str) and (match := _TOKENS.fullmatch(value.strip())):
        number, unit = match.groups()
        base = 1000 if unit.islower() else 1024
        if unit or number.isdigit():
            tokens = int(float(number) * base ** " kmg".index(unit.lower() or " "))
    if not (is_count(tokens, 1) and tokens <= MAX_INT):
        raise ValueError("must be a number of tokens, as 8192, 8k (8,000) or 8K (8,192)")
    return tokens


# Bytes as an integer, or a share of the free memory as a float.
MemorySize = Annotated[int | float, ReadBy(parse_memory)]
ByteSize = Annotated[int, ReadBy(parse_bytes)]
TokenCount = Annotated[int, ReadBy(parse_tokens)]
FilePath = Annotated[Path, ReadBy(parse_path)]
FolderPath = Annotated[Path, ReadBy(parse_folder)]
CacheFolder = Annotated[Path | Literal["none"], ReadBy(parse_folder_or_none)]
RetentionInterval = Annotated[int | Literal["none"], ReadBy(parse_interval)]
