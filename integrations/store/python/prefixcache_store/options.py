"""Options that an engine passes on as its configuration has them, unchecked."""

from __future__ import annotations

import math


def positive(name: str, value: object) -> int | float:
    """The value. Raises `ValueError`, which names the option, if it is no positive number."""
    if isinstance(value, int | float) and value is not True and 0 < value < math.inf:
        return value
    raise ValueError(f'The option "{name}" must be a positive number, not {value!r}.')
