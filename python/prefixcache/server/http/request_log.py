"""What is known of an answer when it ends, and its one line in the log."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import Scope

from prefixcache.config.checked import shortened
from prefixcache.config.logs import with_fields

# Whose name operators know from the lines that they filter.
logger = logging.getLogger("prefixcache.server.jobs.context")

CLIENT_LEFT = 499
_MOST_PATH_CHARACTERS = 256
QUIET_PATHS = frozenset({"/health", "/load", "/metrics", "/ping", "/ready"})
"""They are polled, and would fill logs and collectors of traces."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the log tells of an answer, and its head of a `warning`.

    `failed_status` is set when a stream ended with an error; `num_events` of one are counted where
    they have numbers. Times are in seconds of `time.monotonic`: when the requests came, the first
    of them was started by the scheduler, the first token was there, and all had ended.
    """

    model: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    finish_reasons: Collection[str] = ()
    failed_status: int | None = None
    num_events: int = 0
    warning: str = ""
    arrived_at: float | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None

    def warn(self, text: str) -> None:
        """Adds to the warning; `text` is of characters that a header may hold."""
        self.warning = "; ".join(filter(None, (self.warning, text)))

    @property
    def finish_reason(self) -> str:
        """Of all choices."""
        return "+".join(sorted(self.finish_reasons))

    @property
    def queue_seconds(self) -> float | None:
        """Until the scheduler started the first request."""
        return _between(self.arrived_at, self.started_at)

    @property
    def first_token_seconds(self) -> float | None:
        """Until the first token."""
        return _between(self.arrived_at, self.first_token_at)


def log_request(scope: Scope, status: int, seconds: float, outcome: Outcome) -> None:
    """Writes the line; that of a probe or scrape at `debug`."""
    level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
    if not logger.isEnabledFor(level):
        return
    phrase = "Client Closed Request" if status == CLIENT_LEFT else HTTPStatus(status).phrase
    path = logged_path(scope)
    client, request_id = (scope.get("client") or ("-",))[0], scope["state"]["request_id"]
    fields: dict[str, Any] = {
        "event": "request",
        "message": f"{scope['method']} {path}: {status} {phrase}",
        "request_id": request_id,
        "client": client,
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        **_of_answer(outcome),
    }
    logger.log(
        level,
        "%s in %.3f s%s%s from %s (%s)",
        fields["message"],
        seconds,
        _times(outcome),
        _counts(outcome),
        client,
        request_id,
        extra=with_fields(**fields),
    )


def logged_path(scope: Scope) -> str:
    """The path as lines and traces hold it: clients may send 64 KB of one."""
    return shortened(scope["path"].encode("unicode_escape").decode(), _MOST_PATH_CHARACTERS)


def _of_answer(outcome: Outcome) -> dict[str, Any]:
    if not outcome.num_prompt_tokens:
        return {}
    return {
        "model": outcome.model,
        "prompt_tokens": outcome.num_prompt_tokens,
        "cached_tokens": outcome.num_cached_tokens,
        "completion_tokens": outcome.num_completion_tokens,
        "finish_reason": outcome.finish_reason,
        "queue_seconds": _rounded(outcome.queue_seconds),
        "first_token_seconds": _rounded(outcome.first_token_seconds),
    }


def _times(outcome: Outcome) -> str:
    queue, first = outcome.queue_seconds, outcome.first_token_seconds
    if queue is None or first is None:
        return ""
    return f" ({queue:.3f} in the queue, first token at {first:.3f})"


def _counts(outcome: Outcome) -> str:
    if not outcome.num_prompt_tokens:
        return ""
    return (
        f", {outcome.num_prompt_tokens} prompt tokens ({outcome.num_cached_tokens} cached), "
        f"{outcome.num_completion_tokens} completion tokens, {outcome.finish_reason}"
    )


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
