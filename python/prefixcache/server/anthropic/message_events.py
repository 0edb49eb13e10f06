"""The answers of `/v1/messages`: content blocks as they come, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic_core import from_json, to_json

from prefixcache.config.checked import is_object
from prefixcache.server.http.errors import anthropic_error
from prefixcache.server.jobs.answers import AnswerChoice, comparison_fields, usage
from prefixcache.server.jobs.caching import written_by_ttl
from prefixcache.server.jobs.diagnosis import anthropic_comparison
from prefixcache.server.jobs.job_maker import Job
from prefixcache.text.chat.message import MessageDelta
from prefixcache.types.request import RequestOutput

Event = dict[str, Any]

_HOUR = 3600
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageForm:
    """Anthropic's `message` objects and their events. `request_id` goes with errors."""

    is_named: ClassVar[bool] = True

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._num_blocks = 0
        self._open: tuple[str, int | None] | None = None  # the type, and a call's index
        self._begun = False

    def body(self, job: Job, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """The whole answer."""
        choice = choices[0]
        return {
            **_head(job),
            "content": _content(choice),
            **_end(choice),
            "usage": message_usage(job, choice),
            **_compared(job),
        }

    def begin(self, job: Job) -> Iterable[Event]:  # noqa: ARG002
        """Nothing: the first event tells what was read from the cache."""
        return ()

    def events(
        self,
        job: Job,
        choices: Sequence[AnswerChoice],
        index: int,
        output: RequestOutput,  # noqa: ARG002
    ) -> Iterator[Event]:
        """Events of what an output added."""
        choice = choices[index]
        if not self._begun:
            self._begun = True
            counts = {**message_usage(job, choice), "output_tokens": 0}
            ended = {"stop_reason": None, "stop_sequence": None}
            message: dict[str, Any] = {**_head(job), "content": [], **ended, "usage": counts}
            message |= _compared(job)
            yield {"type": "message_start", "message": message}
        yield from self._add(choice.delta)

    def end(self, job: Job, choices: Sequence[AnswerChoice]) -> Iterator[Event]:
        """Events of the last block's end, and of the message's."""
        choice = choices[0]
        yield from self._close()
        usage = message_usage(job, choice)
        yield {"type": "message_delta", "delta": _end(choice), "usage": usage}
        yield {"type": "message_stop"}

    def failed(self, job: Job, error: Exception) -> Event:  # noqa: ARG002
        """The last event of an answer that failed."""
        return anthropic_error(error, self._request_id)

    def _add(self, delta: MessageDelta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._start(
                "thinking", {"type": "thinking", "thinking": "", "signature": ""}
            )
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._start("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls:
            if call.name is not None:
                block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name}
                block["input"] = {}
                yield from self._start("tool_use", block, call.index)
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _start(
        self, kind: str, block: Mapping[str, Any], call: int | None = None
    ) -> Iterator[Event]:
        if self._open == (kind, call):
            return
        yield from self._close()
        self._open = kind, call
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._num_blocks += 1

    def _delta(self, delta: Mapping[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}


def _head(job: Job) -> dict[str, Any]:
    return {"id": job.call.id, "type": "message", "role": "assistant", "model": job.model}


def _compared(job: Job) -> dict[str, Any]:
    return comparison_fields(job, "diagnostics", anthropic_comparison)


def _content(choice: AnswerChoice) -> Sequence[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for delta, _ in choice.message.parts():
        if delta.reasoning:
            blocks.append({"type": "thinking", "thinking": delta.reasoning, "signature": ""})
        if delta.content:
            blocks.append({"type": "text", "text": delta.content})
        for call in delta.tool_calls:
            values = _object(call.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": values})
    return blocks


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; none where the answer ended within them.

    Nor where no JSON can be written of what is read: half of a pair of surrogates, deep nesting.
    """
    try:
        # 1e999 is JSON, and read as an infinity, which is none.
        value = from_json(to_json(from_json(arguments), inf_nan_mode="null"))
    except ValueError:
        return {}
    return value if is_object(value) else {}


def _end(choice: AnswerChoice) -> dict[str, Any]:
    by, reason = choice.last.ending.stop_reason, choice.finish_reason or ""
    if reason == "stop":
        by_text = isinstance(by, str)
        return {
            "stop_reason": "stop_sequence" if by_text else "end_turn",
            "stop_sequence": by if by_text else None,
        }
    return {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": None}


def message_usage(job: Job, choice: AnswerChoice) -> dict[str, Any]:
    """Anthropic's counts: `input_tokens` is what was neither read from the cache nor kept."""
    counts = usage(choice.counts)
    details = counts["prompt_tokens_details"]
    read, written = details["cached_tokens"], details["cache_write_tokens"]
    retention = job.requests[0].cache.retention
    hour = written_by_ttl(retention, read, written).get(_HOUR, 0)
    return {
        "input_tokens": max(counts["prompt_tokens"] - read - written, 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written - hour,
            "ephemeral_1h_input_tokens": hour,
        },
        "output_tokens": counts["completion_tokens"],
        "service_tier": "standard",
    }
