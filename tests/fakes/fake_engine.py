"""An engine around `FakeRunner`, whose text is the token ids themselves: "5 17 3 "."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fakes.fake_blocks import make_pool
from fakes.fake_cache import make_cache
from fakes.fake_runner import FakeRunner
from fakes.late_runner import LateRunner
from fakes.plain_runner import VOCAB_SIZE
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.engine.engine import Engine
from prefixcache.engine.request_rules import RequestRules
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.retention import Retention
from prefixcache.kv.specs import GroupKind
from prefixcache.scheduler.drafts import Drafter
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.scheduler.step_time import StepLoad
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import StepPlan


class IdText:
    """A detokenizer that writes ids; a stop string is looked for in each id's own text."""

    def __init__(self, params: SamplingParams) -> None:
        self._stops = params.stop
        self.stopped_by: str | None = None

    def push(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> str:
        text = "".join(f"{token} " for token in token_ids[: -1 if ended_by_token else None])
        self.stopped_by = next((stop for stop in self._stops if stop in text), None)
        return "" if self.stopped_by else text

    def finish(self) -> str:
        return ""


class RandomChunks:
    """In the place of a `StepTimeModel`: chunks of any length."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def observe(self, plan: StepPlan, seconds: float) -> None: ...

    def most_tokens(
        self, load: StepLoad, start: int, wanted: int, seconds: float, *, stays_near: bool
    ) -> int:
        return self._random.randint(0, wanted)


def make_engine(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    share_in_flight: bool = False,
    merge_twins: bool = False,
    ahead: bool = False,
    step_times: RandomChunks | None = None,
    max_step_ms: float = 0,
    groups: Sequence[GroupKind] = ("full",),
    retention: Retention | None = None,
    retention_budget: float = 0.2,
    enable_prefix_caching: bool = True,
    rules: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    max_blocks: int | None = None,
    max_cached_blocks: int | None = None,
    pool_options: Mapping[str, Any] | None = None,
    runner: FakeRunner | None = None,
    drafter: Drafter | None = None,
    make_cache: Callable[..., CacheManager] = make_cache,
    make_runner: Callable[..., FakeRunner] | None = None,
    make_memory: Callable[[Any], Any] = lambda _: None,
    **parts: Any,
) -> tuple[Engine, FakeRunner, CacheManager]:
    """With `max_blocks` the pool can be resized up to there; `pool_options` are of `make_pool`.

    `rules` are more fields of `SchedulerConfig`. `clock` times steps and how long requests wait.
    """
    cache = make_cache(
        num_blocks,
        block_size,
        model="m",
        groups=groups,
        retention=retention,
        retention_budget=retention_budget,
        merge_twins=merge_twins,
        max_blocks=max_blocks,
        max_cached_blocks=max_cached_blocks,
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        share_in_flight=share_in_flight,
        **(rules or {}),
    )
    runner = runner or (make_runner or (LateRunner if ahead else FakeRunner))(
        max_blocks or num_blocks,
        block_size,
        max_tokens=max_num_batched_tokens,
        max_seqs=max_num_seqs,
        max_pages=-(-max_model_len // block_size),
        **({} if groups == ("full",) else {"groups": groups}),
    )
    all_parts: dict[str, Any] = {
        "scheduler": Scheduler(
            config,
            cache,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            step_times=step_times,
            max_step_ms=max_step_ms,
            drafter=drafter,
            clock=clock,
        ),
        "clock": clock,
        "cache": cache,
        "runner": runner,
        "memory": make_memory(runner),
        "make_detokenizer": IdText,
        "rules": RequestRules(VOCAB_SIZE, eos_token_ids, seed=seed),
        "pool": None if max_blocks is None else make_pool(cache, runner, **(pool_options or {})),
    }
    return Engine(**(all_parts | parts)), runner, cache


def make_request(
    request_id: str = "a", prompt: Sequence[int] = (1, 2, 3, 4, 5), **params: Any
) -> Request:
    params.setdefault("max_tokens", 4)
    return Request(
        request_id=request_id, prompt_token_ids=list(prompt), params=SamplingParams(**params)
    )
