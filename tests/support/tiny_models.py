"""Tiny random checkpoints of every supported architecture, in the Hugging Face folder layout.

Seeded, so two calls with the same arguments write the same weights. The tokenizer is a byte-level
BPE trained here on a page of text, with ChatML turns, so that any string round-trips.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    ArceeConfig,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HeliumConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

EOS = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", EOS]
VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = (
    "A block of the cache holds the keys and values of sixteen tokens.",
    "The same question asked twice is answered from the blocks that are already there.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Que sera, sera; whatever will be, will be. 天地玄黃 宇宙洪荒 🦙",
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A config class and the arguments in which this family differs from the others."""

    config_class: type
    arguments: dict[str, Any]


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
# Queries grow with every 32 tokens.
_MINISTRAL3 = {
    "head_dim": 32,
    "rope_parameters": _YARN_ROPE
    | {
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.2,
    },
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

_QWEN_WINDOWS = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 2,
}
_GEMMA2 = {
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
}
# Three layers with a window to one without, as Gemma 3 has five.
_GEMMA3 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 24,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_VISION = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    },
    "mm_tokens_per_image": 4,
}

_PIXTRAL = {
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 16,
        "patch_size": 8,
    },
    "tie_word_embeddings": False,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 1.5,
    "rms_norm_eps": 0.5,
}
_GRANITE_MOE = _GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}
_GRANITE4 = _GRANITE | {
    "layer_types": ["attention"] * 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "tie_word_embeddings": True,
}
# One layer of attention; 12 heads share B and C, or 6 do.
_GRANITE4_H = _GRANITE4 | {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 96,
    "mamba_n_heads": 12,
    "mamba_d_head": "auto",
    "mamba_expand": 3,
    "mamba_d_state": 32,
    "mamba_chunk_size": 32,
}
_GRANITE4_H_MOE = _GRANITE4_H | {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    # The transformers of Python 3.10 normalises all groups as one.
    "mamba_n_groups": 2 if sys.version_info >= (3, 11) else 1,
    "mamba_proj_bias": True,
}
# The third of four mixers has no MLP behind it.
_NEMOTRON_H = {
    "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba", "mamba", "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "chunk_size": 32,
    "layer_norm_epsilon": 0.1,
    "time_step_min": 1e-30,  # below which transformers lets no step of a prompt be
}
# Layers of two head sizes. The last three read the KV of others: layer 4 that of layer 3, layers 5
# and 6 that of layer 2.
_GEMMA4 = {
    "num_hidden_layers": 7,
    "layer_types": [*("sliding_attention",) * 2, "full_attention"] * 2 + ["full_attention"],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e3,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    },
}
# As the larger ones: fewer heads without a window, whose values are their keys; nothing is shared.
# Experts stand next to the MLP.
_GEMMA4_LARGE = _GEMMA4 | {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
_GEMMA4_SENSES = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "audio_config": None,
}


def _granite4_h_shape(hidden_size: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": hidden_size // 32,
        "mamba_d_state": 128,
    }


# What published models of Mamba-2 say of their layers.
STATE_SHAPES: dict[str, dict[str, Any]] = {
    name: {
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 4096,
        **shape,
    }
    for name, shape in {
        "granite-4.0-h-micro": _granite4_h_shape(2048, 32, 8),
        "granite-4.0-h-tiny": _granite4_h_shape(1536, 12, 4),
        "granite-4.0-h-small": _granite4_h_shape(4096, 32, 8),
        "Nemotron-H-8B": {
            "architectures": ["NemotronHForCausalLM"],
            "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
            "num_attention_heads": 32,
        },
    }.items()
}
# Three layers of convolutions to two of attention.
_LFM2 = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "intermediate_size": 144,
    "block_multiple_of": 32,
    "tie_word_embeddings": True,
}
# Two layers of the delta rule to one of attention; two value heads share a key head.
_QWEN3_5 = {
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": True,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
# The middle one of three layers is dense.
_QWEN3_MOE = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
_SHARED_EXPERT = _QWEN3_MOE | {"shared_expert_intermediate_size": 128}
_QWEN3_5_MOE = {name: value for name, value in _SHARED_EXPERT.items() if name != "mlp_only_layers"}
_QWEN3_5_MOE |= _QWEN3_5 | {"num_hidden_layers": 3, "layer_types": _QWEN3_5["layer_types"][:3]}
_QWEN3_NEXT = _QWEN3_5_MOE | {
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "mlp_only_layers": [1],
}
_GPT_OSS = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 24,
    "rope_parameters": _YARN_ROPE | {"truncate": False},
}
_PHI3 = {
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 512,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.0, 1.5, 3.0, 8.0],
    },
}
# Three layers with a window to one without; YaRN in that one alone.
_OLMO3 = {
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "rope_parameters": {
        "full_attention": _YARN_ROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
# The first layer is dense.
_LFM2_MOE = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": True,
}
_MISTRAL = {"sliding_window": None, "head_dim": 32}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(LlamaConfig, {}),
    "smollm2": Architecture(LlamaConfig, {"tie_word_embeddings": True}),
    "llama-bias": Architecture(LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": Architecture(LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear": Architecture(LlamaConfig, {"rope_parameters": _LINEAR_ROPE}),
    "mistral": Architecture(MistralConfig, _MISTRAL),
    "mistral3": Architecture(
        Mistral3Config, {"text_config": _MISTRAL | {"model_type": "mistral"}, **_PIXTRAL}
    ),
    "ministral3": Architecture(Ministral3Config, _MINISTRAL3),
    "ministral3-vision": Architecture(
        Mistral3Config, {"text_config": _MINISTRAL3 | {"model_type": "ministral3"}, **_PIXTRAL}
    ),
    "qwen2": Architecture(Qwen2Config, {}),
    "qwen2-yarn": Architecture(Qwen2Config, {"rope_parameters": _YARN_ROPE}),
    "qwen3": Architecture(Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-moe": Architecture(Qwen3MoeConfig, _QWEN3_MOE),
    "qwen2-moe": Architecture(Qwen2MoeConfig, _SHARED_EXPERT),
    "qwen3-next": Architecture(Qwen3NextConfig, _QWEN3_NEXT),
    "olmoe": Architecture(OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 2}),
    # Half of a head is rotated; one has a longer context than it was made with.
    "phi3": Architecture(Phi3Config, _PHI3),
    "phi3-short": Architecture(Phi3Config, _PHI3 | {"original_max_position_embeddings": 512}),
    "olmo2": Architecture(Olmo2Config, {}),
    "smollm3": Architecture(SmolLM3Config, {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "granite": Architecture(GraniteConfig, _GRANITE | {"attention_bias": True}),
    "granite-moe": Architecture(GraniteMoeConfig, _GRANITE_MOE),
    "granite-moe-shared": Architecture(
        GraniteMoeSharedConfig, _GRANITE_MOE | {"shared_intermediate_size": 128}
    ),
    "granite4": Architecture(
        GraniteMoeHybridConfig, _GRANITE4 | {"position_embedding_type": "rope"}
    ),
    "granite4-nope": Architecture(GraniteMoeHybridConfig, _GRANITE4),
    "granite4-h": Architecture(GraniteMoeHybridConfig, _GRANITE4_H),
    "granite4-h-moe": Architecture(GraniteMoeHybridConfig, _GRANITE4_H_MOE),
    "nemotron-h": Architecture(NemotronHConfig, _NEMOTRON_H),
    "arcee": Architecture(ArceeConfig, {"mlp_bias": True, "head_dim": 32}),
    "ernie4.5": Architecture(Ernie4_5Config, {"use_bias": True, "head_dim": 32}),
    "helium": Architecture(HeliumConfig, {"attention_bias": True, "head_dim": 16}),
    "glm4": Architecture(Glm4Config, {"head_dim": 32}),
    "seed-oss": Architecture(SeedOssConfig, {"head_dim": 32, "attention_out_bias": True}),
    "qwen3.5": Architecture(Qwen3_5TextConfig, _QWEN3_5),
    "qwen3.5-vision": Architecture(
        Qwen3_5Config, {"text_config": _QWEN3_5, "vision_config": _QWEN_VISION}
    ),
    "qwen3.5-moe": Architecture(Qwen3_5MoeTextConfig, _QWEN3_5_MOE),
    "qwen3.5-moe-vision": Architecture(
        Qwen3_5MoeConfig, {"text_config": _QWEN3_5_MOE, "vision_config": _QWEN_VISION}
    ),
    "lfm2": Architecture(Lfm2Config, _LFM2),
    "lfm2-moe": Architecture(Lfm2MoeConfig, _LFM2_MOE),
    "lfm2-bias": Architecture(
        Lfm2Config,
        _LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
}
# Those with layers that see a window alone.
WINDOWED: dict[str, Architecture] = {
    "mistral-window": Architecture(MistralConfig, {"sliding_window": 24, "head_dim": 32}),
    "qwen2-window": Architecture(Qwen2Config, _QWEN_WINDOWS),
    "qwen3-window": Architecture(Qwen3Config, _QWEN_WINDOWS | {"head_dim": 32}),
    "smollm3-window": Architecture(
        SmolLM3Config,
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "phi3-window": Architecture(Phi3Config, {"sliding_window": 24}),
    "olmo3": Architecture(Olmo3Config, _OLMO3),
    # Three layers with a window to one without, which does not rotate.
    "exaone4": Architecture(
        Exaone4Config,
        {"num_hidden_layers": 4, "sliding_window": 24, "rope_parameters": _LLAMA3_ROPE},
    ),
    "gpt-oss": Architecture(GptOssConfig, _GPT_OSS),
    "gemma2": Architecture(Gemma2Config, _GEMMA2),
    "gemma3": Architecture(Gemma3TextConfig, _GEMMA3),
    "gemma4": Architecture(Gemma4TextConfig, _GEMMA4),
    "gemma4-large": Architecture(Gemma4TextConfig, _GEMMA4_LARGE),
    "gemma4-vision": Architecture(
        Gemma4Config, {"text_config": _GEMMA4, "tie_word_embeddings": True, **_GEMMA4_SENSES}
    ),
    "gemma3-vision": Architecture(Gemma3Config, {"text_config": _GEMMA3, **_VISION}),
}


def make_checkpoint(
    folder: Path,
    architecture: str = "smollm2",
    *,
    dtype: torch.dtype = torch.float32,
    sharded: bool = False,
    seed: int = 0,
    max_position_embeddings: int = 512,
    **arguments: Any,
) -> Path:
    """Writes a tiny random model with its tokenizer into `folder` and returns it.

    `arguments` override those of the transformers config. `sharded` splits the weights over
    several safetensors files.
    """
    model = make_model(
        architecture, seed=seed, max_position_embeddings=max_position_embeddings, **arguments
    )
    model.generation_config.update(temperature=0.7, top_p=0.9, do_sample=True)
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    save_tokenizer(folder)
    return folder


def make_model(architecture: str, *, seed: int = 0, **arguments: Any) -> PreTrainedModel:
    """The transformers model itself, float32, in evaluation mode."""
    config = make_config(architecture, **arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _auto_class(config).from_config(config, attn_implementation="eager")
        _stir(model)
    return model.eval()


@cache
def load_model(folder: Path) -> PreTrainedModel:
    """The transformers model of a folder that does not change, float32."""
    auto_class = _auto_class(AutoConfig.from_pretrained(folder))
    # The transformers of Python 3.10 leaves Gemma 2's softcap out otherwise.
    return auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def _auto_class(config: PreTrainedConfig) -> Any:
    sees_images = isinstance(
        config, Mistral3Config | Qwen3_5Config | Qwen3_5MoeConfig | Gemma4Config
    )
    return AutoModelForImageTextToText if sees_images else AutoModelForCausalLM


def make_config(architecture: str, **arguments: Any) -> PreTrainedConfig:
    """Its transformers config; `arguments` are those of the part that reads text."""
    family = (ARCHITECTURES | WINDOWED)[architecture]
    text = _config_arguments() | family.arguments.get("text_config", family.arguments) | arguments
    if "text_config" not in family.arguments:
        return family.config_class(**text)
    return family.config_class(**family.arguments | {"text_config": text})


def is_greedy(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether each token of the answer is the model's likeliest after those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return list(answer) == logits.argmax(-1).tolist()


def _config_arguments() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }


# Models whose norms multiply by their weight and 1.
_OFFSET_NORMS = ("gemma2", "gemma3", "qwen3_5", "qwen3_next")


def _stir(model: PreTrainedModel) -> None:
    """Spreads the weights, norms and biases too, so that no part can be left out unnoticed."""
    offset = 1.0 if model.config.model_type.startswith(_OFFSET_NORMS) else 0.0
    with torch.no_grad():
        _stir_buffers(model)
        for name, parameter in model.named_parameters():
            if name.endswith(("linear_attn.norm.weight", ".D")):
                parameter.uniform_(0.5, 1.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5).sub_(offset)
            elif name.endswith("A_log"):
                parameter.uniform_(-3.0, 0.5)
            elif name.endswith("sinks"):
                parameter.normal_(std=2.0)
            elif name.endswith("router.scale"):
                parameter.uniform_(4.0, 12.0)  # so that experts' scores differ
            elif name.endswith("per_expert_scale"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.15)
    if model.config.model_type.startswith("gemma4"):
        _scale_queries(model)


def _stir_buffers(model: PreTrainedModel) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(std=0.2)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)


@torch.no_grad()
def _scale_queries(model: PreTrainedModel) -> None:
    """By norms, which do what others' scale of scores does."""
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.mul_(0.3)


def save_tokenizer(folder: Path) -> None:
    """Trains the tokenizer and writes tokenizer.json, tokenizer_config.json and the template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(),
        bos_token="<|im_start|>",
        eos_token=EOS,
        pad_token=EOS,
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)


@cache
def train_tokenizer() -> Tokenizer:
    """Byte-level BPE of at most `VOCAB_SIZE` entries; the special tokens have ids 0 to 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def edit_config(folder: Path, **changes: Any) -> None:
    """Overwrites fields of the folder's config.json; a value of None removes the field."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
