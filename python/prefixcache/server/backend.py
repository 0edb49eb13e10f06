"""What the server needs to know of the engine and of the model it serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from prefixcache.config import GenerationDefaults
from prefixcache.exceptions import EngineDeadError
from prefixcache.metrics import Metrics
from prefixcache.request import Request, RequestOutput
from prefixcache.tokenization.tokenizer import Tokenizer


class EngineClient(Protocol):
    """The part of `engine.async_engine.AsyncEngine` that the server calls."""

    @property
    def dead(self) -> EngineDeadError | None:
        """Why nothing can be served any more; None while the engine lives."""
        ...

    @property
    def metrics(self) -> Metrics:
        """The engine's counters."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and answer together."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Checks the request at once; closing the stream aborts it."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it: any of `names` asks for it, the first is shown.

    `batch_invariant` says whether an answer's bits are the same in every batch; None where that
    is not known. `priorities` False refuses requests with a priority.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    root: str = ""
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    created: int = 0
    batch_invariant: bool | None = None
    priorities: bool = True
