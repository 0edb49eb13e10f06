"""Requests and their answers, token by token, for `prefixcache rerun`: docs/reference/recording.md.

The file holds what users wrote.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from prefixcache.config.checked import is_object
from prefixcache.kv.recordings.record_writer import RecordWriter, line
from prefixcache.types.request import FinishReason, Request, RequestOutput
from prefixcache.types.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

VERSION = 1

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
            self.prompt_logprobs = [scored and scored.logprob for scored in output.prompt_logprobs]
        self.staleness = max(self.staleness, output.prompt.hit_staleness)
        self.finish = output.ending.finish_reason


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
        facts = {
            "id": self.request.request_id,
            "weights": self.weights,
            "mixed": self.is_mixed,
            "params": PARAMS.dump_python(params, mode="json"),
            "prompt": self.request.prompt_token_ids.tolist(),
        }
        return line(facts | asdict(self.answer))


class RequestRecords(RecordWriter[_Open]):
    """The file of `--record-requests`; one thread makes all calls.

    `about` is what bits depend on besides the requests.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        super().__init__(path, "record_requests")
        self._open: dict[str, _Open] = {}
        self.begin({"prefixcache_requests": VERSION, **about})
        logger.info("Requests and answers are recorded, with their text, in %s.", self.path)

    def add(self, request: Request, seed: int) -> None:
        """A request has come, which is sampled with this seed."""
        self._open[request.request_id] = _Open(request, seed)

    def compute(self, request_ids: Iterable[str], version: int, weights: str) -> None:
        """The next step computes a part of these requests, with the weights of this name."""
        for request_id in request_ids:
            entry = self._open[request_id]
            if entry.version is None:
                entry.version, entry.weights = version, weights
            entry.is_mixed |= entry.version != version

    def restart(self, request_ids: Iterable[str]) -> None:
        """What was computed of these requests is void."""
        for request_id in request_ids:
            entry = self._open[request_id]
            self._open[request_id] = _Open(entry.request, entry.seed)

    def push(self, output: RequestOutput) -> None:
        """What the caller of a request gets; the last of it writes the request."""
        entry = self._open[output.request_id]
        entry.answer.push(output)
        if output.finished:
            del self._open[output.request_id]
            self.put(entry)

    def forget_all(self) -> None:
        """No request is in flight any more."""
        self._open.clear()

    def line_of(self, event: _Open) -> str:  # noqa: D102
        return event.line()

    def num_tokens(self, event: _Open) -> int:  # noqa: D102
        return event.size


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What bits depend on besides requests, and the requests; a last line that was cut is left out.

    Raises `ValueError` for another file, and `OSError`.
    """
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    about, *records = map(json.loads, lines or ["null"])
    if not is_object(about) or about.get("prefixcache_requests") != VERSION:
        raise ValueError(f"it is no record of requests, version {VERSION}")
    return about, records
