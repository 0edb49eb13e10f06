"""Keys and values in eight bits: other answers than with numbers, but none that a hit changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equality import (
    GEMMA4,
    LFM2,
    WIDE,
    Bench,
    Counts,
    make_pair,
    random_schedule,
    schedule_on_disk,
    with_windows,
)
from prefixcache._core import Cpu
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.engine.build import BuiltEngine, build
from prefixcache.engine.engine import Engine
from prefixcache.exceptions import ConfigError
from prefixcache.kv.specs import kv_layout
from prefixcache.runner.cpu.linear import KernelDType
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import InFlightStep, StepPlan
from support.kernel_attention import rounded
from support.loaded import cpu_model
from support.paged_driver import CpuDriver
from support.public_shapes import SHAPES as PUBLIC_SHAPES
from support.repeatable import bounded, slow

CPU = Cpu(2)
PROMPT = [(7 * i * i + 3 * i) % 380 + 3 for i in range(90)]

Checkpoint = Callable[..., Path]


@pytest.fixture
def folder(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint("qwen3", **WIDE)


def computed(
    folder: Path, dtype: KernelDType, pieces: Sequence[int], *, has_codes: bool = True
) -> tuple[Tensor, Tensor]:
    """Logits and KV of the prompt, in steps of this many tokens."""
    driver = CpuDriver(cpu_model(folder, dtype, CPU), cpu=CPU, has_codes=has_codes)
    rows, start = list[Tensor](), 0
    for size in pieces:
        rows.append(driver.forward([(0, start, PROMPT[start : start + size])]))
        start += size
    assert start == len(PROMPT)
    return torch.cat(rows), driver.kv_of(0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prefill_chunks_and_decode_give_the_same_bits(folder: Path, dtype: KernelDType) -> None:
    whole, kv = computed(folder, dtype, [90])
    for pieces in ([7, 41, 42], [86, *[1] * 4]):
        logits, written = computed(folder, dtype, pieces)
        assert torch.equal(logits, whole)
        assert torch.equal(written, kv)
    exact, _ = computed(folder, dtype, [90], has_codes=False)
    assert not torch.equal(whole, exact)
    assert float((whole - exact).norm() / exact.norm()) < 0.1


SHAPES = {
    "full": ("float32", "qwen3", WIDE),
    "windows": ("bfloat16", "qwen3", with_windows(33)),
    "convolutions": ("bfloat16", "lfm2-moe", LFM2),
    "states": ("float32", "qwen3.5", WIDE),
    "mamba": ("bfloat16", "granite4-h", WIDE),
    "sinks": ("bfloat16", "gpt-oss", WIDE),
    "heads of two sizes": ("float32", "gemma4", GEMMA4),
}
RUNS = [
    ("full", False),
    ("full", True),
    ("windows", False),
    ("states", True),
    slow("convolutions", False),
    slow("mamba", False),
    slow("sinks", False),
    slow("heads of two sizes", True),
]


@pytest.mark.parametrize(("name", "speculates"), RUNS)
def test_schedules_change_no_bit(tmp_path: Path, name: str, speculates: bool) -> None:
    dtype, architecture, shape = SHAPES[name]
    model, _ = make_pair(tmp_path, dtype, None, architecture, **shape)
    bench, counts = Bench(model, dtype, kv="int8"), Counts()
    for seed in range(bounded(usual=2, long=30)):
        counts.add(bench.compare(random_schedule(seed, speculates=speculates)))
    assert counts.differences == counts.block_differences == 0
    assert counts.hit_tokens > 0
    assert counts.chunks > 0
    assert speculates == (counts.accepted > 0)


def test_schedules_with_a_disk_change_no_bit(folder: Path, tmp_path: Path) -> None:
    bench, total = Bench(folder, "float32", kv="int8"), Counts()
    for _ in range(2):
        total.add(bench.compare(schedule_on_disk(2, tmp_path / "disk")))
    assert total.differences == total.block_differences == 0
    assert total.disk_tokens > 0


def test_a_chunk_that_reads_its_own_unrounded_rows_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where rows are rounded after the step that computed them."""
    make = Bench._engine

    def rounding_late(bench: Bench, *arguments: Any) -> Engine:
        engine = make(bench, *arguments)
        runner: Any = engine._steps._runner
        submit = runner.submit

        def late(plan: StepPlan) -> InFlightStep:
            step = submit(plan)
            slots = runner.block_tables[0].slot_mapping[: len(plan.token_ids)]
            round_rows(runner.kv, slots.tolist())
            return step

        runner.submit = late
        return engine

    schedule = replace(random_schedule(1), block_size=16)
    assert not Bench(folder, "float32").compare(schedule).differences
    monkeypatch.setattr(Bench, "_engine", rounding_late)
    counts = Bench(folder, "float32").compare(schedule)
    assert counts.chunks > 0
    assert counts.differences > 0
    assert counts.block_differences > 0


def round_rows(kv: Any, slots: Sequence[int]) -> None:
    """Rounds the keys and values of these slots, which are kept as float32 numbers."""
    heads, dims, size = kv.layout.num_kv_heads, kv.layout.head_dim, kv.block_size
    for rows in kv.rows():
        numbers = torch.from_numpy(rows).view(torch.float32).view(len(rows), 2, heads, -1)
        keys = numbers[:, 0].view(len(rows), heads, size // 16, dims, 16)
        values = numbers[:, 1].view(len(rows), heads, size, dims)
        for block, offset in (divmod(slot, size) for slot in slots):
            key = keys[block, :, offset // 16, :, offset % 16]
            key.copy_(rounded(key))
            value = values[block, :, offset]
            value.copy_(rounded(value))


def engine(folder: Path, **flags: Any) -> BuiltEngine:
    """With flags of the cache, and others."""
    names = CacheConfig.__dataclass_fields__
    cache = {name: flags.pop(name) for name in [*flags] if name in names}
    config = CacheConfig(**{"num_blocks": 64, "kv_cache_dtype": "int8"} | cache)
    return build(EngineConfig(model=str(folder), device="cpu", cache=config, **flags))


def answer(built: BuiltEngine) -> tuple[list[Any], int]:
    """What is said after the prompt, and how many of its tokens were hit."""
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2)
    request = Request(request_id="a", prompt_token_ids=PROMPT, params=params)
    built.engine.add_request(request)
    said, cached = list[Any](), 0
    while built.engine.has_unfinished():
        for output in built.engine.step():
            said += zip(output.token_ids, output.logprobs, strict=True)
            cached = max(cached, output.num_cached_tokens or 0)
    return said, cached


def test_another_process_resumes_from_kept_codes(folder: Path, tmp_path: Path) -> None:
    """Not where it keeps numbers, whose blocks have other hashes and another file."""
    said = list[Any]()
    for kept, cached in ("int8", 0), ("auto", 0), ("int8", 80):
        built = engine(folder, kv_cache_dtype=kept, kv_cache_dir=tmp_path / "kept")
        said.append(answer(built))
        assert said[-1][1] == cached
        file: Any = built.engine._steps._runner.kv_specs().file  # type: ignore[attr-defined]
        new = built.engine.control.stats()["cached_blocks"] - file.num_restored
        while file.core.counts()["kept"] < new:
            pass
        built.engine.close()
        file.close()
    assert said[0][0] == said[2][0] != said[1][0]


def test_the_root_of_hashes_tells_what_is_kept(folder: Path) -> None:
    kept = [
        engine(folder, dtype="float32", kv_cache_dtype=kv) for kv in ("auto", "float32", "int8")
    ]
    infos = [one.engine.control.prefix_hash_info() for one in kept]
    assert [one.kv_dtype for one in kept] == ["float32", "float32", "int8"]
    ends = [one.arithmetic.endswith("/int8 kv, rotated keys") for one in infos]
    assert ends == [False, False, True]
    assert infos[0] == infos[1]
    assert infos[0].root_hash != infos[2].root_hash


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be .*'int8', got 'fp8'"),
        ({"attention": "torch", "batch_invariant": False}, "int8 needs the CPU's own kernels"),
        ({"block_size": 8}, "block_size must be at least 16 with kv_cache_dtype int8, got 8"),
        (
            {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
            "kv_cache_dtype must be auto, int8 or float32",
        ),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine(folder, **flags)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "TinyLlama-1.1B", "Llama-2-7B"])
def test_a_token_takes_a_quarter_to_a_half_of_its_bytes(name: str) -> None:
    model = ModelConfig.from_hf(PUBLIC_SHAPES[name])
    codes = kv_layout(model, has_codes=True).bytes_per_block(16, 4)
    assert codes <= 0.27 * kv_layout(model, itemsize=4).bytes_per_block(16, 4)
    assert codes <= 0.54 * kv_layout(model, itemsize=2).bytes_per_block(16, 2)
