"""Shapes of published models, and what files of them are quantized to.

`SHAPES` are what their config.json says, as far as a tensor's shape depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prefixcache.config.families import FAMILIES
from support.tiny_gguf import is_matrix, layout, parameters_of

_S, _F = "sliding_attention", "full_attention"
_QWEN3_5 = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262_144,
}
_K_EQ_V = {
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
_BY_ARCHITECTURE: dict[str, dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": {
        "SmolLM2-135M": {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        "TinyLlama-1.1B": {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "vocab_size": 32_000,
            "max_position_embeddings": 2048,
        },
        "Llama-2-7B": {
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32_000,
            "max_position_embeddings": 4096,
        },
        "Llama-3.2-1B": {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
        },
    },
    "Qwen3ForCausalLM": {
        "Qwen3-0.6B": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": True,
        },
        "Qwen3-8B": {
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
        },
    },
    "Phi3ForCausalLM": {
        "Phi-4-mini": {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "vocab_size": 200_064,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
        },
    },
    "Lfm2ForCausalLM": {
        "LFM2.5-1.2B": {
            "hidden_size": 2048,
            "intermediate_size": 12_288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": [
                _F if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
            ],
            "vocab_size": 65_536,
            "max_position_embeddings": 128_000,
            "tie_word_embeddings": True,
        },
    },
    "GptOssForCausalLM": {
        "gpt-oss-20b": {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201_088,
            "max_position_embeddings": 131_072,
        },
    },
    "Qwen3MoeForCausalLM": {
        "Qwen3-30B-A3B": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
        },
    },
    "Qwen3_5ForCausalLM": {
        "Qwen3.5-0.8B": _QWEN3_5
        | {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
        "Qwen3.5-4B": _QWEN3_5
        | {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
            "tie_word_embeddings": True,
        },
        "Qwen3.5-27B": _QWEN3_5
        | {
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
        },
    },
    "Qwen3_5MoeForCausalLM": {
        "Qwen3.5-35B-A3B": _QWEN3_5
        | {
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    },
    "Gemma4ForCausalLM": {
        "Gemma 4 E2B": {
            "final_logit_softcapping": 30.0,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": [*[_S] * 4, _F] * 7,
        },
        "Gemma 4 E4B": {
            "final_logit_softcapping": 30.0,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
            "layer_types": [*[_S] * 5, _F] * 7,
        },
        "Gemma 4 31B": _K_EQ_V
        | {
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "layer_types": [*[_S] * 5, _F] * 10,
        },
        "Gemma 4 26B-A4B": _K_EQ_V
        | {
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "layer_types": [*[_S] * 5, _F] * 5,
        },
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    name: {"architectures": [architecture], **shape}
    for architecture, shapes in _BY_ARCHITECTURE.items()
    for name, shape in shapes.items()
}
# Types of a mix that has two: of most matrices, and of those that get more bits.
_OF_MIX = {
    "Q3_K_M": ("Q3_K", "Q4_K"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q2_K": ("Q2_K", "Q3_K"),
    "IQ4_XS": ("IQ4_XS", "Q5_K"),
}
# Matrices that llama.cpp does not quantize.
_KEPT = {"ffn_gate_inp.weight": Type.F32, "per_layer_model_proj.weight": Type.F16}


class Mix(str, Enum):
    """llama.cpp's names of what a file's tensors are quantized to."""

    Q2_K = "q2_k"
    Q3_K_M = "q3_k_m"
    Q4_K_M = "q4_k_m"
    Q5_K_M = "q5_k_m"
    Q6_K = "q6_k"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    IQ4_NL = "iq4_nl"
    IQ4_XS = "iq4_xs"
    MXFP4_MOE = "mxfp4_moe"

    @property
    def file_type(self) -> gguf.LlamaFileType:
        """What the file says it is."""
        return gguf.LlamaFileType[f"MOSTLY_{self.name}"]

    def of(self, target: str, values: np.ndarray, layers: int, *, is_tied: bool) -> Type:
        """The type of a tensor, by its name there."""
        for ending, kept in _KEPT.items():
            if target.endswith(ending):
                return kept
        if not is_matrix(target, values):
            return Type.F32
        if self is Mix.MXFP4_MOE and target.endswith("_exps.weight"):
            return Type.MXFP4
        if self in (Mix.Q8_0, Mix.MXFP4_MOE) or values.shape[-1] % 256:
            return Type.Q8_0
        *_, layer, part, _ = f"0.0.{target}".split(".")
        if part == ("token_embd" if is_tied else "output"):
            return Type.Q6_K
        usual, wider = _OF_MIX.get(self.name, (self.name, self.name))
        if self is Mix.Q4_K_M and part == "attn_qkv":
            return Type.Q5_K
        is_value, is_down = part.startswith("attn_v"), part.startswith("ffn_down")
        if self is Mix.IQ4_XS:
            # As in shapes of at least four query heads a key head.
            is_wide = is_value or (is_down and int(layer) < layers // 8)
        else:
            is_wide = (is_value or is_down) and _gets_more_bits(int(layer), layers)
        return Type[wider if is_wide else usual]


def _gets_more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def skeleton(name: str, layers: int | None = None) -> PreTrainedModel:
    """The model of that shape, or its first layers, without numbers."""
    shape = dict(SHAPES[name])
    if layers is not None:
        left = shape["num_hidden_layers"] - layers
        shape["num_hidden_layers"] = layers
        if "layer_types" in shape:
            shape["layer_types"] = shape["layer_types"][:layers]
        if readers := shape.get("num_kv_shared_layers"):
            shape["num_kv_shared_layers"] = max(readers - left, 0)
    (architecture,) = shape.pop("architectures")
    config = AutoConfig.for_model(FAMILIES[architecture].model_type, **shape)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tensors_of(model: PreTrainedModel, mix: Mix) -> Iterator[tuple[str, tuple[int, ...], Type]]:
    """Name, shape and type of each tensor of a file of this model."""
    config = model.config
    for name, parameter in parameters_of(model):
        none = np.broadcast_to(np.float32(0), parameter.shape)
        for target, values in layout(name, none, config).items():
            is_tied = config.tie_word_embeddings
            kind = mix.of(target, values, config.num_hidden_layers, is_tied=is_tied)
            yield target, values.shape, kind


def num_bytes(shape: tuple[int, ...], kind: Type) -> int:
    """Those of a tensor in a file."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // numbers * size
