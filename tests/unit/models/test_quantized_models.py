"""Models whose weights stay in blocks: every bit is that of the same numbers kept dense."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixcache._core import Cpu
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.models.hub import is_downloaded, resolve_model
from prefixcache.models.quantized import QUANT_FORMATS
from prefixcache.runner.cpu.model import CpuModel
from support.dequantized import save_dequantized
from support.loaded import cpu_model, torch_model
from support.paged_driver import CpuDriver, PagedDriver
from support.repeatable import LONG, bounded
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, save_tokenizer

CPU = Cpu(2)
PROMPT = [(7 * i * i + 3 * i) % 380 + 3 for i in range(70)]
K_MIX = ("Q4_K", "Q6_K", "Q5_K", "Q4_K", "Q8_0")  # as in files called Q4_K_M, the order drawn out
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
GEMMA = {"layer_types": None, "query_pre_attn_scalar": 64, "num_hidden_layers": 3}
CASES: dict[str, tuple[str, dict[str, Any], Sequence[str]]] = {
    "all formats": ("llama", {}, ("F16", *QUANT_FORMATS, "BF16", "F32")),
    "K mix, tied": ("smollm2", {}, K_MIX),
    "biases": ("qwen2", {}, ("Q5_K", "Q4_0", "BF16")),
    "query and key norms": ("qwen3", {}, ("Q6_K", "Q5_1")),
    "four norms, windows": ("gemma3", GEMMA, ("Q4_1", "Q5_0", "Q6_K")),
}


def greedy_logits(model: CpuModel, prompt: list[int], count: int) -> Tensor:
    """All logits of the prompt and of `count` greedy tokens after it, one step each."""
    driver = CpuDriver(model, cpu=CPU)
    rows = [driver.forward([(0, 0, prompt)])]
    for position in range(len(prompt), len(prompt) + count):
        token = int(rows[-1][-1].argmax())
        rows.append(driver.forward([(0, position, [token])]))
    return torch.cat(rows)


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The folder of a GGUF file, and the same numbers written by transformers, in float32."""
    architecture, arguments, formats = CASES[request.param]
    place = tmp_path_factory.mktemp("pair")
    original = make_model(architecture, **WIDE | arguments)
    pre = "qwen2" if architecture.startswith("qwen") else "smollm"
    file = write_gguf(place / "kept.gguf", original, pre=pre, formats=formats)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFIXCACHE_HOME", str(place / "home"))
        kept = resolve_model(str(file))
    original.save_pretrained(place / "dense")
    save_tokenizer(place / "dense")
    return kept, place / "dense"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_greedy_answers_are_those_of_dense_weights_bit_for_bit(pair, dtype):
    kept, dense = (cpu_model(folder, dtype, CPU) for folder in pair)
    count = bounded(usual=16, long=64)
    assert torch.equal(greedy_logits(kept, PROMPT, count), greedy_logits(dense, PROMPT, count))


def test_torchs_linears_compute_with_the_same_numbers(pair: tuple[Path, Path]) -> None:
    kept, dense = (PagedDriver(torch_model(folder)) for folder in pair)
    work = [(0, 0, PROMPT)]
    assert torch.equal(kept.forward(work), dense.forward(work))


@pytest.mark.model
@pytest.mark.skipif(not LONG, reason="dequantizing it takes seconds")
@pytest.mark.skipif(not is_downloaded(DEFAULT_MODEL), reason="prefixcache download was not run")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_model_answers_as_if_it_were_dequantized(dtype, tmp_path):
    folder = resolve_model(DEFAULT_MODEL)
    folders = (folder, save_dequantized(folder, tmp_path / "dense"))
    kept, dense = (cpu_model(one, dtype, CPU) for one in folders)
    assert torch.equal(greedy_logits(kept, PROMPT, 64), greedy_logits(dense, PROMPT, 64))
