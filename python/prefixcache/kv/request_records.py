"""Requests and their answers, token by token, for `prefixcache rerun`: docs/reference/recording.md.

The file holds what users wrote. A thread writes it; whatever goes wrong there ends the recording
and nothing else.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pydantic import TypeAdapter

from prefixcache.kv.trace_lines import line
from prefixcache.kv.trace_writer import RecordFile
from prefixcache.types.request import FinishReason, Request, RequestOutput
from prefixcache.types.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

VERSION = 1
MAX_WAITING_TOKENS = 1 << 26

PARAMS = TypeAdapter(SamplingParams)


@dataclass(slots=True)
class WholeAnswer:
    """An answer put together from a request's outputs; log probabilities are of tokens taken."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    prompt_logprobs: list[float | None] | None = None
    staleness: int = 0
    finish: FinishReason | None = None

    def push(self, output: RequestOutput) -> None:
        """Adds what the caller gets."""
        self.tokens += output.token_ids
        self.logprobs += [taken.logprob for taken in output.logprobs]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [one and one.logprob for one in output.prompt_logprobs]
        self.staleness = max(self.staleness, output.hit_staleness)
        self.finish = output.finish_reason


@dataclass(slots=True)
class _Open:
    """A request in flight, and what came of it under the weights of `version`."""

    request: Request
    seed: int
    version: int | None = None
    weights: str = ""
    is_mixed: bool = False
    answer: WholeAnswer = field(default_factory=WholeAnswer)

    @property
    def size(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.prompt_token_ids) + len(self.answer.tokens)

    def line(self) -> str:
        """The request as it stands in the file."""
        params = replace(self.request.params, seed=self.seed)
        known = {
            "id": self.request.request_id,
            "weights": self.weights,
            "mixed": self.is_mixed,
            "params": PARAMS.dump_python(params, mode="json"),
            "prompt": self.request.prompt_token_ids.tolist(),
        }
        return line(known | asdict(self.answer))


class RequestRecords:
    """The file of `--record-requests`; one thread makes all calls.

    It is made at once, under the next free name where there is one already: `path` says which.
    `about` is what bits depend on besides the requests. Raises `ConfigError` where the file cannot
    be made.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._file = RecordFile(path, "record_requests")
        self._file.header = {"prefixcache_requests": VERSION, **about}
        self.path = self._file.path
        self._open: dict[str, _Open] = {}
        self._put = self._taken = 0
        self._has_stopped = False
        # Of C, so that `close` may be called while garbage is collected in the middle of any call.
        self._waiting = SimpleQueue[Callable[[], None] | None]()
        self._waiting.put(self._file.begin)
        self._thread = threading.Thread(target=self._run, name="request-recording", daemon=True)
        self._thread.start()
        logger.info("Requests and answers are recorded, with their text, in %s.", self.path)

    def add(self, request: Request, seed: int) -> None:
        """A request has come, which is sampled with this seed."""
        self._open[request.request_id] = _Open(request, seed)

    def compute(self, request_ids: Iterable[str], version: int, weights: str) -> None:
        """The next step computes a part of these requests, with the weights of this name."""
        for request_id in request_ids:
            one = self._open[request_id]
            if one.version is None:
                one.version, one.weights = version, weights
            one.is_mixed |= one.version != version

    def restart(self, request_ids: Iterable[str]) -> None:
        """What was computed of these requests is void."""
        for request_id in request_ids:
            one = self._open[request_id]
            self._open[request_id] = _Open(one.request, one.seed)

    def push(self, output: RequestOutput) -> None:
        """What the caller of a request gets; the last of it writes the request."""
        one = self._open[output.request_id]
        one.answer.push(output)
        if output.finished:
            del self._open[output.request_id]
            self._write(one)

    def forget_all(self) -> None:
        """No request is in flight any more."""
        self._open.clear()

    def close(self) -> None:
        """Writes what waits, and closes the file. Also while garbage is collected."""
        self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _write(self, one: _Open) -> None:
        if self._has_stopped:
            return
        self._put += one.size
        if self._put - self._taken > MAX_WAITING_TOKENS:
            self._stop("more waits to be written than may")
        else:
            self._waiting.put(partial(self._write_now, one))

    def _write_now(self, one: _Open) -> None:
        self._taken += one.size
        self._file.write([one.line()])
        self._file.check()

    def _run(self) -> None:
        while (write := self._waiting.get()) is not None:
            self._guarded(write)
        self._file.close()

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            if not self._has_stopped:
                write()
        except OSError as error:
            self._stop(error.strerror or str(error))
        except Exception as error:
            logger.exception("A recording failed.")
            self._stop(repr(error))

    def _stop(self, reason: str) -> None:
        logger.error("The recording %s has stopped: %s. Serving goes on.", self.path, reason)
        self._has_stopped = True


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What bits depend on besides requests, and the requests; a last line that was cut is left out.

    Raises `ValueError` for another file, and `OSError`.
    """
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    about, *records = map(json.loads, lines or ["null"])
    if not isinstance(about, dict) or about.get("prefixcache_requests") != VERSION:
        raise ValueError(f"it is no record of requests, version {VERSION}")
    return about, records
