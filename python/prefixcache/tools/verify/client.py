"""Asks any OpenAI-compatible server, streaming, and finds out how much it tells of its answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import httpx

from prefixcache.tools.openai_api import (
    RefusedStreamError,
    StreamError,
    cached_tokens,
    check_ending,
    choice_text,
    cut,
    first_card,
    has_hit_thresholds,
    reason,
    stream_events,
)
from prefixcache.tools.verify.comparison import ServerAnswer, TokenScore
from prefixcache.tools.verify.questions import Question
from prefixcache.tools.verify.verify_options import VerifyOptions

Body = dict[str, Any]


class Asker:
    """Sends questions to one server.

    `asks_logprobs` and `asks_usage` say what requests ask for besides the answer; `settle` finds
    out what the server takes.
    """

    def __init__(
        self, client: httpx.AsyncClient, options: VerifyOptions, on_done: Callable[[], object]
    ) -> None:
        self._client = client
        self._options = options
        self._on_done = on_done
        self.model = options.model or ""
        self.asks_logprobs = options.top_logprobs > 0
        self.asks_usage = True
        self._asks_no_threshold = False
        self.notes: list[str] = []

    async def settle(self, question: Question) -> None:
        """Asks once, with less and less besides the answer. Raises `StreamError`."""
        card = await self._card()
        self.model = self.model or str(card["id"])
        self._asks_no_threshold = has_hit_thresholds(card)
        wants_logprobs = (True, False) if self.asks_logprobs else (False,)
        refusals = list[RefusedStreamError]()
        for self.asks_logprobs, self.asks_usage in product(wants_logprobs, (True, False)):
            try:
                answer = await self.ask(question)
            except RefusedStreamError as error:
                refusals.append(error)
                continue
            self._take_notes(refusals, answer, wants_logprobs=wants_logprobs[0])
            return
        raise refusals[-1]

    async def ask(
        self, question: Question, extra: Mapping[str, Any] | None = None, **changes: Any
    ) -> ServerAnswer:
        """One greedy answer. `extra` and `changes` are fields of the body. Raises `StreamError`."""
        body = self._body(question) | dict(extra or {}) | changes
        try:
            return await asyncio.wait_for(self._answer(body), self._options.timeout)
        except asyncio.TimeoutError:  # Another class than TimeoutError on Python 3.10.
            raise StreamError(f"No answer in {self._options.timeout:g} s.") from None
        except httpx.HTTPError as error:
            message = f"{self._client.base_url} does not answer: {reason(error)}"
            raise StreamError(message) from error
        finally:
            self._on_done()

    async def _card(self) -> dict[str, Any]:
        try:
            models = await self._client.get("v1/models", timeout=self._options.timeout)
        except httpx.HTTPError as error:
            message = f"No server answers at {self._client.base_url}: {reason(error)}"
            raise StreamError(message) from error
        return first_card(models, self.model)

    def _take_notes(
        self, refusals: Sequence[RefusedStreamError], answer: ServerAnswer, *, wants_logprobs: bool
    ) -> None:
        self.notes += [
            f"It was asked for less, since it refused more: {refusal}" for refusal in refusals[:1]
        ]
        if answer.text and not answer.scores:
            self.asks_logprobs = False
            if wants_logprobs:
                self.notes.append("It gives no log probabilities: texts alone are compared.")

    async def _answer(self, body: Body) -> ServerAnswer:
        stream = Stream(time.perf_counter())
        path = "v1/chat/completions" if self._options.api == "chat" else "v1/completions"
        async for event in stream_events(self._client, path, body):
            stream.add(event)
        return stream.answer()

    def _body(self, question: Question) -> Body:
        options = self._options
        body: Body = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": options.max_tokens,
            "stream": True,
        }
        if self._asks_no_threshold:
            body["cache_hit_threshold"] = 0
        if self.asks_usage:
            body["stream_options"] = {"include_usage": True}
        if options.api == "chat":
            body["messages"] = question.messages()
            if self.asks_logprobs:
                body |= {"logprobs": True, "top_logprobs": options.top_logprobs}
            return body
        if self.asks_logprobs:
            body["logprobs"] = options.top_logprobs
        return body | {"prompt": question.prompt()}


@dataclass(slots=True)
class Stream:
    """Collects the events of one answer; `sent` is the time of its request."""

    sent: float
    texts: list[str] = field(default_factory=list[str])
    scores: list[TokenScore] = field(default_factory=list[TokenScore])
    first: float | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes the next event. Raises `StreamError` where its form is unknown."""
        try:
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices") or ():
                self._add_choice(choice)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise StreamError(f"An event of unknown form: {cut(json.dumps(event))}") from None

    def answer(self) -> ServerAnswer:
        """All that came."""
        if self.finish_reason is None:
            raise StreamError("The server ended an answer without a finish_reason.")
        check_ending(self.finish_reason)
        prompt = self.usage.get("prompt_tokens")
        return ServerAnswer(
            text="".join(self.texts),
            scores=tuple(self.scores),
            finish_reason=self.finish_reason,
            ttft=(self.first or time.perf_counter()) - self.sent,
            prompt_tokens=prompt,
            cached_tokens=cached_tokens(self.usage),
        )

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        scores = _scores(choice.get("logprobs") or {})
        text = choice_text(choice)
        if self.first is None and (text or scores):
            self.first = time.perf_counter()
        self.texts.append(text)
        self.scores += scores
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _scores(logprobs: Mapping[str, Any]) -> list[TokenScore]:
    """Of a chat (a list of objects) or of a completion (lists side by side)."""
    if "tokens" not in logprobs:
        return [
            _score(
                entry["token"], entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]]
            )
            for entry in logprobs.get("content") or ()
        ]
    tokens, chosen = logprobs["tokens"], logprobs["token_logprobs"]
    tops: list[dict[str, float] | None] = logprobs.get("top_logprobs") or [{}] * len(tokens)
    columns = zip(tokens, chosen, tops, strict=True)
    return [_score(token, logprob, list((top or {}).values())) for token, logprob, top in columns]


def _score(token: str, logprob: float, top: list[float]) -> TokenScore:
    return TokenScore(token, float(logprob), tuple(sorted(map(float, top), reverse=True)))
