"""What the server needs to know of the engine and of the model it serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from typing import Protocol

from prefixcache.config import GenerationDefaults
from prefixcache.engine.modes import InFlightMode, MemoryTag, SleepMode
from prefixcache.engine.stats import PrefixCacheStats
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

    def probe(self, request: Request) -> int:
        """Prompt tokens that are cached now; checks the request as `generate` does."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        ...

    async def prefix_cache_stats(self) -> PrefixCacheStats:
        """The prefix cache in numbers."""
        ...

    async def pause(self, mode: InFlightMode = "keep") -> None:
        """Computes nothing until `resume`."""
        ...

    async def resume(self) -> None:
        """Goes on after `pause`."""
        ...

    async def is_paused(self) -> bool:
        """Whether `pause` holds the requests back."""
        ...

    async def sleep(self, level: int = 1, mode: SleepMode = "recompute") -> None:
        """Gives back the KV cache's memory, at level 2 that of the weights too."""
        ...

    async def wake_up(self, tags: Collection[MemoryTag] | None = None) -> None:
        """Brings back what `sleep` gave up."""
        ...

    async def is_sleeping(self) -> bool:
        """Whether weights or KV cache are given up."""
        ...

    async def update_weights_from_disk(
        self, model_path: str, mode: InFlightMode = "recompute", *, revision: str | None = None
    ) -> int:
        """Replaces all weights; their new version."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it: any of `names` asks for it, the first is shown.

    `batch_invariant` says whether an answer's bits are the same in every batch; None where that
    is not known. `priorities` lets clients choose who is served first.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    root: str = ""
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    created: int = 0
    batch_invariant: bool | None = None
    priorities: bool = False
