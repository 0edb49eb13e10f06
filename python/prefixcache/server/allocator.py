"""What the C library's allocator keeps of memory that was freed."""

from __future__ import annotations

import ctypes
import os

# mallopt's number for the most arenas, in glibc's malloc.h.
_M_ARENA_MAX = -8
_NUM_ARENAS = 2


def bound_arenas() -> None:
    """Lets glibc make two arenas, where `MALLOC_ARENA_MAX` does not say how many.

    It would make up to eight a core. What threads free stays in the arena they took it from, and
    is of no use to other threads, so resident memory would grow for hours. Threads that ran before
    keep their arenas. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)
