"""The cache, the batch, the chunk and the schedule change no bit of an answer or of the KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from equality import (
    GEMMA4,
    INTERRUPTIONS,
    LFM2,
    WIDE,
    Bench,
    Counts,
    Schedule,
    make_pair,
    random_schedule,
    with_windows,
)
from prefixcache._core import Cpu
from support.loaded import cpu_model, torch_model
from support.paged_driver import CpuDriver, Driver, PagedDriver
from support.repeatable import LONG, bounded, long, slow

Checkpoint = Callable[..., Path]
Work = list[tuple[int, int, int]]

DTYPES = ["float32", "bfloat16"]
# Windows shorter than a block, longer than most chunks, multiples of neither.
SHAPES = {
    "full": ("qwen3", WIDE),
    "window7": ("qwen3", with_windows(7)),
    "window33": ("qwen3", with_windows(33)),
    "window100": ("qwen3", with_windows(100)),
    "all33": ("qwen3", with_windows(33, num_full=0)),
    "gemma3": ("gemma3", WIDE),
    "unrotated": ("smollm3-window", WIDE),
    "ministral3": ("ministral3", WIDE),
    "granite": ("granite", WIDE),
    "phi3": ("phi3", {}),
    "olmo3": ("olmo3", WIDE),
    "lfm2": ("lfm2", LFM2),
    "lfm2-moe": ("lfm2-moe", LFM2),
    "qwen3.5": ("qwen3.5", WIDE),
    "qwen3-moe": ("qwen3-moe", WIDE),
    "qwen3-next": ("qwen3-next", WIDE),
    "qwen3.5-moe": ("qwen3.5-moe", WIDE),
    "granite-moe-shared": ("granite-moe-shared", WIDE),
    "granite4-h": ("granite4-h", WIDE),
    "granite4-h-moe": ("granite4-h-moe", WIDE),
    "nemotron-h": ("nemotron-h", WIDE),
    "olmoe": ("olmoe", WIDE),
    "gpt-oss": ("gpt-oss", WIDE),
    "gemma4": ("gemma4", GEMMA4),
    "gemma4-large": ("gemma4-large", GEMMA4),
}
# One for each kind of mixer, feed-forward and window.
RUNS = [
    ("float32", 1, "full"),
    ("bfloat16", 2, "full"),
    ("bfloat16", 1, "window33"),
    ("bfloat16", 2, "lfm2-moe"),
    ("float32", 2, "qwen3.5"),
    ("float32", 2, "granite4-h"),
    ("bfloat16", 2, "gpt-oss"),
    ("float32", 1, "gemma4"),
]
SLOW_RUNS = [
    ("float32", 2, "window7"),
    ("float32", 1, "window100"),
    ("bfloat16", 2, "all33"),
    ("float32", 1, "gemma3"),
    ("bfloat16", 1, "unrotated"),
    ("bfloat16", 2, "phi3"),
    ("bfloat16", 1, "olmo3"),
    ("float32", 1, "lfm2"),
    ("float32", 1, "qwen3-moe"),
    ("bfloat16", 2, "qwen3-next"),
    ("bfloat16", 1, "granite4-h-moe"),
    ("bfloat16", 2, "nemotron-h"),
    ("bfloat16", 1, "gemma4-large"),
]
# Of kinds that the shapes above have too.
LONG_RUNS = [
    ("float32", 2, "full"),
    ("bfloat16", 1, "full"),
    ("bfloat16", 2, "gemma3"),
    ("bfloat16", 2, "ministral3"),
    ("bfloat16", 2, "granite"),
    ("bfloat16", 2, "lfm2"),
    ("bfloat16", 1, "qwen3.5"),
    ("bfloat16", 2, "qwen3-moe"),
    ("float32", 1, "qwen3.5-moe"),
    ("float32", 1, "granite-moe-shared"),
    ("bfloat16", 1, "olmoe"),
    ("bfloat16", 2, "gemma4"),
]
LENGTH = 200
SLOW = settings(
    deadline=None,
    max_examples=bounded(usual=3, long=150),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def folder_of(tiny_checkpoint: Checkpoint, dtype: str, shape: str = "full") -> Path:
    architecture, arguments = SHAPES[shape]
    return tiny_checkpoint(architecture, dtype=getattr(torch, dtype), **arguments)


def tokens_of(sequence: int) -> list[int]:
    generator = torch.Generator().manual_seed(sequence)
    return torch.randint(3, 384, (LENGTH,), generator=generator).tolist()


class Runs:
    """A model and, for three sequences, the logits and KV of a lone cold run."""

    def __init__(self, make_driver: Callable[[], Driver]) -> None:
        self.driver = make_driver
        self.cold = [self._lone(sequence) for sequence in range(3)]

    def _lone(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        driver = self.driver()
        logits = driver.forward([(sequence, 0, tokens_of(sequence))])
        return logits, driver.kv_of(sequence)

    def differences(self, steps: Sequence[Work]) -> int:
        """Rows of logits, and KV of whole sequences, that differ from the cold run's."""
        driver, different = self.driver(), 0
        for work in steps:
            logits = driver.forward([(s, a, tokens_of(s)[a:b]) for s, a, b in work])
            expected = torch.cat([self.cold[s][0][a:b] for s, a, b in work])
            different += int((logits != expected).any(dim=1).sum())
        for sequence in {s for work in steps for s, _, _ in work}:
            different += not torch.equal(driver.kv_of(sequence), self.cold[sequence][1])
        return different


@pytest.fixture(
    scope="module",
    params=[*RUNS, *map(slow, SLOW_RUNS), *map(long, LONG_RUNS)],
    ids=str,
)
def runs(request: pytest.FixtureRequest, tiny_checkpoint: Checkpoint) -> Runs:
    dtype, threads, shape = request.param
    cpu = Cpu(threads)
    model = cpu_model(folder_of(tiny_checkpoint, dtype, shape), dtype, cpu)
    return Runs(partial(CpuDriver, model, num_sequences=3, cpu=cpu))


def chunked(size: int, sequence: int = 0, start: int = 0) -> list[Work]:
    return [[(sequence, a, min(a + size, LENGTH))] for a in range(start, LENGTH, size)]


MIXED: list[Work] = [
    [(2, 0, 150), (0, 0, 16)],
    [(0, 16, 17), (2, 150, 151), (1, 0, 144)],
    [(1, 144, 200), (2, 151, 152), (0, 17, 200)],
    [(2, 152, 200)],
]


@pytest.mark.parametrize(
    "steps",
    [
        *([[(0, 0, hit)], [(0, hit, LENGTH)]] for hit in (96, 149)),
        *(chunked(size) for size in (7, 64)),
        [[(0, 0, 120)], *chunked(1, start=120)],
        MIXED,
    ],
    ids=["hit96", "hit149", "chunk7", "chunk64", "decode", "mixed"],
)
def test_logits_and_kv_are_those_of_the_cold_run(runs: Runs, steps: list[Work]) -> None:
    assert runs.differences(steps) == 0


pieces = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 20) | st.integers(30, LENGTH), st.booleans()),
    max_size=30,
)


def interleaved(pieces: Sequence[tuple[int, int, bool]]) -> list[Work]:
    """Chunks (sequence, size, whether it joins the step before) as steps; the rest comes last."""
    done, steps = [0, 0, 0], list[Work]()
    for sequence, size, joins in [*pieces, *((s, LENGTH, s > 0) for s in range(3))]:
        start, done[sequence] = done[sequence], min(done[sequence] + size, LENGTH)
        if start == LENGTH:
            continue
        if not joins or not steps or sequence in {s for s, _, _ in steps[-1]}:
            steps.append([])
        steps[-1].append((sequence, start, done[sequence]))
    return steps


@SLOW
@given(pieces=pieces)
def test_any_interleaving_gives_the_bits_of_the_cold_run(runs, pieces):
    assert runs.differences(interleaved(pieces)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_torchs_ops_the_bits_change(tiny_checkpoint: Checkpoint, dtype: str) -> None:
    model = torch_model(folder_of(tiny_checkpoint, dtype), getattr(torch, dtype))
    plain = Runs(partial(PagedDriver, model, num_sequences=3))
    assert plain.differences(chunked(7)) > 0
    assert plain.differences([[(0, 0, 120)], *chunked(1, start=120)]) > 0


interruptions = st.tuples(st.integers(1, 40), st.sampled_from(INTERRUPTIONS))
schedules = st.builds(
    Schedule,
    seed=st.integers(0, 1 << 20),
    arrivals=st.lists(st.integers(0, 12), min_size=4, max_size=7).map(tuple),
    num_blocks=st.sampled_from([26, 32, 48, 200]),
    block_size=st.sampled_from([16, 16, 8, 32]),
    max_num_batched_tokens=st.sampled_from([8, 17, 64, 1024]),
    max_num_seqs=st.sampled_from([2, 4, 8]),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    share_in_flight=st.booleans(),
    merge_duplicate_blocks=st.booleans(),
    interruptions=st.lists(interruptions, max_size=2).map(tuple),
)


# Requests hit, are chunked and guided, and masks are late, whatever the model.
EVENTFUL = Schedule(seed=0, arrivals=(0, 0, 3, 40, 45, 60), max_num_seqs=4)


def assert_same(counts: Counts) -> None:
    assert (counts.differences, counts.block_differences) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", "full"),
        ("bfloat16", "window7"),
        ("bfloat16", "qwen3.5"),
        slow("bfloat16", "full"),
        slow("float32", "window33"),
        slow("float32", "all33"),
        slow("bfloat16", "gemma3"),
        slow("bfloat16", "lfm2"),
        slow("bfloat16", "granite4-h"),
        slow("bfloat16", "qwen3-moe"),
        slow("bfloat16", "gemma4"),
        slow("float32", "gemma4-large"),
    ],
)
def test_answers_and_blocks_of_any_schedule_are_those_of_lone_cold_runs(
    tiny_checkpoint: Checkpoint, dtype: str, shape: str
) -> None:
    bench, total = Bench(folder_of(tiny_checkpoint, dtype, shape), dtype), Counts()

    @SLOW
    @example(schedule=EVENTFUL)
    @given(schedule=schedules)
    def check(schedule: Schedule) -> None:
        counts = bench.compare(schedule)
        total.add(counts)
        assert_same(counts)

    check()
    assert min(total.outputs, total.blocks, total.hit_tokens, total.chunks) > 0
    assert total.guided > 0
    # Which masks are late is drawn too: of the few guided tokens of a short run maybe none is.
    assert total.late_masks > 0 or not LONG


def test_a_layer_that_reads_others_keys_through_another_block_table_is_found(
    tiny_checkpoint: Checkpoint,
) -> None:
    """Of a block that its group does not fill: what an earlier owner of the block left there."""
    bench = Bench(folder_of(tiny_checkpoint, "float32", "gemma4"), "float32")
    assert_same(bench.compare(EVENTFUL))
    make = bench._engine

    def faulty(schedule: Schedule, folder: Path) -> Any:
        engine = make(schedule, folder)
        groups = engine._steps._runner._steps._kernels.layer_groups
        assert groups[4] == groups[3] != groups[1]
        groups[4] = groups[1]
        return engine

    with mock.patch.object(bench, "_engine", faulty):
        assert bench.compare(EVENTFUL).differences > 0


def test_answers_of_kept_blocks_are_those_of_lone_runs_with_dequantized_weights(tmp_path, seed):
    folder, dequantized = make_pair(tmp_path, "bfloat16", "Q4_1", **WIDE)
    bench, total = Bench(folder, "bfloat16", dequantized=dequantized), Counts()
    for turn in range(bounded(usual=2, long=50)):
        total.add(bench.compare(random_schedule(seed + turn)))
    assert_same(total)
    assert total.outputs > 0


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_preempted_answers_are_those_of_lone_cold_runs(tiny_checkpoint, dtype, seed):
    """A pool that holds one long request and little else, until all that can happen has."""

    def all_happened(total: Counts) -> bool:
        return bool(_preempted(total) and total.waits_in_flight and total.merged_blocks)

    bench = Bench(folder_of(tiny_checkpoint, dtype), dtype)
    _compare_until(all_happened, bench, seed, num_blocks=26, turns=40)


@pytest.mark.parametrize("shape", ["lfm2", *map(slow, ("window33", "all33", "qwen3.5", "gemma4"))])
def test_preempted_answers_of_models_with_windows_are_those_of_lone_cold_runs(
    tiny_checkpoint: Checkpoint, shape: str, seed: int
) -> None:
    """Each request holds less than a block table lists, so the pool is small."""
    bench = Bench(folder_of(tiny_checkpoint, "float32", shape), "float32")
    # Admission leaves room for windows: of eight schedules one preempts.
    _compare_until(_preempted, bench, seed, num_blocks=15, turns=300)


def _compare_until(
    happened: Callable[[Counts], bool], bench: Bench, seed: int, *, num_blocks: int, turns: int
) -> None:
    """At least three schedules in a tight pool, and fewer than `turns` until all has happened."""
    total, turn = Counts(), 0
    while turn < 3 or not happened(total):
        tight = Schedule(
            seed=seed + turn,
            arrivals=(0,) * 8,
            num_blocks=num_blocks,
            max_num_batched_tokens=50,
        )
        counts = bench.compare(tight)
        assert_same(counts)
        total.add(counts)
        turn += 1
        assert turn < turns, total


def _preempted(counts: Counts) -> bool:
    return min(counts.preemptions, counts.evictions, counts.hit_tokens, counts.blocks) > 0


def test_without_the_invariant_ops_answers_and_blocks_change(tiny_checkpoint: Checkpoint) -> None:
    plain, total = (
        Bench(folder_of(tiny_checkpoint, "float32"), "float32", invariant=False),
        Counts(),
    )
    for seed in range(3):
        total.add(plain.compare(random_schedule(seed)))
    assert min(total.differences, total.block_differences) > 0
