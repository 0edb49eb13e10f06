"""Compiles a grammar in a process that has bounded time and memory.

Some schemas and expressions take minutes or gigabytes to compile whatever llguidance's own limits
are, and nothing can stop a thread. So a server lets a grammar that is new be compiled here first.
What passes takes as little of the server itself.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import astuple
from importlib import import_module
from typing import IO, NamedTuple, cast

import numpy as np

from prefixcache.exceptions import GrammarError, QueueFullError, SlowGrammarError
from prefixcache.text.grammar.vocabulary import Vocabulary
from prefixcache.types.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

MAX_SECONDS = 3.0
QUICK_SECONDS = 0.25
"""Processor time that compiling may take: at all, and for grammars that keep others waiting."""
_MAX_BYTES = 2**28
# Against hanging: an answer comes when the processor time is over, later on a machine that is busy,
# and soon after the client has gone.
_MAX_WAIT_SECONDS = 120
_POLL_SECONDS = 0.05
_NUM_STEPS = 24
"""Tokens that are followed: some grammars are simple to compile and impossible to follow."""


class SandboxResult(NamedTuple):
    """What compiling took, in bytes, or why it failed; `is_slow` where its time was over."""

    num_bytes: int
    error: str | None
    is_slow: bool = False


class Sandbox:
    """Compiles grammars of one vocabulary, one after another, in another process.

    Each may take `seconds` of processor time. The process starts with the first grammar, and ends
    with this one, however that ends.
    """

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._seconds = seconds
        self.is_quick = seconds < MAX_SECONDS
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        output: StructuredOutput,
        vocabulary: Vocabulary,
        cancelled: threading.Event | None = None,
    ) -> int:
        """How many bytes the compiled grammar takes.

        Raises `GrammarError` when it cannot be compiled within the limits, `SlowGrammarError` when
        a longer sandbox may do, `QueueFullError` when the machine has no time or memory for it, and
        `CancelledError` soon after `cancelled` is set.
        """
        with self._lock:
            result = self._ask(output, vocabulary, cancelled)
        if cancelled is not None and cancelled.is_set():
            raise CancelledError
        if result is None:
            raise QueueFullError(
                "The machine has no time or memory to compile a grammar now.", retry_after=10
            )
        if result.error is not None:
            raise (SlowGrammarError if result.is_slow and self.is_quick else GrammarError)(
                result.error
            )
        return result.num_bytes

    def close(self) -> None:
        """Ends the process; it starts again with the next grammar."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _ask(
        self,
        output: StructuredOutput,
        vocabulary: Vocabulary,
        cancelled: threading.Event | None,
    ) -> SandboxResult | None:
        """None where no answer came in time, or a process was lost or could not be started."""
        process, self._process = self._process, None  # until it has answered
        answer = b""
        try:
            if process is None:
                process = _start()
                _introduce(process, vocabulary)
            _send(process, (self._seconds, astuple(output)))
            if _wait_for_answer(process, cancelled):
                answer = cast("IO[bytes]", process.stdout).readline()
        except (OSError, MemoryError) as error:
            logger.warning("A grammar could not be compiled: %s", error)
        if process is None:
            return None
        if not answer.endswith(b"\n"):
            _end(process)
            return None
        self._process = process
        fields = json.loads(answer)
        return None if fields is None else SandboxResult(*fields)


class Sandboxes:
    """A process for grammars that compile at once, and one for the few that do not."""

    def __init__(self) -> None:
        self.quick = Sandbox(QUICK_SECONDS)
        self.thorough = Sandbox()

    def close(self) -> None:
        """Ends the processes; they start again with the next grammar."""
        self.quick.close()
        self.thorough.close()


_TOO_MUCH = (
    f"it takes more than {MAX_SECONDS:.0f} seconds or {_MAX_BYTES >> 20} MiB to compile; make it "
    "simpler or its numbers smaller"
)


def _wait_for_answer(process: subprocess.Popen[bytes], cancelled: threading.Event | None) -> bool:
    """Whether an answer came in time. After `cancelled` the answer comes soon."""
    waiting = select.poll()  # `select` takes no descriptor above 1023
    waiting.register(cast("IO[bytes]", process.stdout), select.POLLIN)
    end = time.monotonic() + _MAX_WAIT_SECONDS
    while not waiting.poll(_POLL_SECONDS * 1000):
        if time.monotonic() > end:
            return False
        if cancelled is not None and cancelled.is_set():
            process.send_signal(signal.SIGUSR1)
    return True


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "prefixcache.text.grammar.sandbox"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt from the keyboard is not for it
    )


def _introduce(process: subprocess.Popen[bytes], vocabulary: Vocabulary) -> None:
    _send(process, (vocabulary.tokens, vocabulary.special_token_ids, vocabulary.eos_token_ids))
    cast("IO[bytes]", process.stdout).readline()  # from here on it takes signals


def _send(process: subprocess.Popen[bytes], message: object) -> None:
    stdin = cast("IO[bytes]", process.stdin)
    pickle.dump(message, stdin)
    stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# Everything below runs in that process.


def main() -> None:
    """Answers what comes on standard input, each in a child with limits, until that ends."""
    import_module("prefixcache.text.grammar.compiler")  # once for all children
    source, target = sys.stdin.buffer, sys.stdout.buffer
    child = 0

    def end_child(*_: object) -> None:
        if child:
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, end_child)
    target.write(b"ready\n")
    target.flush()
    tokens, special, eos = pickle.load(source)
    vocabulary = Vocabulary(tokens, special, eos, encode=_Longest(tokens))
    _ = vocabulary.backend  # once for all children
    while True:
        try:
            seconds, fields = pickle.load(source)
        except EOFError:
            return
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where a failed allocation is reported
            with open(writing, "wb") as pipe:
                pipe.write(_answer(_tried(StructuredOutput(*fields), vocabulary, seconds)))
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = pipe.readline()
        # It stays a process that can be killed until its status is taken, which is when none waits.
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        ended, child = child, 0
        _, status = os.waitpid(ended, 0)
        # One answer a grammar, also where the child was killed behind its own: a second would be
        # taken for that of the next grammar.
        if not answer.endswith(b"\n"):
            answer = _answer(_ended(status))
        target.write(answer)
        target.flush()


def _ended(status: int) -> SandboxResult | None:
    """What the status of a child that gave no answer says of its grammar.

    Nothing where it was killed: a system that is out of memory kills whom it finds.
    """
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if ended_by == signal.SIGKILL:
        return None
    return SandboxResult(0, _TOO_MUCH, is_slow=ended_by == signal.SIGPROF)


def _answer(result: SandboxResult | None) -> bytes:
    return json.dumps(result).encode() + b"\n"


def _tried(output: StructuredOutput, vocabulary: Vocabulary, seconds: float) -> SandboxResult:
    virtual, before = _memory()
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
    resource.setrlimit(resource.RLIMIT_AS, (virtual + _MAX_BYTES, virtual + _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _follow(output, vocabulary)
    except GrammarError as error:
        return SandboxResult(0, str(error))
    except MemoryError:
        return SandboxResult(0, _TOO_MUCH)
    except Exception as error:  # noqa: BLE001 - whatever the compiler raised, the client learns it
        return SandboxResult(0, f"the compiler failed with {type(error).__name__}")
    return SandboxResult(max(_memory()[1] - before, 0), None)


def _follow(output: StructuredOutput, vocabulary: Vocabulary) -> None:
    from prefixcache.text.grammar.compiler import compile_grammar

    matcher, first = compile_grammar(output, vocabulary)
    words = first.copy()
    for step in range(_NUM_STEPS):
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token_id = int(allowed[(step * 7919) % len(allowed)])
        if token_id in vocabulary.eos_token_ids:
            return
        try:
            matcher.follow(token_id)
            matcher.write(words)
        except GrammarError as error:
            raise GrammarError(f"it is too complex to follow: {error}") from None


def _memory() -> tuple[int, int]:
    """Virtual and resident bytes of this process."""
    with open("/proc/self/statm") as file:
        virtual, resident = file.read().split()[:2]
    size = resource.getpagesize()
    return int(virtual) * size, int(resident) * size


class _Longest:
    """Tokens of a text, the longest first: which ones they are plays no part here."""

    def __init__(self, tokens: tuple[bytes, ...]) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(tokens)}
        self._longest = max(map(len, tokens), default=1)

    def __call__(self, text: str) -> list[int]:
        rest, token_ids = text.encode(), list[int]()
        while rest:
            lengths = range(min(self._longest, len(rest)), 0, -1)
            length = next((n for n in lengths if rest[:n] in self._ids), None)
            if length is None:
                return token_ids
            token_ids.append(self._ids[rest[:length]])
            rest = rest[length:]
        return token_ids


if __name__ == "__main__":
    main()
