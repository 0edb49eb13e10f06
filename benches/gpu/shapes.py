"""Models by their shapes alone: Hugging Face configs, and the least time a step can take.

Configs are as transformers writes them, so that it need not be imported to read them. Floors are
for one H200 (4.3 TB/s and 790 TFLOP/s measured), bfloat16, a context of 1,024 tokens: the bytes
that a step must read, or the operations that a prefill must do, at full speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shape:
    """`floors_ms` maps "prefill" and the batch sizes of decode to milliseconds."""

    name: str
    hf_config: dict[str, Any]
    floors_ms: dict[str, float] = field(default_factory=dict)


_Sizes = tuple[int, int, int, int, int, int, int]
"""Hidden and intermediate size, layers, heads, KV heads, head size, vocabulary."""


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _config(architecture: str, model_type: str, sizes: _Sizes, **values: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "vocab_size")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        **dict(zip(names, sizes, strict=True)),
    } | values


def _qwen(version: int, sizes: _Sizes, theta: float = 1e6, **values: Any) -> dict[str, Any]:
    return _config(
        f"Qwen{version}ForCausalLM", f"qwen{version}", sizes, rope_parameters=_rope(theta), **values
    )


def _gemma3(sizes: _Sizes, window: int) -> dict[str, Any]:
    """Five layers with a window to one without."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(sizes[2])]
    return _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        sizes,
        hidden_activation="gelu_pytorch_tanh",
        layer_types=kinds,
        query_pre_attn_scalar=sizes[5],
        rope_parameters={"full_attention": _rope(1e6), "sliding_attention": _rope(1e4)},
        sliding_window=window,
    )


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "qwen2.5-7b",
            _qwen(2, (3584, 18944, 28, 28, 4, 128, 152064), tie_word_embeddings=False),
            {"prefill": 17.2, "1": 3.30, "64": 4.16, "256": 6.78},
        ),
        Shape(
            "qwen3-0.6b",
            _qwen(3, (1024, 3072, 28, 16, 8, 128, 151936), max_position_embeddings=40960),
            {"prefill": 1.29, "1": 0.30, "64": 2.03, "256": 7.27},
        ),
        Shape(
            "llama-3.2-1b",
            _config(
                "LlamaForCausalLM",
                "llama",
                (2048, 8192, 16, 32, 8, 64, 128256),
                max_position_embeddings=131072,
                rms_norm_eps=1e-5,
                rope_theta=5e5,
                rope_scaling=_LLAMA3_ROPE,
            ),
            {"prefill": 2.61, "1": 0.58, "64": 1.07, "256": 2.57},
        ),
        # The attention of qwen2.5-7b and little else.
        Shape(
            "two-layers",
            _qwen(
                2,
                (3584, 1024, 2, 28, 4, 128, 1024),
                max_position_embeddings=512,
                tie_word_embeddings=False,
            ),
        ),
        # Gemma 3 with heads of 128, whose kernels without a window are prebuilt.
        Shape("hybrid", _gemma3((1024, 4096, 12, 16, 8, 128, 32768), window=512)),
        Shape("tiny-hybrid", _gemma3((64, 96, 7, 4, 2, 32, 384), window=24)),
        Shape("tiny", _qwen(3, (64, 96, 2, 4, 2, 32, 384), 1e4, max_position_embeddings=512)),
    )
}
