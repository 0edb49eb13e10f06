"""How far a process of a run came, so that another one can go on after what ended it."""

from __future__ import annotations

from pathlib import Path

# The exit status of a process whose device answers no more calls: what is left wants another one.
LOST = 75


class Progress:
    """Counts the parts of a process in a file, which is gone once all were begun and ended."""

    def __init__(self, file: Path, begun: int) -> None:
        """`begun` parts are those of earlier processes."""
        self._file = file
        self._begun = begun
        self._seen = 0

    def is_left(self) -> bool:
        """Whether the next part, in the same order each time, was begun by no earlier process."""
        self._seen += 1
        return self._seen > self._begun

    def begin(self) -> None:
        """Counts a part that is left."""
        self._begun += 1
        self._file.write_text(str(self._begun))

    def end(self) -> None:
        """Nothing is left."""
        self._file.unlink(missing_ok=True)


def device_is_lost() -> bool:
    """Whether the last error stays: each later CUDA call of this process raises it again."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
