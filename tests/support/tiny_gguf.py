"""Writes a tiny GGUF file from a transformers model, as llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer

GEMMA_SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
GEMMA_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Of two tokens each that stand before them, as byte-pair merging makes them.
_PIECES = [
    "th",
    "the",
    "\u2581t",
    "\u2581th",
    "\u2581the",
    "er",
    "in",
    "on",
    "\u2581c",
    "\u2581\u2581",
]
# Where a block's float16 scales stand, and the largest integer that each is multiplied by.
_SCALES = {
    "Q4_0": {0: 8},
    "Q4_1": {0: 30, 2: 2},
    "Q5_0": {0: 16},
    "Q5_1": {0: 62, 2: 2},
    "Q8_0": {0: 128},
    "Q4_K": {0: 30 * 64, 2: 2 * 64},
    "Q5_K": {0: 62 * 64, 2: 2 * 64},
    "Q6_K": {208: 32 * 128},
    "Q2_K": {80: 30 * 2, 82: 2 * 15},
    "Q3_K": {108: 4 * 32},
    "IQ4_NL": {0: 127},
    "IQ4_XS": {0: 127 * 32},
    "MXFP4": {},
}
# Parts of transformers' names of architectures.
_SPELLINGS = {
    "ministral": "mistral",
    "_moe": "moe",
    "gpt_oss": "gpt-oss",
    "olmo3": "olmo2",
    "qwen3_5": "qwen35",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
}
_PAIRED = ("llama", "ministral3", "smollm3", "granite", "granitemoe", "granitemoeshared")
_PAIRED += ("granitemoehybrid", "nemotron_h", "arcee")
_FLAG_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    str: gguf.GGUFValueType.STRING,
}
_ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
# What llama.cpp's converter calls parameters before it looks their names up.
_RENAMED = {
    ".self_attn.sinks": ".self_attn.sinks.weight",
    ".linear_attn.dt_bias": ".linear_attn.dt_proj.bias",
    ".mamba.dt_bias": ".mamba.dt_proj.bias",
    ".mixer.dt_bias": ".mixer.dt_proj.bias",
    ".layer_scalar": ".layer_scalar.weight",
    ".feed_forward.expert_bias": ".feed_forward.expert_bias.bias",
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
}
# Vectors that it makes matrices of in Mamba-2.
_OF_STATES = (".ssm_a", ".ssm_d", ".ssm_norm.weight")
# What it names by itself.
_NAMED = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    *,
    pre: str = "smollm",
    formats: Sequence[str] = ("Q8_0",),
    tokenizer: Mapping[str, object] | None = None,
    whole_tokens: Mapping[str, int] | None = None,
    is_fused: bool = False,
    pooling: int | None = None,
) -> Path:
    """Matrices in these formats in turn, the rest as float32; the model becomes what the file says.

    `pre` is that of a byte-level vocabulary; "sentencepiece" writes the other kind, as Gemma 3 has
    it. `tokenizer` are values of `tokenizer.ggml`, in place of those that are written; None leaves
    a key out. `whole_tokens` are texts with types: the last tokens of the vocabulary, which then
    has no special ones but these. Formats that the gguf package cannot write
    get random blocks. For `is_fused` see `layout`. `pooling` is llama.cpp's number of one.
    """
    config = model.config
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    add_metadata(writer, model)
    if architecture.startswith("gemma") or pre == "sentencepiece":
        _add_sentencepiece(writer)
    else:
        _add_tokenizer(writer, pre)
    if whole_tokens is not None:
        _replace_special(writer, whole_tokens)
    for key, value in (tokenizer or {}).items():
        _set(writer, key, value)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    if pooling == gguf.PoolingType.RANK:
        writer.add_tensor("cls.output.weight", np.zeros((2, config.hidden_size), np.float32))
    for number, (name, parameter) in enumerate(parameters_of(model)):
        matrix_format = formats[number % len(formats)]
        _add_parameter(writer, name, parameter, config, matrix_format, number, is_fused=is_fused)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _set(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    name = f"tokenizer.ggml.{key}"
    writer.kv_data[0].pop(name, None)
    if isinstance(value, list):
        writer.add_array(name, value)
    elif value is not None:
        writer.add_key_value(name, value, _FLAG_TYPES[type(value)])


def _replace_special(writer: gguf.GGUFWriter, whole_tokens: Mapping[str, int]) -> None:
    written = {name: value.value for name, value in writer.kv_data[0].items()}
    tokens, kinds = (written[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    count = len(tokens) - len(whole_tokens)
    usual = {*SPECIAL_TOKENS, *GEMMA_SPECIAL_TOKENS}
    kept = [f"<{i}>" if token in usual else token for i, token in enumerate(tokens[:count])]
    kinds = [1 if token in usual else kind for token, kind in zip(tokens, kinds, strict=True)]
    _set(writer, "tokens", [*kept, *whole_tokens])
    _set(writer, "token_type", [*kinds[:count], *whole_tokens.values()])
    for name in ("bos", "eos", "unknown", "padding"):
        _set(writer, f"{name}_token_id", None)
    if merges := written.get("tokenizer.ggml.merges"):
        _set(writer, "merges", [merge for merge in merges if merge.replace(" ", "") in kept])


def add_metadata(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """What the file says of the model's shape."""
    config, architecture = model.config, architecture_of(model.config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    _add_sizes(writer, model)
    ropes = getattr(config, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture != "gemma4" and getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "glm4":
        writer.add_rope_dimension_count(config.head_dim // 2)
    _add_features(writer, architecture, config, rope)


def _add_sizes(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    if config.model_type == "gemma4_text":
        _add_gemma4(writer, config)
        return
    if not config.model_type.startswith("lfm2"):
        size, heads = getattr(config, "intermediate_size", None), config.num_key_value_heads
        if config.model_type in ("granitemoehybrid", "nemotron_h"):
            heads = [heads * (kind == "full_attention") for kind in config.layer_types]
        if config.model_type == "nemotron_h":
            size = [size * (kind == "mlp") for kind in config.layer_types]
        if size:
            writer.add_feed_forward_length(size)
        writer.add_head_count_kv(heads)
        eps = "layer_norm_epsilon" if config.model_type == "nemotron_h" else "rms_norm_eps"
        writer.add_layer_norm_rms_eps(getattr(config, eps))
        return
    ends = "feed_forward.w1"
    (up,) = {one.out_features for name, one in model.named_modules() if name.endswith(ends)}
    writer.add_feed_forward_length(up)
    heads = config.num_key_value_heads
    writer.add_head_count_kv([0 if kind == "conv" else heads for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)


def _add_features(
    writer: gguf.GGUFWriter, architecture: str, config: PreTrainedConfig, rope: dict[str, Any]
) -> None:
    """What families have that Llama has not."""
    _add_experts_shape(writer, config)
    if architecture.startswith("granite"):
        _add_multipliers(writer, config)
    if rope["rope_type"] == "yarn":
        _add_yarn(writer, rope)
    has_window = config.model_type in (
        *("olmo3", "phi3", "gemma2", "gemma3_text", "gpt_oss", "exaone4"),
    )
    if has_window and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("olmo3", "exaone4"):
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(slides)
    if config.model_type == "phi3":
        _add_longrope(writer, rope, config)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    if architecture in ("gemma2", "gemma3"):
        _add_gemma(writer, config, rope)
    if getattr(config, "linear_num_key_heads", 0):
        _add_states(writer, config, rope)
    if architecture in ("granitehybrid", "nemotron_h"):
        _add_mamba(writer, config)
        rotates = getattr(config, "position_embedding_type", None) == "rope"
        writer.add_rope_scaling_finetuned(rotates)


def _add_states(writer: gguf.GGUFWriter, config: PreTrainedConfig, rope: dict[str, Any]) -> None:
    turned = int(config.head_dim * rope["partial_rotary_factor"])
    writer.add_rope_dimension_count(turned)
    writer.add_rope_dimension_sections([(turned // 2 + more) // 3 for more in (2, 1, 0)] + [0])
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)


def _add_mamba(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    names = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")
    if config.model_type == "nemotron_h":
        names = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim")
    taps, state, groups, heads, head_dim = (getattr(config, name) for name in names)
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * head_dim)


def _add_multipliers(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _add_gemma(writer: gguf.GGUFWriter, config: PreTrainedConfig, rope: dict[str, Any]) -> None:
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_add_space_prefix(False)
    if config.attn_logit_softcapping:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_gemma4(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    layers = range(config.num_hidden_layers)
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    shapes = [config.per_layer_config[i] for i in layers]
    full = shapes[slides.index(False)]
    wide = config.num_hidden_layers - config.num_kv_shared_layers
    sizes = [config.intermediate_size * (1 if i < wide else 2) for i in layers]
    writer.add_feed_forward_length(sizes if config.use_double_wide_mlp else sizes[0])
    writer.add_head_count_kv([one.num_key_value_heads for one in shapes])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    sliding = shapes[slides.index(True)]
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(full.head_dim)
    for add in (
        writer.add_key_length_swa,
        writer.add_value_length_swa,
        writer.add_rope_dimension_count_swa,
    ):
        add(sliding.head_dim)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    rope = config.rope_parameters["full_attention"]
    turned = int(full.head_dim * rope["partial_rotary_factor"] / 2)
    factors = np.where(np.arange(full.head_dim // 2) < turned, 1.0, 1e30)
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.add_add_space_prefix(False)


def _add_experts_shape(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    count = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
    if not count or config.model_type == "nemotron_h":  # which says so of all
        return
    writer.add_expert_count(count)
    used = config.top_k_experts if architecture_of(config) == "gemma4" else None
    writer.add_expert_used_count(used or config.num_experts_per_tok)
    size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    if config.model_type != "olmoe" and not config.model_type.startswith("granite"):
        writer.add_expert_feed_forward_length(size)
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if shared := getattr(config, name, 0):
            writer.add_expert_shared_feed_forward_length(shared)


def _add_longrope(writer: gguf.GGUFWriter, rope: dict[str, Any], config: PreTrainedConfig) -> None:
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    for kind in ("short", "long") if "long_factor" in rope else ():
        factors = np.array(rope[f"{kind}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)


def _llama3_factors(config: PreTrainedConfig) -> np.ndarray:
    """What the frequencies are divided by."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = config.hidden_size // config.num_attention_heads
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).float().numpy()


def _add_yarn(writer: gguf.GGUFWriter, rope: dict[str, float]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    model = json.loads(train_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    kinds = gguf.TokenType
    tokens = dict.fromkeys(GEMMA_SPECIAL_TOKENS, kinds.CONTROL)
    tokens |= {f"<0x{byte:02X}>": kinds.BYTE for byte in range(256)}
    letters = [chr(code) for code in range(0x21, 0x7F)]
    pieces = ["\u2581", *letters, *_PIECES]
    tokens |= dict.fromkeys(pieces, kinds.NORMAL)
    tokens |= dict.fromkeys(map("<unused{}>".format, range(VOCAB_SIZE - len(tokens))), kinds.UNUSED)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_chat_template(GEMMA_CHAT_TEMPLATE)


def _add_parameter(
    writer: gguf.GGUFWriter,
    name: str,
    parameter: torch.Tensor,
    config: PreTrainedConfig,
    matrix_format: str,
    seed: int,
    *,
    is_fused: bool,
) -> None:
    """Its tensors; the parameter becomes what they say."""
    values = parameter.detach().numpy()
    read = np.empty(values.size, np.float32)
    places = np.arange(values.size).reshape(values.shape)
    for target, of_tensor in layout(name, places, config, is_fused=is_fused).items():
        to_file, from_file = _functions(target, config)
        numbers = to_file(values.reshape(-1)[of_tensor])
        kind = gguf.GGMLQuantizationType[matrix_format if is_matrix(target, of_tensor) else "F32"]
        rows = _stored(numbers.reshape(-1, numbers.shape[-1]), kind, seed)
        stored = rows.reshape(*numbers.shape[:-1], -1)
        writer.add_tensor(target, stored, raw_dtype=kind)
        read[of_tensor] = from_file(gguf.dequantize(rows, kind).reshape(numbers.shape))
    parameter.data = torch.from_numpy(read.reshape(values.shape))


def architecture_of(config: PreTrainedConfig) -> str:
    """The name of the model's architecture in a file."""
    name = str(config.model_type).removesuffix("_text").removesuffix("shared")
    for theirs, ours in _SPELLINGS.items():
        name = name.replace(theirs, ours)
    return name


def parameters_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What a file has tensors of, by name."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "expert_bias")):
            yield name, buffer


def is_matrix(target: str, values: np.ndarray) -> bool:
    """Whether a tensor of a file may be quantized; a convolution is none."""
    return values.ndim > 1 and not target.endswith(
        (".bias", "conv.weight", "conv1d.weight", *_OF_STATES)
    )


def layout(
    name: str, values: np.ndarray, config: PreTrainedConfig, *, is_fused: bool = False
) -> dict[str, np.ndarray]:
    """A parameter as a file has it: its tensors by name, of the same elements in their order.

    With `is_fused` gates and what they let pass of all experts are one tensor, and so are the
    projections of Qwen3-Next's delta rule, as in files of an earlier converter.
    """
    if ".experts." in name or name.endswith("shared_mlp.input_linear.weight"):
        return _of_experts(name, values, config, is_fused=is_fused)
    if name.endswith("in_proj_qkvz.weight") and not is_fused:
        return _split_qkvz(name, values, config)
    target = _target(name, config)
    if ".linear_attn." in name and config.model_type != "qwen3_next":
        values = _tiled(name, values, config)
    part = target.split(".")[-2]
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    if config.model_type in _PAIRED and part in heads:
        values = _permuted(values, getattr(config, heads[part]))
    # A convolution of one input for each output is a matrix there, a linear of one output a vector.
    if values.ndim == 3:
        values = values.squeeze(1)
    if target.endswith(_OF_STATES) and ".linear_attn." not in name:
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        values = values.reshape(groups if part == "ssm_norm" else len(values), -1)
    return {target: values[0] if part == "ffn_gate_inp_shexp" else values}


def _target(name: str, config: PreTrainedConfig) -> str:
    """By gguf's own table."""
    if own := _NAMED.get(name.split(".", 3)[-1]):
        return f"blk.{name.split('.')[2]}.{own}"
    for theirs, converters in _RENAMED.items():
        name = name.removesuffix(theirs) + converters if name.endswith(theirs) else name
    if config.model_type == "nemotron_h":
        name = name.replace("model.", "backbone.")
    names = _names_of(architecture_of(config), config.num_hidden_layers)
    target = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert target is not None, name
    return target if _has_experts(config) else target.replace("_shexp", "")


def _has_experts(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "num_local_experts", 1))


@cache
def _names_of(architecture: str, num_layers: int) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(_ARCHITECTURES[architecture], num_layers)


def _functions(
    target: str, config: PreTrainedConfig
) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """What numbers become in a file, and the other way."""
    if target.endswith("ssm_a"):
        return lambda values: -np.exp(values), lambda read: np.log(-read)
    has_offset = config.model_type.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))
    is_norm = target.endswith("norm.weight") and not target.endswith("ssm_norm.weight")
    offset = np.float32(has_offset and is_norm)
    return lambda values: values + offset, lambda read: read - offset


def _tiled(name: str, values: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    """Value heads of a key head apart, where it has several, as llama.cpp wants them."""
    if name.endswith("linear_attn.norm.weight") or not any(values.strides):
        return values  # nothing to move, or only a shape
    keys, count = config.linear_num_key_heads, config.linear_num_value_heads
    axis = 1 if "out_proj" in name else 0
    moved = np.moveaxis(values, axis, 0)
    first = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    heads = moved[first:].reshape(keys, count // keys, -1, *moved.shape[1:])
    heads = heads.swapaxes(0, 1).reshape(moved[first:].shape)
    return np.moveaxis(np.concatenate([moved[:first], heads]), 0, axis)


def _split_qkvz(name: str, values: np.ndarray, config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """Queries, keys and values of all heads, and z, which a checkpoint has by key head."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    of_values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    by_head = values.reshape(keys, -1, values.shape[1])
    parts = np.split(by_head, np.cumsum([size, size, of_values]), axis=1)
    *qkv, z = (part.reshape(-1, values.shape[1]) for part in parts)
    layer = name.split(".")[2]
    return {
        f"blk.{layer}.attn_qkv.weight": np.concatenate(qkv),
        f"blk.{layer}.attn_gate.weight": z,
    }


def _of_experts(
    name: str, values: np.ndarray, config: PreTrainedConfig, *, is_fused: bool
) -> dict[str, np.ndarray]:
    """Tensors of all experts of a layer; a shared expert's gates are one of their own too."""
    is_shared = "shared_mlp" in name
    kind = "gate_up" if is_shared else name.rpartition(".")[2]
    is_bias = kind.endswith("_bias")
    turns = config.model_type == "gpt_oss"
    rows = values.swapaxes(1, 2) if turns and not is_bias else values
    axis = rows.ndim - (1 if is_bias else 2)
    parts = {"down": rows}
    if kind.startswith("gate_up"):
        size = rows.shape[axis] // 2
        pairs = np.moveaxis(rows, axis, 0)
        gate, up = (pairs[::2], pairs[1::2]) if turns else (pairs[:size], pairs[size:])
        parts = {"gate": np.moveaxis(gate, 0, axis), "up": np.moveaxis(up, 0, axis)}
        if is_fused or config.model_type == "gemma4_text":
            parts = {"gate_up": rows}
    which = ("_shexp" if _has_experts(config) else "") if is_shared else "_exps"
    ending = f"{which}.{'bias' if is_bias else 'weight'}"
    return {f"blk.{name.split('.')[2]}.ffn_{one}{ending}": part for one, part in parts.items()}


def _stored(values: np.ndarray, kind: gguf.GGMLQuantizationType, seed: int) -> np.ndarray:
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(kind.name, *values.shape, seed=seed)


def random_blocks(
    quant_format: str, outputs: int, inputs: int, *, seed: int, largest: float = 1.0
) -> np.ndarray:
    """Rows of random valid blocks, as a GGUF file holds them, whose numbers are below `largest`."""
    kind = gguf.GGMLQuantizationType[quant_format]
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (outputs, inputs // numbers, size), dtype=np.uint8)
    for place, integer in _SCALES[quant_format].items():
        scales = rng.uniform(-largest, largest, (outputs, inputs // numbers, 1)) / integer
        data[:, :, place : place + 2] = scales.astype(np.float16).view(np.uint8)
    if quant_format == "MXFP4":
        data[:, :, 0] = rng.integers(110, 125, data.shape[:2]) + int(np.log2(largest))
    return data.reshape(outputs, -1)


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """A rotated pair's rows side by side, which Hugging Face keeps half a head apart."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
