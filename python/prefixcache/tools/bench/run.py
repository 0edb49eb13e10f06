"""One benchmark: the same sessions to each variant in turn, several times over."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.exceptions import FieldError, PrefixCacheError
from prefixcache.models.hub import read_config, resolve_model
from prefixcache.tools.bench.bench_options import BenchOptions
from prefixcache.tools.bench.load import drive
from prefixcache.tools.bench.prompts import Message, Prompt
from prefixcache.tools.bench.records import Run
from prefixcache.tools.bench.reports.report import Report, make_report
from prefixcache.tools.bench.servers import engine_target, http_target, server_target
from prefixcache.tools.bench.sessions import Session, Text
from prefixcache.tools.bench.targets import CACHE_OFF, HttpTarget, Target
from prefixcache.tools.bench.traces import trace_sessions
from prefixcache.tools.bench.workloads import WorkloadConfig, make_sessions

OnDone = Callable[[str, int], None]
Runs = dict[str, list[Run]]


@dataclass(frozen=True, slots=True)
class Work:
    """What is sent in each run: sessions that are `fixed` beforehand, or those of a trace."""

    config: WorkloadConfig
    fixed: tuple[Session, ...] | None
    first: Session

    @classmethod
    def of(cls, config: WorkloadConfig) -> Work:
        """Raises `BenchmarkError` for a trace that cannot be read."""
        if config.workload == "trace":
            return cls(config, None, next(trace_sessions(config)))
        sessions = tuple(make_sessions(config))
        return cls(config, sessions, sessions[0])

    @property
    def num_requests(self) -> int | None:
        """Requests of a run; of a trace the most, or None where nobody knows."""
        if self.fixed is None:
            return self.config.num_requests
        return sum(session.num_requests for session in self.fixed)

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt with its answer; None for a trace."""
        if self.fixed is None:
            return None
        return max(member.longest for session in self.fixed for member in session.family())

    def sessions(self) -> Iterator[Session]:
        """For one run."""
        return trace_sessions(self.config) if self.fixed is None else iter(self.fixed)


async def run_bench(
    options: BenchOptions, work: Work, command: str, on_done: OnDone = lambda _name, _count: None
) -> Report:
    """Measures all variants in alternation; `on_done` learns how many requests of one are over.

    What ends the measuring early, a server that is gone or a cancellation, stands in the report's
    `errors`. Raises `BenchmarkError` when nothing can be measured.
    """
    async with AsyncExitStack() as stack:
        targets = await _open_targets(options, work, stack)
        bench = _Bench(options, work, targets, on_done)
        try:
            await bench.measure()
        except asyncio.CancelledError:
            bench.errors.append("interrupted")
    return make_report(
        command,
        settings(options, next(iter(targets.values()))),
        bench.runs,
        objectives=options.objectives,
        remarks=bench.remarks,
        errors=bench.errors,
        compares_outputs=bench.repeats_prompts,
    )


class _Bench:
    """The runs of one benchmark."""

    def __init__(
        self, options: BenchOptions, work: Work, targets: Mapping[str, Target], on_done: OnDone
    ) -> None:
        self._options = options
        self._work = work
        self._targets = targets
        self._on_done = on_done
        self._limit = options.load.limit(is_recorded=work.fixed is None)
        self._nonce = secrets.token_hex(4)
        self.runs: Runs = {name: [] for name in targets}
        self.remarks = list(next(iter(targets.values())).remarks)
        self.errors = list[str]()
        self.repeats_prompts = True

    async def measure(self) -> None:
        """Fills `runs`, up to one that ends with an error."""
        for target in self._targets.values():
            await target.send(self._warm_up_prompt(target))
        for repeat in range(self._options.repeats):
            for name in _in_turn(list(self._targets), repeat):
                await self._run(name, repeat)
                if self.runs[name][-1].error is not None:
                    return

    async def _run(self, name: str, repeat: int) -> None:
        target, run = self._targets[name], Run()
        self.runs[name].append(run)
        try:
            seed = await self._seed(target, repeat)
        except PrefixCacheError as error:
            run.error = str(error)
            return
        await drive(
            target,
            self._work.sessions(),
            self._options.load,
            run,
            limit=self._limit,
            seed=seed,
            on_done=partial(self._on_done, name),
        )

    async def _seed(self, target: Target, repeat: int) -> str:
        """The same prompts each time where the cache was emptied, else prompts never seen."""
        seed = str(self._options.asked.seed)
        if await target.reset_cache():
            return seed
        if self.repeats_prompts:
            self.repeats_prompts = False
            self.remarks.append(
                "The server's cache cannot be emptied, so every run draws prompts of its own."
            )
        return f"{seed} {self._nonce} {repeat}"

    def _warm_up_prompt(self, target: Target) -> Prompt:
        """As long as the first and of no block of any."""
        length = self._work.first.first_prompt
        if target.max_model_len is not None:
            length = max(1, min(length, target.max_model_len - 2))
        content = target.form.draw([Text("warm-up", length)], self._nonce)
        return Prompt((Message("user", content),), 2)


def _in_turn(names: list[str], repeat: int) -> list[str]:
    """Every second time in reverse, so that a drift of the machine favours none."""
    return names[::-1] if repeat % 2 else names


def settings(options: BenchOptions, target: Target | None = None) -> dict[str, Any]:
    """Everything that was asked for, flat, for the report."""
    through = options.base_url or ("HTTP on loopback" if options.http else "the engine in process")
    chosen = {name: value for name, value in options.flags.items() if value is not None}
    model = target.model if isinstance(target, HttpTarget) and options.base_url else options.model
    return (
        {"through": through, "repeats": options.repeats}
        | _asked(options.asked)
        | {"concurrency": options.load.limit(is_recorded=options.asked.trace is not None)}
        | {"request_rate": options.load.request_rate, "goodput": list(options.goodput)}
        | ({"time_scale": options.load.time_scale} if options.asked.trace else {})
        | chosen
        | {"model": model}
    )


def _asked(config: WorkloadConfig) -> dict[str, Any]:
    """The workload and those of its sizes that it goes by."""
    sizes = {name: getattr(config, name) for name in ("workload", "scale_lengths", "seed")}
    if config.trace is not None:
        return sizes | {"trace": str(config.trace), "num_requests": config.num_requests}
    sizes |= asdict(config.sizes)
    if config.workload in ("multi-turn", "agents"):
        return sizes | {"num_sessions": config.num_sessions, "pause": config.pause}
    if config.workload == "documents":
        sizes["num_documents"] = config.num_documents
    return sizes | {"num_requests": config.request_count}


async def _open_targets(
    options: BenchOptions, work: Work, stack: AsyncExitStack
) -> dict[str, Target]:
    if options.base_url:
        return await _open_running(options, options.base_url, work, stack)
    opened = server_target if options.http else engine_target
    chosen = {name: value for name, value in options.flags.items() if value is not None}
    shared = {"model": options.model} | await asyncio.to_thread(_room, options, work) | chosen
    targets = dict[str, Target]()
    for name, changes in options.variants.items():
        targets[name] = await stack.enter_async_context(opened(shared | dict(changes)))
    return targets


async def _open_running(
    options: BenchOptions, base_url: str, work: Work, stack: AsyncExitStack
) -> dict[str, Target]:
    """The server as it is; one of ours also without the cache, request by request."""
    opened = http_target(
        base_url,
        model=options.flags.get("model"),
        form=None if options.prompts == "auto" else options.prompts,
        api_key=options.api_key,
    )
    target = await stack.enter_async_context(opened)
    if target.max_model_len is not None:
        _check_fits(work, target.max_model_len)
    if not (options.baseline and target.is_ours):
        return {"as served": target}
    return {"cache off": target.with_fields(CACHE_OFF), "as served": target}


def _room(options: BenchOptions, work: Work) -> dict[str, int]:
    """A pool that holds all sessions that run at once, and what several share.

    So nothing is preempted and nothing evicted that comes again. For a trace the engine decides.
    """
    if work.fixed is None or work.longest is None:
        return {}
    config = EngineConfig.from_flags(
        **{name: value for name, value in options.flags.items() if name in ("model", "revision")}
    )
    model = read_config(config.model, resolve_model(config.model, config.revision))
    _check_fits(work, options.flags.get("max_model_len") or model.max_context_length)
    if model.states is not None or options.flags.get("kv_cache_memory") is not None:
        return {"max_model_len": work.longest}  # Its states, or the flag, decide how many fit.
    block_size = options.flags.get("block_size") or CacheConfig().block_size
    running = min(options.load.limit(is_recorded=False) or len(work.fixed), len(work.fixed))
    largest = max(_family_len(session) for session in work.fixed)
    blocks = running * (-(-largest // block_size) + 1) + _shared_len(work.fixed) // block_size + 1
    return {"num_blocks": blocks, "max_model_len": work.longest}


def _check_fits(work: Work, limit: int) -> None:
    """Raises `FieldError` where the longest prompt with its answer has more tokens."""
    if work.longest is not None and work.longest > limit:
        scale = math.floor(900 * work.config.scale_lengths * limit / work.longest) / 1000
        raise FieldError(
            "scale_lengths",
            f"must be less: the workload's longest prompt has with its answer {work.longest:,} "
            f"tokens, and the model takes {limit:,}. {scale:g} would do.",
        )


def _family_len(session: Session) -> int:
    """Tokens that a session and its sub-sessions hold at most."""
    return session.longest + max(sum(map(_family_len, turn.sub_sessions)) for turn in session.turns)


def _shared_len(sessions: Sequence[Session]) -> int:
    """Tokens of the texts that several sessions hold, each counted once."""
    family = [member for session in sessions for member in session.family()]
    texts = [set(chain(member.opening, *(turn.adds for turn in member.turns))) for member in family]
    counts = Counter(chain.from_iterable(texts))
    return sum(text.length for text, count in counts.items() if count > 1)
