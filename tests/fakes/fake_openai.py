"""A server that speaks as much OpenAI as `prefixcache verify` asks, and breaks on request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse

from prefixcache.server.http.routes import Router

MODEL = "fake"
_ANSWER_TOKENS = 5
_COLD_SECONDS = 1.0


@dataclass
class FakeOpenAI:
    """Remembers prompts by their salts.

    `change` says what a hit changes: the last token of the answer, one log probability by a
    millionth, or "ever", the answer with each request. `part_alone` lets only hits of a part of the
    prompt change it. `seconds` is a clock that computing moves on.
    """

    change: Literal["nothing", "answer", "logprob", "ever"] = "nothing"
    part_alone: bool = False
    reports: bool = True
    remembers: Literal["all", "last", "nothing"] = "all"
    knows_salts: bool = True
    refuses: tuple[str, ...] = ()
    key: str | None = None
    seconds: float = 0.0
    _seen: list[tuple[str, str]] = field(default_factory=list)
    _number: int = 0

    def clock(self) -> float:
        return self.seconds

    def app(self) -> Starlette:
        router = Router()
        router.get("/v1/models")(lambda: {"data": [{"id": MODEL}]})

        @router.post("/v1/chat/completions")
        async def chat(request: Request) -> StreamingResponse:
            return await self._stream(request, "chat")

        @router.post("/v1/completions")
        async def complete(request: Request) -> StreamingResponse:
            return await self._stream(request, "completions")

        return Starlette(routes=router.routes)

    async def _stream(self, request: Request, api: str) -> StreamingResponse:
        body = await request.json()
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            raise HTTPException(401, "no such key")
        for name in self.refuses:
            if name in body:
                raise HTTPException(400, f"{name} is not known")
        events = [f"data: {json.dumps(event)}\n\n" for event in self._events(body, api)]
        return StreamingResponse(
            iter([*events, "data: [DONE]\n\n"]), media_type="text/event-stream"
        )

    def _events(self, body: dict[str, Any], api: str) -> Iterator[dict[str, Any]]:
        prompt = body.get("prompt") or "".join(one["content"] for one in body["messages"])
        cached = self._look_up(body, prompt)
        self.seconds += 0.01 + _COLD_SECONDS * (len(prompt) - cached) / len(prompt)
        scores = self._scores(prompt, cached)[: body["max_tokens"]]
        for token, logprob in scores:
            yield {"choices": [_choice(api, token, logprob, with_scores="logprobs" in body)]}
        last = {"delta": {}, "text": "", "finish_reason": "length"}
        yield {"choices": [last], "usage": self._usage(len(prompt), cached)}

    def _look_up(self, body: dict[str, Any], prompt: str) -> int:
        """Characters of the prompt that hit, and remembers it."""
        salt = body.get("cache_salt", "") if self.knows_salts else ""
        cached = max((_common(prompt, seen) for of, seen in self._seen if of == salt), default=0)
        if self.remembers == "last":
            self._seen.clear()
        if self.remembers != "nothing":
            self._seen.append((salt, prompt))
        return cached

    def _scores(self, prompt: str, cached: int) -> list[tuple[str, float]]:
        number = crc32(prompt.encode())
        scores = [(f" {number >> i & 7}", -(number >> i & 15) / 16) for i in range(_ANSWER_TOKENS)]
        token, logprob = scores[-1]
        self._number += 1
        if self.change == "ever":
            scores[-1] = (f" {self._number}", logprob)
        elif len(prompt) < 2 * cached < (1.9 if self.part_alone else 3) * len(prompt):
            scores[-1] = {
                "nothing": (token, logprob),
                "answer": (" other", logprob),
                "logprob": (token, logprob - 1e-6),
            }[self.change]
        return scores

    def _usage(self, prompt: int, cached: int) -> dict[str, Any]:
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.reports else {}
        return {"prompt_tokens": prompt, **details}


def _choice(api: str, token: str, logprob: float, *, with_scores: bool) -> dict[str, Any]:
    if api == "chat":
        scores = [{"token": token, "logprob": logprob, "top_logprobs": [{"logprob": logprob}]}]
        reported = {"delta": {"content": token}, "logprobs": {"content": scores}}
    else:
        columns = {"tokens": [token], "token_logprobs": [logprob]}
        reported = {"text": token, "logprobs": {**columns, "top_logprobs": [{token: logprob}]}}
    return reported if with_scores else reported | {"logprobs": None}


def _common(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
