"""GGUF files as folders like those of Hugging Face, made once; weights stay in the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import LlamaFileType

from prefixcache.config.hf_config import CONV, FULL, LINEAR, SLIDING, read_hf_config
from prefixcache.exceptions import ModelLoadError, UnsupportedModelError
from prefixcache.models.gguf.header import (
    SUPPORTED_FORMATS,
    GgufHeader,
    read_header,
)
from prefixcache.models.gguf.index import IndexedTensor, write_index, write_json
from prefixcache.models.gguf.special_tokens import log_ends, suppressed_token_ids, token_ids
from prefixcache.models.gguf.tokenizer import write_tokenizer
from prefixcache.models.safetensors_file import TensorRange

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
}
"""The architectures of GGUF files, by their names there."""


def _gated(name: str, module: str) -> dict[str, str]:
    """The modules of a gated MLP, by names that have its part in the place of the "*"."""
    parts = ("gate", "up", "down")
    return {name.replace("*", one): module.replace("*", one) for one in parts}


_MODULES = {
    "attn_norm": "input_layernorm",
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{one}_norm": f"self_attn.{one}_norm" for one in "qk"},
    "ffn_norm": "post_attention_layernorm",
    **_gated("ffn_*", "mlp.*_proj"),
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **_gated("ffn_*_shexp", "mlp.shared_expert.*_proj"),
    **_gated("ffn_*_exps", "mlp.experts.{}.*_proj"),
}
# Tensors of all experts of a layer, one after the other, and what an expert has in them.
_EXPERTS = {
    "ffn_gate_exps": ("ffn_gate_exps",),
    "ffn_up_exps": ("ffn_up_exps",),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    "ffn_down_exps": ("ffn_down_exps",),
}
# What llama.cpp knows of mixtures of experts without writing it: whether the weights of a token's
# experts are divided by their sum.
_RENORMALISE = {
    "qwen2moe": False,
    "qwen3moe": True,
    "olmoe": False,
    "gpt-oss": True,
    "granitemoe": True,
    "granitehybrid": True,
    "lfm2moe": True,
    "qwen3next": True,
    "qwen35moe": True,
}
_DELTA = ("qwen3next", "qwen35", "qwen35moe")
_LFM2_MODULES = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    **{f"attn_{one}_norm": f"self_attn.{one}_layernorm" for one in "qk"},
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_DELTA_MODULES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GRANITE_MOE_MODULES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **_gated("ffn_*_shexp", "shared_mlp.*_proj"),
    **_gated("ffn_*_exps", "block_sparse_moe.{}.*_proj"),
}
_MAMBA_MODULES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_NEMOTRON_H_MODULES = {
    "attn_norm": "norm",
    **{f"attn_{one}": f"mixer.{one}_proj" for one in "qkv"},
    "attn_output": "mixer.o_proj",
    **{f"ffn_{one}": f"mixer.{one}_proj" for one in ("up", "down")},
    **{name: module.replace("mamba.", "mixer.") for name, module in _MAMBA_MODULES.items()},
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_MODULES = _NORMS_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
# Where an architecture's modules have other names. Gemma has four norms a layer, of which two have
# the names of Llama's.
_OWN_MODULES = {
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "lfm2": _LFM2_MODULES,
    "lfm2moe": _LFM2_MODULES
    | {
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b": "feed_forward.expert_bias",
        "ffn_gate_exps": "feed_forward.experts.{}.w1",
        "ffn_up_exps": "feed_forward.experts.{}.w3",
        "ffn_down_exps": "feed_forward.experts.{}.w2",
    },
    "granitemoe": _GRANITE_MOE_MODULES,
    "granitehybrid": _GRANITE_MOE_MODULES | _MAMBA_MODULES | _gated("ffn_*", "shared_mlp.*_proj"),
    **dict.fromkeys(_DELTA, _DELTA_MODULES),
    "nemotron_h": _NEMOTRON_H_MODULES,
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    **dict.fromkeys(("olmo2", "exaone4"), _NORMS_AFTER),
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA_MODULES),
    "gemma4": _GEMMA_MODULES
    | {
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale": "layer_scalar",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        **_gated("ffn_*_exps", "experts.{}.*_proj"),
    },
}
# What the frequencies of pairs are divided by, tensors of a file. Llama 3's are the same at any
# length, and do not stretch what they turn. Gemma 4's are 1, or so large that nothing is turned.
_FACTORS = {
    "rope_freqs.weight": ("short_factor", "long_factor"),
    "rope_factors_short.weight": ("short_factor",),
    "rope_factors_long.weight": ("long_factor",),
}
# Both of YaRN's `mscale` are one number there.
_ROPE_KEYS = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale": "rope.scaling.yarn_log_multiplier",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
}
_GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
# Those whose rotated pairs llama.cpp has side by side.
_PAIRED = (
    *("llama", "mistral3", "smollm3", "arcee", "nemotron_h"),
    *("granite", "granitemoe", "granitehybrid"),
)
# What llama.cpp knows of Gemma 2 and 3 without writing it: every how many layers one has no window,
# and the number of layers of the model whose attention is scaled by its width, not its heads'.
_GEMMA_PATTERNS = {"gemma2": 2, "gemma3": 6}
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# Factors from here on, of Gemma 4's slowest pairs, stand for no rotation.
_UNTURNED = 1e20
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "output.weight": "lm_head.weight",
}
# Those whose name begins so have tensors of formats that do not run.
_UNSUPPORTED_TYPES = {
    kind.value: kind.name.removeprefix("MOSTLY_")
    for kind in LlamaFileType
    if kind.name.startswith(("MOSTLY_IQ1", "MOSTLY_IQ2", "MOSTLY_IQ3", "MOSTLY_TQ"))
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias|scale)")
# Parameters that are not a module's: those have no "weight" or "bias" behind their names.
_LONE = re.compile(r"(sinks|A_log|D|dt_bias|expert_bias)\.(weight|bias)")
# Tensors whose names llama.cpp ends without one of these.
_BARE = (".ssm_a", ".ssm_d")


def convert_gguf(files: Sequence[Path], folder: Path, digests: Sequence[str]) -> None:
    """Writes config, tokenizer, chat template and an index of the tensors of a GGUF file.

    The weights stay in the file, or the parts that it is split into, as `write_index` has them:
    `folder` gets them, or links to them, by the names `index.weights_file`. Raises
    `ModelLoadError` for a broken file and `UnsupportedModelError` for a model of another family;
    both name the file.
    """
    headers = [read_header(file) for file in files]
    with errors_of(f"The GGUF file {files[0]}"):
        config = _config_of(headers, dict(_factors(files, headers)))
        tensors = list(_indexed(headers, config))
        sizes = [file.stat().st_size for file in files]
        write_index(folder, tensors, list(zip(sizes, digests, strict=True)))
        write_json(folder / "config.json", config)
        metadata = headers[0].metadata
        generation = token_ids(metadata) | {"suppress_tokens": suppressed_token_ids(metadata)}
        write_json(folder / "generation_config.json", generation)
        log_ends(files[0].name, metadata)
        write_tokenizer(folder, metadata, config["max_position_embeddings"])


@contextmanager
def errors_of(file: str) -> Generator[None]:
    """Lets errors name the file. What its header says without sense is one, `ModelLoadError`."""
    try:
        yield
    except (UnsupportedModelError, ModelLoadError) as error:
        raise type(error)(f"{file}: {error}") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelLoadError(f"{file} is broken: {error}") from error


def check_header(parts: Sequence[GgufHeader]) -> None:
    """Raises `UnsupportedModelError` where the model of a file's parts is not supported.

    What makes no sense raises other errors: see `errors_of`.
    """
    lengths = {one.name: one.shape[0] for part in parts for one in part.tensors}
    factors = {name: [1.0] * lengths[name] for name in _FACTORS if name in lengths}
    config = _config_of(parts, factors)
    for _ in _indexed(parts, config):
        pass
    read_hf_config(config)


def check_metadata(key: str, value: Any) -> None:
    """Raises `UnsupportedModelError` where a value of a header says that the file cannot run."""
    if key == "general.architecture":
        _Metadata({key: value})
    if key == "general.file_type" and value in _UNSUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"its quantization is {_UNSUPPORTED_TYPES[value]}. "
            f"Supported: {', '.join(SUPPORTED_FORMATS)}."
        )


def _config_of(parts: Sequence[GgufHeader], factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """The first part has the metadata of all. `factors` are the numbers of `_FACTORS`."""
    names = {tensor.name for part in parts for tensor in part.tensors}
    metadata = _Metadata(parts[0].metadata)
    config: dict[str, Any] = _config(metadata) | _flags(names)
    if metadata.architecture == "gemma4":
        return config | _gemma4_config(metadata, config, names, factors)
    if metadata.architecture == "ernie4_5":
        config["use_bias"] = config["mlp_bias"]
    if metadata.architecture == "qwen3next":
        config["linear_qkvz_apart"] = any(name.endswith(".attn_gate.weight") for name in names)
    if factors:
        original = "original_max_position_embeddings"
        context = metadata.shape(
            "rope.scaling.original_context_length", metadata.shape("context_length")
        )
        rope = {"rope_type": "longrope", original: context}
        rope |= {kind: factors[name] for name in factors for kind in _FACTORS[name]}
        if "rope_freqs.weight" in factors:
            rope["attention_factor"] = 1.0
        config |= {original: context, "rope_parameters": config["rope_parameters"] | rope}
    return config


def _factors(
    files: Sequence[Path], headers: Sequence[GgufHeader]
) -> Iterator[tuple[str, list[float]]]:
    for file, header in zip(files, headers, strict=True):
        for tensor in header.tensors:
            if tensor.name in _FACTORS:
                if tensor.format != "F32":
                    raise UnsupportedModelError(
                        f"tensor {tensor.name} is {tensor.format}, not F32."
                    )
                numbers = np.fromfile(file, "<f4", tensor.nbytes // 4, offset=tensor.start)
                yield tensor.name, [float(str(number)) for number in numbers]


class _Metadata:
    """The key-value part of a GGUF file. Keys of the model's shape go without their prefix."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.architecture: str = self.get("general.architecture", "")
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"architecture {self.architecture!r} is not supported. "
                f"Supported: {', '.join(ARCHITECTURES)}."
            )

    @property
    def token_ids(self) -> dict[str, Any]:
        return token_ids(self._values)

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def shape(self, key: str, default: Any = None) -> Any:
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"it lacks {self.architecture}.{key}.")
        return value

    def decimal(self, key: str, default: float) -> float:
        """A float32 as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self.shape(key, default))))


def _flags(names: set[str]) -> dict[str, bool]:
    """What the file's tensors say of the model; Qwen2 ignores the flag of its biases."""
    biases = {name.rpartition(".")[0].rpartition(".")[2] for name in names if name.endswith("bias")}
    return {
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "attn_q" in biases,
        "attention_out_bias": "attn_output" in biases,
        "mlp_bias": "ffn_down" in biases,
        "use_expert_bias": "exp_probs_b" in biases,
        "mamba_conv_bias": "ssm_conv1d" in biases,
        "mamba_proj_bias": "ssm_in" in biases,
    }


def _config(metadata: _Metadata) -> dict[str, Any]:
    config = _common_config(metadata)
    if metadata.architecture in _RENORMALISE and not _is_dense_granite(metadata):
        config |= _experts_config(metadata)
    own = _OWN_CONFIGS.get(metadata.architecture)
    return config if own is None else config | own(metadata, config)


def _granite_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    given = {ours: metadata.decimal(key, 1.0) for ours, key in _GRANITE_KEYS.items()}
    shared = metadata.shape("expert_shared_feed_forward_length", 0)
    if not shared:
        return given
    name = config["architectures"][0].replace("Moe", "MoeShared")
    return given | {"architectures": [name], "shared_intermediate_size": shared}


def _is_dense_granite(metadata: _Metadata) -> bool:
    return metadata.architecture == "granitehybrid" and not metadata.shape("expert_count", 0)


def _granite_hybrid_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    given = {ours: metadata.decimal(key, 1.0) for ours, key in _GRANITE_KEYS.items()}
    shared = metadata.shape("expert_shared_feed_forward_length", config["intermediate_size"])
    rotates = metadata.shape("rope.scaling.finetuned", True)
    return {
        **given,
        **_layers_without_heads(metadata, config, LINEAR),
        **_mamba_config(metadata, config),
        "num_local_experts": metadata.shape("expert_count", 0),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if rotates else "nope",
    }


def _nemotron_h_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Layers of a feed-forward are MLPs, and have no heads either."""
    found = _layers_without_heads(metadata, config, LINEAR)
    sizes = config["intermediate_size"]
    if not isinstance(sizes, list) or len(sizes) != config["num_hidden_layers"]:
        raise ModelLoadError("its nemotron_h.feed_forward_length has no number for each layer.")
    kinds = zip(found.pop("layer_types"), sizes, strict=True)
    return {
        **found,
        **_mamba_config(metadata, config),
        "intermediate_size": max(sizes),
        "layers_block_type": ["mlp" if size else kind for kind, size in kinds],
        "mlp_hidden_act": "relu2",
    }


def _mamba_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    values, heads = metadata.shape("ssm.inner_size"), metadata.shape("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_n_groups": metadata.shape("ssm.group_count"),
        "mamba_d_head": values // heads,
        "mamba_d_state": metadata.shape("ssm.state_size"),
        "mamba_d_conv": metadata.shape("ssm.conv_kernel"),
        "mamba_expand": values // config["hidden_size"],
    }


def _layers_without_heads(metadata: _Metadata, config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Layers without heads of keys are of this kind."""
    heads = config["num_key_value_heads"]
    if not isinstance(heads, list) or len(heads) != config["num_hidden_layers"]:
        key = f"{metadata.architecture}.attention.head_count_kv"
        raise ModelLoadError(f"its {key} has no number for each layer.")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if one else kind for one in heads],
    }


def _lfm2_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return _layers_without_heads(metadata, config, CONV) | {
        "conv_L_cache": metadata.shape("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": metadata.shape("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.decimal("expert_weights_scale", 1.0),
    }


def _delta_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Layers that guess stand behind the others, and Qwen3.5's value heads of a key head apart."""
    value_heads = metadata.shape("ssm.time_step_rank")
    guessing = metadata.shape("nextn_predict_layers", 0)
    return _partly_rotated(metadata, config) | {
        "num_hidden_layers": config["num_hidden_layers"] - guessing,
        "full_attention_interval": metadata.shape("full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.shape("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.shape("ssm.state_size"),
        "linear_value_head_dim": metadata.shape("ssm.inner_size") // value_heads,
        "linear_num_key_heads": metadata.shape("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_heads_tiled": metadata.architecture != "qwen3next",
    }


def _experts_config(metadata: _Metadata) -> dict[str, Any]:
    size = metadata.shape("expert_feed_forward_length", metadata.shape("feed_forward_length"))
    shared = metadata.shape("expert_shared_feed_forward_length", 0) or None
    return {
        "shared_expert_intermediate_size": shared,
        "num_local_experts": metadata.shape("expert_count"),
        "num_experts_per_tok": metadata.shape("expert_used_count"),
        "moe_intermediate_size": size,
        "norm_topk_prob": _RENORMALISE.get(metadata.architecture),
    }


def _gpt_oss_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Every second layer has a window; YaRN's bounds are not whole numbers."""
    return {
        "intermediate_size": config["moe_intermediate_size"],
        "sliding_window": metadata.shape("attention.sliding_window"),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


def _phi3_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    window = metadata.shape("attention.sliding_window", 0) or None
    return {"sliding_window": window} | _partly_rotated(metadata, config)


def _partly_rotated(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    rotated = metadata.shape("rope.dimension_count", config["head_dim"])
    part = {"partial_rotary_factor": rotated / config["head_dim"]}
    return {"rope_parameters": config["rope_parameters"] | part}


def _olmo_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 is OLMo 2 with windows; their layers turn by the rope without its scaling."""
    windows = _windows(metadata, config)
    if not windows["sliding_window"]:
        return {}
    rope = config["rope_parameters"]
    local = {"rope_theta": rope["rope_theta"], "rope_type": "default"}
    return windows | {
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {FULL: rope, SLIDING: local},
    }


def _layer_types(slides: Sequence[bool]) -> list[str]:
    return [SLIDING if one else FULL for one in slides]


def _windows(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """The window, and the type of each layer; all are full where there is none."""
    window = metadata.shape("attention.sliding_window", 0) or None
    slides: list[bool] = [False] * config["num_hidden_layers"]
    if window:
        slides = metadata.shape("attention.sliding_window_pattern")
    return {"sliding_window": window, "layer_types": _layer_types(slides)}


def _gemma_config(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    if num_layers == _GEMMA_27B_LAYERS[metadata.architecture]:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    window = metadata.shape("attention.sliding_window", 0)
    pattern = _GEMMA_PATTERNS[metadata.architecture]
    slides = [bool(window and (i + 1) % pattern) for i in range(num_layers)]
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head_dim,
        **{name: cap for name in caps if (cap := metadata.shape(name, 0.0))},
        "sliding_window": window or None,
        "layer_types": _layer_types(slides),
    }


def _local_rope(metadata: _Metadata) -> dict[str, Any]:
    """That of layers with a window."""
    theta = metadata.decimal("rope.freq_base_swa", 10_000.0)
    return {"rope_theta": theta, "rope_type": "default"}


def _gemma4_config(
    metadata: _Metadata,
    config: dict[str, Any],
    names: set[str],
    factors: Mapping[str, list[float]],
) -> dict[str, Any]:
    slides: list[bool] = metadata.shape("attention.sliding_window_pattern")
    full = [i for i, one in enumerate(slides) if not one]
    if len(slides) != config["num_hidden_layers"] or not full:
        raise ModelLoadError("its gemma4.attention.sliding_window_pattern is not one of its layers")
    of_layers = {
        name: values if isinstance(values := config[name], list) else [values] * len(slides)
        for name in ("num_key_value_heads", "intermediate_size")
    }
    if any(len(values) != len(slides) for values in of_layers.values()):
        raise ModelLoadError("it lacks sizes of some of its layers.")
    heads, sizes = of_layers["num_key_value_heads"], of_layers["intermediate_size"]
    has_experts = bool(metadata.shape("expert_count", 0))
    turned = [factor < _UNTURNED for factor in factors.get("rope_freqs.weight", [1.0])]
    share = sum(turned) / len(turned)
    proportional = {"rope_type": "proportional", "partial_rotary_factor": share}
    return {
        "enable_moe_block": has_experts,
        **(_experts_config(metadata) if has_experts else {}),
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": metadata.shape("attention.key_length_swa"),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": next((heads[i] for i, one in enumerate(slides) if one), heads[0]),
        "num_global_key_value_heads": heads[full[0]],
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in names,
        "num_kv_shared_layers": metadata.shape("attention.shared_kv_layers", 0),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "hidden_size_per_layer_input": metadata.shape("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": metadata.shape("final_logit_softcapping", 0.0) or None,
        "sliding_window": metadata.shape("attention.sliding_window"),
        "layer_types": _layer_types(slides),
        "rope_parameters": {
            FULL: config["rope_parameters"] | proportional,
            SLIDING: _local_rope(metadata),
        },
    }


_OWN_CONFIGS: dict[str, Callable[[_Metadata, dict[str, Any]], dict[str, Any]]] = {
    "gpt-oss": _gpt_oss_config,
    "phi3": _phi3_config,
    "olmo2": _olmo_config,
    "exaone4": _windows,
    "arcee": lambda _metadata, _config: {"hidden_act": "relu2"},
    **dict.fromkeys(("granite", "granitemoe"), _granite_config),
    "granitehybrid": _granite_hybrid_config,
    "nemotron_h": _nemotron_h_config,
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2_config),
    **dict.fromkeys(_DELTA, _delta_config),
    "glm4": _partly_rotated,
    "gemma2": _gemma_config,
    "gemma3": lambda metadata, config: (
        _gemma_config(metadata, config)
        | {"rope_parameters": {FULL: config["rope_parameters"], SLIDING: _local_rope(metadata)}}
    ),
}


def _common_config(metadata: _Metadata) -> dict[str, Any]:
    hidden_size = metadata.shape("embedding_length")
    num_heads = metadata.shape("attention.head_count")
    return {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _feed_forward_size(metadata),
        "num_hidden_layers": metadata.shape("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.shape("attention.head_count_kv", num_heads),
        "head_dim": metadata.shape("attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": metadata.shape("context_length"),
        "rms_norm_eps": metadata.decimal("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": _rope(metadata),
        "sliding_window": None,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", ())),
        **metadata.token_ids,
    }


def _feed_forward_size(metadata: _Metadata) -> int:
    """That of experts where no layer has an MLP of its own."""
    of_experts = metadata.get(f"{metadata.architecture}.expert_feed_forward_length")
    return metadata.shape("feed_forward_length", of_experts)


def _rope(metadata: _Metadata) -> dict[str, Any]:
    rope = {"rope_theta": metadata.decimal("rope.freq_base", 10_000.0), "rope_type": "default"}
    kind = metadata.shape("rope.scaling.type", "none")
    if kind == "none":
        return rope
    original = metadata.shape("rope.scaling.original_context_length", 0)
    scaling = {"rope_type": kind, "factor": metadata.decimal("rope.scaling.factor", 1.0)}
    rope |= scaling | ({"original_max_position_embeddings": original} if original else {})
    given = {ours: metadata.decimal(theirs, 0.0) for ours, theirs in _ROPE_KEYS.items()}
    return rope | {name: value for name, value in given.items() if value}


def _indexed(parts: Sequence[GgufHeader], config: dict[str, Any]) -> Iterator[IndexedTensor]:
    modules = _MODULES | _OWN_MODULES.get(config["model_type"], {})
    for part, tensor in ((i, one) for i, header in enumerate(parts) for one in header.tensors):
        if tensor.name in _FACTORS or _layer_of(tensor) >= config["num_hidden_layers"]:
            continue
        experts = _LAYER_NAME.fullmatch(tensor.name)
        if experts and experts[2] in _EXPERTS and experts[3] != "scale":
            split = _split(tensor, experts, modules)
            yield from (replace(one, part=part) for one in split)
            continue
        yield IndexedTensor(
            part=part,
            name=_checkpoint_name(tensor.name, modules),
            format=tensor.format,
            shape=_checkpoint_shape(tensor),
            offset=tensor.start,
            paired_heads=_paired_heads(tensor, config),
            offset_by=_offset_by(tensor, config),
            is_minus_exp=tensor.name.endswith(".ssm_a"),
        )


def _layer_of(tensor: TensorRange) -> int:
    """Its layer; -1 of what is of none."""
    number = tensor.name.removeprefix("blk.").partition(".")[0]
    return int(number) if number.isdecimal() else -1


def _offset_by(tensor: TensorRange, config: dict[str, Any]) -> float:
    """llama.cpp keeps what norms multiply by."""
    has_offset = config["model_type"] in ("gemma2", "gemma3", *_DELTA)
    is_norm = tensor.name.endswith("norm.weight") and "ssm_norm" not in tensor.name
    return 1.0 if has_offset and is_norm else 0.0


def _checkpoint_shape(tensor: TensorRange) -> tuple[int, ...]:
    """What has one input, or one output, is a vector in llama.cpp; vectors of Mamba-2 are none."""
    shape = tensor.shape
    if tensor.name.endswith((*_BARE, ".ssm_norm.weight")):
        return (prod(shape),)
    if tensor.name.endswith(".ffn_gate_inp_shexp.weight"):
        return (1, shape[-1])
    is_conv = tensor.name.endswith((".shortconv.conv.weight", ".ssm_conv1d.weight"))
    return (shape[0], 1, shape[1]) if is_conv else shape


def _split(
    tensor: TensorRange, name: re.Match[str], modules: Mapping[str, str]
) -> Iterator[IndexedTensor]:
    """The tensors of each expert, by the names that they have in a checkpoint."""
    count, parts = tensor.shape[0], _EXPERTS[name[2]]
    rows, *columns = tensor.shape[1:]
    for number in range(count * len(parts)):
        expert, part = divmod(number, len(parts))
        module = modules[parts[part]].format(expert)
        yield IndexedTensor(
            name=f"model.layers.{name[1]}.{module}.{name[3]}",
            format=tensor.format,
            shape=(rows // len(parts), *columns),
            offset=tensor.start + number * (tensor.nbytes // (count * len(parts))),
        )


def _paired_heads(tensor: TensorRange, config: dict[str, Any]) -> int:
    """The heads of whose rows llama.cpp has rotated pairs side by side; 0 where it does not."""
    if config["model_type"] not in _PAIRED:
        return 0
    if ".attn_q." in tensor.name:
        heads = config["num_attention_heads"]
    elif ".attn_k." in tensor.name:
        heads = config["num_key_value_heads"]
    else:
        return 0
    if heads < 1 or tensor.shape[0] % (2 * heads):
        raise ModelLoadError(f"tensor {tensor.name} has {tensor.shape[0]} rows for {heads} heads")
    return heads


def _checkpoint_name(name: str, modules: Mapping[str, str]) -> str:
    match = _LAYER_NAME.fullmatch(f"{name}.weight" if name.endswith(_BARE) else name)
    if match is not None and f"{match[2]}.{match[3]}" in modules:
        return f"model.layers.{match[1]}.{modules[f'{match[2]}.{match[3]}']}"
    if match is not None and match[2] in modules and match[3] != "scale":
        name = f"model.layers.{match[1]}.{modules[match[2]]}.{match[3]}"
        return _LONE.sub(r"\1", name).replace("_scalar.weight", "_scalar")
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    raise UnsupportedModelError(f"it holds a tensor {name} that no supported model has.")
