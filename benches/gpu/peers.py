"""Other engines on the same workload, with weights made at random in the same shape.

Each maker returns a function of prompts (token ids) and output length that gives the wall seconds,
warm.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from shapes import Shape

Run = Callable[[Sequence[Sequence[int]], int], float]


def transformers_batches(shape: Shape, device: torch.device, max_model_len: int) -> Run:
    """transformers' continuous batching, which shares prefixes of whole blocks."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    del max_model_len
    values = dict(shape.hf_config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="paged|sdpa"
        )
    model.eval()

    def run(prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        options = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        inputs = [list(prompt) for prompt in prompts]
        limits = {} if device.type == "cuda" else _cpu_limits()
        return _timed(
            lambda: model.generate_batch(
                inputs, generation_config=options, progress_bar=False, **limits
            )
        )

    run([[5, 6, 7]], 2)
    return run


def vllm(shape: Shape, device: torch.device, max_model_len: int) -> Run:
    """vLLM with its prefix cache on."""
    from vllm import LLM, SamplingParams

    del device
    llm = LLM(
        model=str(_config_folder(shape)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        enable_prefix_caching=True,
        disable_log_stats=True,
        # Dense models in bfloat16 call nothing of FlashInfer that could be tuned.
        enable_flashinfer_autotune=False,
    )

    def run(prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        llm.reset_prefix_cache()
        return _timed(lambda: llm.generate(inputs, params, use_tqdm=False))

    run([[5, 6, 7]], 2)
    return run


def nano_vllm(shape: Shape, device: torch.device, max_model_len: int) -> Run:
    """nano-vllm, which serves Qwen3 alone and wants weights and a tokenizer on disk."""
    from nanovllm import LLM, SamplingParams

    folder = _weights_folder(shape, device)
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda _ids: "")
    with mock.patch("transformers.AutoTokenizer.from_pretrained", return_value=tokenizer):
        llm = LLM(str(folder), max_model_len=max_model_len)

    def run(prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
        inputs = [list(prompt) for prompt in prompts]
        return _timed(lambda: llm.generate(inputs, params, use_tqdm=False))

    run([[5, 6, 7]], 2)
    return run


@dataclass(frozen=True)
class Peer:
    """An engine, and the package that it comes in."""

    package: str
    make: Callable[[Shape, torch.device, int], Run]

    @property
    def installed(self) -> bool:
        """Whether it can be run here."""
        return importlib.util.find_spec(self.package) is not None


PEERS = {
    "transformers": Peer("transformers", transformers_batches),
    "nano-vllm": Peer("nanovllm", nano_vllm),
    "vllm": Peer("vllm", vllm),
}


def _cpu_limits() -> dict[str, Any]:
    """transformers sizes its pool by a GPU's memory; a CPU's must be said."""
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    return {"continuous_batching_config": config, "warmup": False}


def _timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _config_folder(shape: Shape) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{shape.name}-"))
    (folder / "config.json").write_text(json.dumps(shape.hf_config))
    return folder


def _weights_folder(shape: Shape, device: torch.device) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = _config_folder(shape)
    values = dict(shape.hf_config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
