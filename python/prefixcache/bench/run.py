"""One benchmark: the same prompts to each variant in turn, several times over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, replace
from typing import Any

from prefixcache.bench.client import BenchmarkError, RequestRecord, Target, drive
from prefixcache.bench.options import BenchOptions
from prefixcache.bench.report import Report, make_report
from prefixcache.bench.targets import engine_target, http_target, server_target
from prefixcache.bench.workloads import Prompt, WorkloadConfig, make_prompts
from prefixcache.config import CacheConfig

OnDone = Callable[[str], None]


async def run_bench(
    options: BenchOptions, command: str, on_done: OnDone = lambda _name: None
) -> Report:
    """Measures all variants in alternation. `on_done` is called with a variant's name for each
    answered request. Raises `BenchmarkError` when a request fails.
    """
    async with AsyncExitStack() as stack:
        targets = {
            name: await stack.enter_async_context(opened)
            for name, opened in _open_targets(options).items()
        }
        runs = await _measure(options, targets, on_done)
    return make_report(command, settings(options), runs)


def variant_names(options: BenchOptions) -> list[str]:
    """Names of what is measured, the baseline first."""
    return list(_open_targets(options))


def settings(options: BenchOptions) -> dict[str, Any]:
    """Everything that was asked for, flat, for the report."""
    through = options.base_url or ("HTTP on loopback" if options.http else "the engine in process")
    chosen = {name: value for name, value in options.flags.items() if value is not None}
    return (
        {"model": options.model, "through": through, "repeats": options.repeats}
        | asdict(options.workload)
        | {"concurrency": options.load.concurrency, "request_rate": options.load.request_rate}
        | chosen
    )


def _open_targets(
    options: BenchOptions,
) -> dict[str, AbstractAsyncContextManager[Target]]:
    if options.base_url:
        return {"as served": http_target(options.base_url)}
    opened = server_target if options.http else engine_target
    chosen = {name: value for name, value in options.flags.items() if value is not None}
    shared = {"model": options.model} | _room(options) | chosen
    return {name: opened(shared | dict(changes)) for name, changes in options.variants.items()}


def _room(options: BenchOptions) -> dict[str, int]:
    """A pool that holds all requests that run at once, so that nothing is preempted."""
    workload = options.workload
    running = min(options.load.concurrency or workload.num_requests, workload.num_requests)
    block_size = options.flags.get("block_size") or CacheConfig().block_size
    blocks = running * (-(-workload.total_len // block_size) + 1)
    return {
        "num_blocks": blocks + workload.prefix_len // block_size + 1,
        "max_model_len": workload.total_len,
    }


async def _measure(
    options: BenchOptions, targets: dict[str, Target], on_done: OnDone
) -> dict[str, list[list[RequestRecord]]]:
    pool = await next(iter(targets.values())).token_pool()
    if not pool:
        raise BenchmarkError("The tokenizer gave no tokens to make prompts of.")
    prompts = make_prompts(options.workload, pool)
    for target in targets.values():
        await target.send(_warm_up_prompt(options.workload, pool))
    runs: dict[str, list[list[RequestRecord]]] = {name: [] for name in targets}
    for repeat in range(options.repeats):
        for name in _in_turn(list(targets), repeat):
            await targets[name].reset_cache()
            records = await drive(
                targets[name], prompts, options.load, lambda name=name: on_done(name)
            )
            runs[name].append(records)
    return runs


def _in_turn(names: list[str], repeat: int) -> list[str]:
    """Every second time in reverse, so that a drift of the machine favours none."""
    return names[::-1] if repeat % 2 else names


def _warm_up_prompt(workload: WorkloadConfig, pool: list[int]) -> Prompt:
    """As long as the others and of no block of theirs."""
    other = replace(workload, seed=workload.seed + 1, num_requests=1)
    (prompt,) = make_prompts(other, pool)
    return Prompt(prompt.token_ids, min(2, prompt.output_len))
