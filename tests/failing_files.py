"""Each call on the files of --kv-cache-dir fails, one after the other: no answer changes.

    FAILING_FOLDER=FOLDER LD_PRELOAD=SHIM python tests/failing_files.py MODEL [EVERY]

SHIM is built of failing_files.c. One engine after the other continues with the folder, and of each
the n-th call fails; then each finds a damaged file, and others to remove. Prints how many calls
failed in both; what is wrong ends it with status 1.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prefixcache import LLM, SamplingParams
from prefixcache.exceptions import InvalidRequestError, OutOfMemoryError

FOLDER = Path(os.environ["FAILING_FOLDER"])
ERRORS = (errno.ENOSPC, errno.EIO)
PROMPTS = [[7 + prompt] * (40 + 20 * prompt) for prompt in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=2)


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def ask(llm: LLM) -> list[Any]:
    answers = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(answer.outputs[0].token_ids, answer.outputs[0].logprobs) for answer in answers]


def attempt(command: Callable[[], object]) -> None:
    """It may be refused, with the reason."""
    try:
        command()
    except (InvalidRequestError, OutOfMemoryError) as error:
        if not re.search("its disk|file system", str(error)):
            raise


def change(llm: LLM) -> None:
    """All that changes the file."""
    llm.control.reset_prefix_cache()
    attempt(partial(llm.control.resize, num_blocks=16))
    attempt(partial(llm.control.resize, num_blocks=32))
    attempt(llm.control.sleep)
    attempt(llm.control.wake_up)
    if llm.control.is_sleeping:
        llm.control.wake_up()


def live(model: str, folder: Path | None) -> list[Any]:
    """All answers of an engine, over a changing cache."""
    lines = Lines()
    logging.getLogger("prefixcache").addHandler(lines)
    llm = LLM(model, dtype="float32", num_blocks=32, kv_cache_dir=folder)
    if folder is not None:
        assert ("were restored" in lines.text) != ("kept in memory alone" in lines.text), lines.text
    answers = [ask(llm), ask(llm)]
    change(llm)
    return [*answers, ask(llm), ask(llm)]


def in_child(model: str, folder: Path | None, number: int, expected: list[Any] | None) -> int:
    """Calls of a process in which the `number`-th fails; it ends this one where it is wrong."""
    shim = ctypes.CDLL(None)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            shim.fail_calls(ctypes.c_long(number), ctypes.c_long(1), ERRORS[number % 2])
            answers = live(model, folder)
            assert expected is None or answers == expected, "an answer is another"
            os.write(write, shim.calls_seen().to_bytes(8, "little"))
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is wrong
            print(f"call {number}: {error!r}", flush=True)
            os._exit(1)
    os.close(write)
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit(1)
    with os.fdopen(read, "rb") as pipe:
        return int.from_bytes(pipe.read(8), "little")


def main(model: str, every: int) -> None:
    logging.getLogger("prefixcache").setLevel(logging.INFO)
    expected = live(model, None)
    assert expected[0] == expected[1] == expected[2] == expected[3]
    counts = [0, 0]
    for place, prepare in enumerate((lambda: None, spoil)):
        prepare()
        while in_child(model, FOLDER, counts[place], expected) > counts[place]:
            counts[place] += every
            prepare()
    print(*counts)


def spoil() -> None:
    """The folder's own file is damaged, and two others are there."""
    (own,) = (path for path in FOLDER.iterdir() if not path.name.startswith("other"))
    own.write_bytes(b"damaged")
    for name in ("other-1.kv", "other-2.kv"):
        (FOLDER / name).touch(mode=0o600)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
