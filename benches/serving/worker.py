"""One contender in a process of its own: tasks come as JSON lines, times go back as JSON lines.

Runs under the contender's own interpreter, so it imports nothing of this project: only `ours.py`
does. An idle worker waits on its pipe and costs the others nothing.

    worker.py NAME '{"model": ..., "dtype": ..., ...}'
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import TextIO


def main(name: str, options: str) -> None:
    replies = _private_stdout()
    contender = importlib.import_module(f"contenders.{name}").Contender(**json.loads(options))
    _reply(replies, {"ready": contender.version})
    for line in sys.stdin:
        task = json.loads(line)
        _reply(replies, getattr(contender, task.pop("do"))(**task))


def _private_stdout() -> TextIO:
    """The pipe to the parent; whatever libraries print goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _reply(replies: TextIO, value: object) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
