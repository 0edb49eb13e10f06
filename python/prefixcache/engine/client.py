"""What the server's endpoints for clients ask of an engine, be it here or many behind a router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from threading import Event
from typing import Protocol

from prefixcache.text.grammar.answer_matcher import Grammar
from prefixcache.types.request import Request, RequestOutput
from prefixcache.types.structured_output import StructuredOutput


class EngineClient(Protocol):
    """`AsyncEngine` says what each of these does and raises."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and answer."""
        ...

    def check(self, request: Request) -> None:
        """Raises `InvalidRequestError` when the request cannot be served."""

    def find_grammar(self, output: StructuredOutput) -> Grammar | None:
        """The grammar of such answers, if it is compiled already."""
        ...

    def compile(
        self, output: StructuredOutput, cancelled: Event, *, quick: bool = False
    ) -> Grammar:
        """The grammar of such answers. Not for an event loop."""
        ...

    async def generate_batches(
        self,
        requests: Sequence[Request],
        *,
        deadline: float | None = None,
        max_unread: int | None = None,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """The outputs of requests that belong together."""
        ...

    async def probe_all(self, requests: Sequence[Request]) -> list[int]:
        """Tokens of each prompt that are cached now, in leading full blocks."""
        ...
