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


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _gemma3(*, num_layers: int, window: int, **values: Any) -> dict[str, Any]:
    """Five layers with a window to one without."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(num_layers)]
    return _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=num_layers,
        layer_types=kinds,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"full_attention": _rope(1e6), "sliding_attention": _rope(1e4)},
        tie_word_embeddings=True,
        **values | {"sliding_window": window},
    )


def _config(architecture: str, model_type: str, **values: Any) -> dict[str, Any]:
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
    } | values


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "qwen2.5-7b",
            _config(
                "Qwen2ForCausalLM",
                "qwen2",
                hidden_size=3584,
                intermediate_size=18944,
                num_hidden_layers=28,
                num_attention_heads=28,
                num_key_value_heads=4,
                head_dim=128,
                vocab_size=152064,
                max_position_embeddings=32768,
                rms_norm_eps=1e-6,
                rope_parameters=_rope(1e6),
                tie_word_embeddings=False,
            ),
            {"prefill": 17.2, "1": 3.30, "64": 4.16, "256": 6.78},
        ),
        Shape(
            "qwen3-0.6b",
            _config(
                "Qwen3ForCausalLM",
                "qwen3",
                hidden_size=1024,
                intermediate_size=3072,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                vocab_size=151936,
                max_position_embeddings=40960,
                rms_norm_eps=1e-6,
                rope_parameters=_rope(1e6),
                tie_word_embeddings=True,
            ),
            {"prefill": 1.29, "1": 0.30, "64": 2.03, "256": 7.27},
        ),
        Shape(
            "llama-3.2-1b",
            _config(
                "LlamaForCausalLM",
                "llama",
                hidden_size=2048,
                intermediate_size=8192,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=64,
                vocab_size=128256,
                max_position_embeddings=131072,
                rms_norm_eps=1e-5,
                rope_theta=5e5,
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
                tie_word_embeddings=True,
            ),
            {"prefill": 2.61, "1": 0.58, "64": 1.07, "256": 2.57},
        ),
        Shape(
            # The attention of qwen2.5-7b and little else.
            "two-layers",
            _config(
                "Qwen2ForCausalLM",
                "qwen2",
                hidden_size=3584,
                intermediate_size=1024,
                num_hidden_layers=2,
                num_attention_heads=28,
                num_key_value_heads=4,
                head_dim=128,
                vocab_size=1024,
                max_position_embeddings=512,
                rms_norm_eps=1e-6,
                rope_parameters=_rope(1e6),
                tie_word_embeddings=False,
            ),
        ),
        Shape(
            # Gemma 3 with heads of 128, whose kernels without a window are prebuilt.
            "hybrid",
            _gemma3(
                num_layers=12,
                window=512,
                hidden_size=1024,
                intermediate_size=4096,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                query_pre_attn_scalar=128,
                vocab_size=32768,
            ),
        ),
        Shape(
            "tiny-hybrid",
            _gemma3(
                num_layers=7,
                window=24,
                hidden_size=64,
                intermediate_size=96,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                query_pre_attn_scalar=32,
                vocab_size=384,
            ),
        ),
        Shape(
            "tiny",
            _config(
                "Qwen3ForCausalLM",
                "qwen3",
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                vocab_size=384,
                max_position_embeddings=512,
                rms_norm_eps=1e-6,
                rope_parameters=_rope(1e4),
                tie_word_embeddings=True,
            ),
        ),
    )
}
