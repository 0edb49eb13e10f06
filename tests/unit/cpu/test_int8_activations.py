"""Weights in blocks times activations of eight bits: other numbers, of their row alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from equality import WIDE, Bench, Counts, make_pair, random_schedule
from prefixcache._core import Cpu
from prefixcache.config.engine_config import Activations, EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.engine.build import BuiltEngine, build
from prefixcache.exceptions import ConfigError
from prefixcache.models.hub import resolve_model
from prefixcache.models.quantized import QUANT_FORMATS
from prefixcache.runner.cpu.cpu_runner import KERNEL_REVISION
from prefixcache.runner.cpu.linear import KernelDType
from support.loaded import cpu_model
from support.paged_driver import CpuDriver
from support.repeatable import bounded
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, save_tokenizer

CPU = Cpu(2)
PROMPT = [(7 * i * i + 3 * i) % 380 + 3 for i in range(90)]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tensors are blocks of every format and dense ones, mixed in its projections."""
    place = tmp_path_factory.mktemp("int8")
    model = make_model("llama", **SHAPE)
    file = write_gguf(place / "tiny.gguf", model, formats=("F16", *QUANT_FORMATS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFIXCACHE_HOME", str(place / "home"))
        return resolve_model(str(file))


def computed(
    folder: Path, dtype: KernelDType, activations: Activations, pieces: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Logits and KV of the prompt, in steps of this many tokens."""
    driver = CpuDriver(cpu_model(folder, dtype, CPU, activations), cpu=CPU)
    rows, start = [], 0
    for size in pieces:
        rows.append(driver.forward([(0, start, PROMPT[start : start + size])]))
        start += size
    assert start == len(PROMPT)
    return torch.cat(rows), driver.kv_of(0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prefill_chunks_and_decode_give_the_same_bits(folder: Path, dtype: KernelDType) -> None:
    whole, kv = computed(folder, dtype, "int8", [90])
    for pieces in ([7, 41, 42], [86, *[1] * 4]):
        logits, written = computed(folder, dtype, "int8", pieces)
        assert torch.equal(logits, whole)
        assert torch.equal(written, kv)
    exact, _ = computed(folder, dtype, "exact", [90])
    assert not torch.equal(whole, exact)
    # Layers of random weights amplify what rounding changes.
    assert float((whole - exact).norm() / exact.norm()) < 0.3


def test_schedules_change_no_bit(tmp_path: Path) -> None:
    blocks, _ = make_pair(tmp_path, "bfloat16", "Q4_1", **WIDE)
    bench, counts = Bench(blocks, "bfloat16", activations="int8"), Counts()
    for seed in range(bounded(usual=2, long=20)):
        counts.add(bench.compare(random_schedule(seed)))
    assert counts.differences == counts.block_differences == 0
    assert counts.hit_tokens > 0
    assert counts.chunks > 0


def engine(folder: Path, **flags: Any) -> BuiltEngine:
    usual: dict[str, Any] = {"device": "cpu", "cache": CacheConfig(num_blocks=64)}
    return build(EngineConfig(model=str(folder), **usual | flags))


def test_the_root_of_hashes_tells_the_arithmetic(folder: Path) -> None:
    """Of the processor's own instructions too, which a flag names or not."""
    best = Cpu.available_instructions()[-1]
    given = [
        {"dtype": dtype, "cpu_activations": activations, "cpu_instructions": form}
        for dtype in ("bfloat16", "float32")
        for activations in get_args(Activations)
        for form in (None, best)
    ]
    given.append({"dtype": "float32", "cpu_instructions": "portable"})
    infos = [engine(folder, **flags).engine.control.prefix_hash_info() for flags in given]
    kernels = f"{best}/r{KERNEL_REVISION}"
    arithmetic = [f"bfloat16/{kernels}"] * 2 + [f"bfloat16/{kernels}, int8"] * 2
    arithmetic += [f"float32/{kernels}"] * 2 + [f"float32/{kernels}, int8"] * 2
    assert [one.arithmetic for one in infos[:-1]] == arithmetic
    assert len({one.root_hash for one in infos}) == len({one.arithmetic for one in infos}) == 5


@pytest.mark.parametrize(
    ("form", "in_blocks", "activations", "dtype"),
    [
        ("avx512_bf16", True, "exact", "bfloat16"),
        ("avx512", True, "exact", "float32"),
        ("avx512", True, "int8", "bfloat16"),
        ("avx512", False, "exact", "bfloat16"),
        ("portable", False, "exact", "float32"),
    ],
)
def test_auto_takes_the_type_that_the_weights_are_multiplied_in_fastest(
    folder: Path, tmp_path: Path, form: str, in_blocks: bool, activations: Activations, dtype: str
) -> None:
    if form not in Cpu.available_instructions():
        pytest.skip(f"the processor has no {form}")
    make_model("llama", **SHAPE).bfloat16().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    flags = {"cpu_instructions": form, "cpu_activations": activations}
    built = engine(folder if in_blocks else tmp_path, dtype="auto", **flags)
    assert built.engine.control.prefix_hash_info().arithmetic.startswith(f"{dtype}/{form}/")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"attention": "torch", "batch_invariant": False}, "needs the CPU's own kernels"),
        ({"cpu_activations": "int4"}, "cpu_activations must be .*'auto', got 'int4'"),
        ({"cpu_instructions": "sse9"}, "cpu_instructions must be one of portable.*, not sse9"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine(folder, **{"cpu_activations": "int8"} | flags)


@pytest.mark.parametrize(
    ("quant_format", "flags", "expected"),
    [
        ("Q4_1", {}, "int8"),
        (None, {}, "exact"),
        ("Q5_0", {}, "exact"),
        ("Q8_0", {"attention": "torch"}, "exact"),
        ("Q8_0", {"requantize": True}, "exact"),
        ("Q8_0", {"cache": CacheConfig(num_blocks=64, max_weight_staleness=1)}, "exact"),
    ],
)
def test_it_is_the_default_where_formats_bear_it_and_our_kernels_compute(
    tmp_path: Path, quant_format: str | None, flags: dict[str, Any], expected: str
) -> None:
    """Not where a trainer sends weights: it rounds no activations."""
    place, _ = make_pair(tmp_path, "float32", quant_format, **WIDE)
    assert engine(place, dtype="float32", **flags).activations == expected


def test_a_start_that_mixes_it_with_new_weights_warns(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for activations, warns in ("exact", False), ("int8", True):
        caplog.clear()
        engine(folder, cpu_activations=activations, requantize=True)
        assert ("differ from those of a trainer" in caplog.text) == warns


@pytest.mark.parametrize("tier", ["kv_cache_dir", "disk_cache_memory"])
def test_what_was_kept_of_the_other_setting_stays(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, tier: str
) -> None:
    """The start says why nothing hits, once, and what reads it again."""
    kept: dict[str, Any] = {"kv_cache_dir": tmp_path}
    if tier == "disk_cache_memory":
        kept = {"disk_cache_memory": 1 << 28, "disk_cache_dir": tmp_path}
    cache, said = CacheConfig(num_blocks=64, **kept), []
    for activations in ("exact", "int8", "int8", "exact"):
        caplog.clear()
        built = engine(folder, cpu_activations=activations, cache=cache)
        said.append("--cpu-activations exact reads it again" in caplog.text)
        names = {path.name for path in tmp_path.iterdir()}
        built.engine.close()
        file = built.engine._steps._runner.kv_specs().file
        if file is not None:
            file.close()
    assert said == [False, True, False, False]
    assert len([name for name in names if name.endswith((".kv", ".generation"))]) == 2


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    dense, _ = make_pair(tmp_path, "float32", None, **WIDE)
    with pytest.raises(ConfigError, match="no weight of this model is quantized"):
        engine(dense, cpu_activations="int8")
