"""Compiles a grammar in a process that may take so much time and memory, and no more.

Some schemas and expressions take minutes or gigabytes to compile whatever llguidance's own limits
are, and nothing can stop a thread. So a server lets a grammar that is new be compiled here first.
What passes takes as little of the server itself.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import subprocess
import sys
import threading
from dataclasses import astuple
from typing import IO, NamedTuple

import numpy as np

from prefixcache.exceptions import GrammarError, QueueFullError
from prefixcache.grammar.compiler import compile_grammar
from prefixcache.grammar.vocabulary import Vocabulary
from prefixcache.structured_output import StructuredOutput

_MAX_SECONDS = 3
_MAX_BYTES = 2**28
# A limit on processor time does not end what the machine has no processor for.
_MAX_WAIT_SECONDS = 30
_NUM_STEPS = 24
"""Tokens that are followed: some grammars are simple to compile and impossible to follow."""


class TrialResult(NamedTuple):
    """What compiling took, in bytes, or why it failed."""

    num_bytes: int
    error: str | None


class Trial:
    """Compiles grammars of one vocabulary, one after another, in another process.

    It starts with the first grammar, and ends with this process, however that ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, output: StructuredOutput, vocabulary: Vocabulary) -> int:
        """How many bytes the compiled grammar takes.

        Raises `GrammarError` when it cannot be compiled within the limits, `QueueFullError` when
        too many others wait to be.
        """
        if not self._lock.acquire(timeout=_MAX_WAIT_SECONDS):
            raise QueueFullError("Too many grammars wait to be compiled.", retry_after=10)
        try:
            result = self._ask(output, vocabulary)
        finally:
            self._lock.release()
        if result.error is not None:
            raise GrammarError(result.error)
        return result.num_bytes

    def close(self) -> None:
        """Ends the process; it starts again with the next grammar."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _ask(self, output: StructuredOutput, vocabulary: Vocabulary) -> TrialResult:
        process = self._process or _start(vocabulary)
        self._process = None  # until it has answered
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(astuple(output), process.stdin)
            process.stdin.flush()
            waiting = select.poll()  # `select` takes no descriptor above 1023
            waiting.register(process.stdout, select.POLLIN)
            ready = waiting.poll(_MAX_WAIT_SECONDS * 1000)
            answer = process.stdout.readline() if ready else b""
        except OSError:
            answer = b""
        if not answer:
            _end(process)
            return TrialResult(0, _TOO_MUCH)
        self._process = process
        return TrialResult(*json.loads(answer))


_TOO_MUCH = (
    f"it takes more than {_MAX_SECONDS} seconds or {_MAX_BYTES >> 20} MiB to compile; make it "
    "simpler or its numbers smaller"
)


def _start(vocabulary: Vocabulary) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "prefixcache.grammar.trial"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt from the keyboard is not for it
    )
    assert process.stdin is not None
    told = (vocabulary.tokens, vocabulary.special_token_ids, vocabulary.eos_token_ids)
    pickle.dump(told, process.stdin)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# Everything below runs in that process.


def main() -> None:
    """Answers what comes on standard input, each in a child with limits, until that ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tokens, special, eos = pickle.load(source)
    vocabulary = Vocabulary(tokens, special, eos, encode=_Longest(tokens))
    _ = vocabulary.backend  # once for all children
    while True:
        try:
            output = StructuredOutput(*pickle.load(source))
        except EOFError:
            return
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a failed allocation would be told there
            _answer(target, _tried(output, vocabulary))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            _answer(target, TrialResult(0, _TOO_MUCH))


def _answer(target: IO[bytes], result: TrialResult) -> None:
    target.write(json.dumps(result).encode() + b"\n")
    target.flush()


def _tried(output: StructuredOutput, vocabulary: Vocabulary) -> TrialResult:
    virtual, before = _memory()
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_SECONDS, _MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (virtual + _MAX_BYTES, virtual + _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _follow(output, vocabulary)
    except GrammarError as error:
        return TrialResult(0, str(error))
    except MemoryError:
        return TrialResult(0, _TOO_MUCH)
    return TrialResult(max(_memory()[1] - before, 0), None)


def _follow(output: StructuredOutput, vocabulary: Vocabulary) -> None:
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
        rest, found = text.encode(), list[int]()
        while rest:
            lengths = range(min(self._longest, len(rest)), 0, -1)
            length = next((n for n in lengths if rest[:n] in self._ids), None)
            if length is None:
                return found
            found.append(self._ids[rest[:length]])
            rest = rest[length:]
        return found


if __name__ == "__main__":
    main()
