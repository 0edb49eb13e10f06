"""GGUF files as folders like those of Hugging Face, made once; weights stay in the file."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import LlamaFileType

from prefixcache.config.families import FAMILIES, GGUF_ARCHITECTURES
from prefixcache.config.family import Family, GgufModel, GgufRow
from prefixcache.config.hf_config import read_hf_config
from prefixcache.config.pooling_mode import GGUF_POOLING, POOLING_FILE
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

# Tensors of all experts of a layer, one after the other, and what an expert has in them.
_OF_EXPERTS = {
    "ffn_gate_exps": ("ffn_gate_exps",),
    "ffn_up_exps": ("ffn_up_exps",),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    "ffn_down_exps": ("ffn_down_exps",),
}
# Modules of mixers that are not attention.
_MIXERS: dict[str | None, dict[str, str]] = {
    "convolution": {
        f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")
    },
    "gated delta rule": {
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
    },
    "Mamba-2": {
        "ssm_in": "{mamba}.in_proj",
        "ssm_conv1d": "{mamba}.conv1d",
        "ssm_a": "{mamba}.A_log",
        "ssm_d": "{mamba}.D",
        "ssm_dt": "{mamba}.dt_bias",
        "ssm_norm": "{mamba}.norm",
        "ssm_out": "{mamba}.out_proj",
    },
}
# What the frequencies of pairs are divided by, tensors of a file. Llama 3's are the same at any
# length, and do not stretch what they turn.
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
_RANK_HEAD = "cls.output.weight"
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
        _write_pooling(folder, metadata)
        log_ends(files[0].name, metadata)
        write_tokenizer(folder, metadata, config["max_position_embeddings"])


def _write_pooling(folder: Path, metadata: Mapping[str, Any]) -> None:
    architecture = metadata["general.architecture"]
    mode = GGUF_POOLING.get(metadata.get(f"{architecture}.pooling_type", 0))
    if mode is not None:
        (folder / POOLING_FILE).parent.mkdir(exist_ok=True)
        write_json(folder / POOLING_FILE, {"pooling_mode": mode})


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
    lengths = {tensor.name: tensor.shape[0] for part in parts for tensor in part.tensors}
    factors = {name: [1.0] * lengths[name] for name in _FACTORS if name in lengths}
    config = _config_of(parts, factors)
    for _ in _indexed(parts, config):
        pass
    read_hf_config(config)


def check_metadata(key: str, value: Any) -> None:
    """Raises `UnsupportedModelError` where a value of a header says that the file cannot run."""
    if key == "general.architecture":
        _family_of(value)
    if key == "general.file_type" and value in _UNSUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"its quantization is {_UNSUPPORTED_TYPES[value]}. "
            f"Supported: {', '.join(SUPPORTED_FORMATS)}."
        )


def _config_of(parts: Sequence[GgufHeader], factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """The first part has the metadata of all. `factors` are the numbers of `_FACTORS`."""
    names = {tensor.name for part in parts for tensor in part.tensors}
    model = GgufModel(parts[0].metadata, names, factors)
    family, row = _family_of(model.architecture)
    activation, kind, *_ = family.activation
    config: dict[str, Any] = _common_config(model) | _flags(names) | {activation: kind}
    if row.renormalise is not None:
        config |= model.experts(renormalise=row.renormalise)
    config |= row.config(model, config)
    if factors and not row.reads_factors:
        config |= _long_rope(model, config["rope_parameters"])
    return config


def _family_of(architecture: str) -> tuple[Family, GgufRow]:
    if architecture in GGUF_ARCHITECTURES:
        family = FAMILIES[GGUF_ARCHITECTURES[architecture]]
        if family.gguf is not None:
            return family, family.gguf
    raise UnsupportedModelError(
        f"architecture {architecture!r} is not supported. "
        f"Supported: {', '.join(sorted(GGUF_ARCHITECTURES))}."
    )


def _long_rope(model: GgufModel, rope: Mapping[str, Any]) -> dict[str, Any]:
    original = "original_max_position_embeddings"
    context = model.shape("rope.scaling.original_context_length", model.shape("context_length"))
    given: dict[str, Any] = {"rope_type": "longrope", original: context}
    given |= {kind: model.factors[name] for name in model.factors for kind in _FACTORS[name]}
    if "rope_freqs.weight" in model.factors:
        given["attention_factor"] = 1.0
    return {original: context, "rope_parameters": {**rope, **given}}


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


def _flags(names: set[str]) -> dict[str, bool]:
    """What the file's tensors say of the model; Qwen2 ignores the flag of its biases."""
    matches = map(_LAYER_NAME.fullmatch, names)
    biases = {match[2] for match in matches if match is not None and match[3] == "bias"}
    return {
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "attn_q" in biases,
        "attention_out_bias": "attn_output" in biases,
        "mlp_bias": "ffn_down" in biases,
        "use_expert_bias": "exp_probs_b" in biases,
        "mamba_conv_bias": "ssm_conv1d" in biases,
        "mamba_proj_bias": "ssm_in" in biases,
    }


def _common_config(model: GgufModel) -> dict[str, Any]:
    hidden_size = model.shape("embedding_length")
    num_heads = model.shape("attention.head_count")
    return {
        "architectures": [GGUF_ARCHITECTURES[model.architecture]],
        "model_type": model.architecture,
        "dtype": "float16",
        "hidden_size": hidden_size,
        "intermediate_size": _feed_forward_size(model),
        "num_hidden_layers": model.shape("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.shape("attention.head_count_kv", num_heads),
        "head_dim": model.shape("attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": model.shape("context_length"),
        "rms_norm_eps": model.decimal("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": _rope(model),
        "sliding_window": None,
        "vocab_size": len(model.metadata.get("tokenizer.ggml.tokens", ())),
        **token_ids(model.metadata),
    }


def _feed_forward_size(model: GgufModel) -> int:
    """That of experts where no layer has an MLP of its own."""
    of_experts = model.metadata.get(f"{model.architecture}.expert_feed_forward_length")
    return model.shape("feed_forward_length", of_experts)


def _rope(model: GgufModel) -> dict[str, Any]:
    rope = {"rope_theta": model.decimal("rope.freq_base", 10_000.0), "rope_type": "default"}
    kind = model.shape("rope.scaling.type", "none")
    if kind == "none":
        return rope
    original = model.shape("rope.scaling.original_context_length", 0)
    scaling = {"rope_type": kind, "factor": model.decimal("rope.scaling.factor", 1.0)}
    rope |= scaling | ({"original_max_position_embeddings": original} if original else {})
    given = {ours: model.decimal(theirs, 0.0) for ours, theirs in _ROPE_KEYS.items()}
    return rope | {name: value for name, value in given.items() if value}


def _indexed(parts: Sequence[GgufHeader], config: dict[str, Any]) -> Iterator[IndexedTensor]:
    family, row = _family_of(config["model_type"])
    modules = _modules(family) | dict(row.modules)
    for part, tensor in ((i, each) for i, header in enumerate(parts) for each in header.tensors):
        if tensor.name == _RANK_HEAD:
            raise UnsupportedModelError(
                "it ranks documents, and files of this kind hold no whole head: serve the folder "
                "of the same model, with --pooling rank."
            )
        if tensor.name in _FACTORS or _layer_of(tensor) >= config["num_hidden_layers"]:
            continue
        experts = _LAYER_NAME.fullmatch(tensor.name)
        if experts and experts[2] in _OF_EXPERTS and experts[3] != "scale":
            for expert in _split(tensor, experts, modules):
                yield replace(expert, part=part)
            continue
        yield IndexedTensor(
            part=part,
            name=_checkpoint_name(tensor.name, modules),
            format=tensor.format,
            shape=_checkpoint_shape(tensor),
            offset=tensor.start,
            paired_heads=_paired_heads(tensor, config) if row.pairs_rows else 0,
            offset_by=row.norm_offset if _is_norm(tensor) else 0.0,
            is_minus_exp=tensor.name.endswith(".ssm_a"),
        )


def _modules(family: Family) -> dict[str, str]:
    """The modules of a layer by llama.cpp's names. Those of an expert have "{}" for its number."""
    names = family.modules
    attention, experts, shared = (names[part] for part in ("attention", "experts", "shared"))
    gated = {part: names[part] for part in ("gate", "up", "down")}
    modules = {
        "attn_norm": names["input_norm"],
        **{f"attn_{part}": f"{attention}.{part}_proj" for part in "qkv"},
        "attn_output": names["out"],
        **{f"attn_{part}_norm": names[f"{part}_norm"] for part in "qk"},
        "ffn_norm": names.get("mlp_norm", "post_attention_layernorm"),
        **{f"ffn_{part}": name for part, name in gated.items()},
        "ffn_gate_inp": names["router"],
        "ffn_gate_inp_shexp": f"{shared}_gate",
        **{f"ffn_{part}_shexp": f"{shared}.{part}_proj" for part in gated},
        **{
            f"ffn_{part}_exps": f"{experts}.{{}}.{name.rpartition('.')[2]}"
            for part, name in gated.items()
        },
    }
    one_tensor = {"attn_qkv": "qkv", "ffn_up": "gate_up", "exp_probs_b": "selection_bias"}
    modules |= {theirs: names[ours] for theirs, ours in one_tensor.items() if ours in names}
    mixer = _MIXERS.get("convolution" if family.convolves else family.recurs, {})
    return modules | {name: module.format(mamba=names["mamba"]) for name, module in mixer.items()}


def _layer_of(tensor: TensorRange) -> int:
    """Its layer; -1 of what is of none."""
    number = tensor.name.removeprefix("blk.").partition(".")[0]
    return int(number) if number.isdecimal() else -1


def _is_norm(tensor: TensorRange) -> bool:
    """Whether it is a norm that llama.cpp keeps as what it multiplies by."""
    return tensor.name.endswith("norm.weight") and "ssm_norm" not in tensor.name


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
    count, parts = tensor.shape[0], _OF_EXPERTS[name[2]]
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
    """The heads of whose rows rotated pairs stand side by side; 0 where they do not."""
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
