"""Writes a tiny GGUF file from a transformers model, as llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
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
_OLMO_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LFM2_NAMES = {
    "operator_norm": "attn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
_GRANITE_MOE_NAMES = {
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_MAMBA_NAMES = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
_QWEN35_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_NEMOTRON_H_NAMES = {
    "norm": "attn_norm",
    **{f"mixer.{one}_proj": f"attn_{one}" for one in "qkv"},
    "mixer.o_proj": "attn_output",
    **{f"mixer.{one}_proj": f"ffn_{one}" for one in ("up", "down")},
    **{name.replace("mamba.", "mixer."): there for name, there in _MAMBA_NAMES.items()},
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OWN_NAMES = {
    "granitemoe": _GRANITE_MOE_NAMES,
    "granitemoeshared": _GRANITE_MOE_NAMES,
    "granitemoehybrid": _GRANITE_MOE_NAMES | _MAMBA_NAMES,
    "lfm2_moe": _LFM2_NAMES,
    "nemotron_h": _NEMOTRON_H_NAMES,
    "gpt_oss": {
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
        "self_attn.sinks": "attn_sinks",
    },
    "lfm2": _LFM2_NAMES,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _QWEN35_NAMES),
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "olmo2": _OLMO_NAMES,
    "olmo3": _OLMO_NAMES,
    "gemma3_text": _GEMMA_NAMES,
    "gemma4_text": _GEMMA_NAMES
    | {
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "layer_scalar": "layer_output_scale",
    },
}
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
_PAIRED = ("llama", "ministral3", "smollm3", "granite", "granitemoe", "granitemoeshared")
_PAIRED += ("granitemoehybrid", "nemotron_h")
_FLAG_TYPES = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32}
_TOP_LEVEL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    *,
    pre: str = "smollm",
    formats: Sequence[str] = ("Q8_0",),
    tokenizer: dict[str, object] | None = None,
) -> Path:
    """Matrices in these formats in turn, the rest as float32; the model becomes what the file says.

    `pre` is that of a byte-level vocabulary; "sentencepiece" writes the other kind, as Gemma 3 has
    it. `tokenizer` are more flags of `tokenizer.ggml`. Formats that
    the gguf package cannot write get random blocks.
    """
    config = model.config
    architecture = str(config.model_type).removesuffix("_text").replace("ministral", "mistral")
    architecture = architecture.replace("_moe", "moe").replace("gpt_oss", "gpt-oss")
    architecture = architecture.replace("olmo3", "olmo2").replace("qwen3_5", "qwen35")
    architecture = architecture.removesuffix("shared").replace("moehybrid", "hybrid")
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
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
    _add_features(writer, architecture, config, rope)
    if architecture in ("gemma3", "gemma4") or pre == "sentencepiece":
        _add_sentencepiece(writer)
    else:
        _add_tokenizer(writer, pre)
    for key, value in (tokenizer or {}).items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, _FLAG_TYPES[type(value)])
    scales = [one for one in model.named_buffers() if one[0].endswith("layer_scalar")]
    for number, (name, parameter) in enumerate([*model.named_parameters(), *scales]):
        _add_tensor(writer, name, parameter, config, formats[number % len(formats)], number)
    for name, bias in model.named_buffers():
        if name.endswith("expert_bias"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", bias.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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
    if config.model_type in ("olmo3", "phi3", "gemma3_text", "gpt_oss") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "olmo3":
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(slides)
    if config.model_type == "phi3":
        _add_longrope(writer, rope, config)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    if architecture == "gemma3":
        _add_gemma(writer, config, rope)
    if architecture.startswith("qwen35"):
        _add_states(writer, config, rope)
    if architecture in ("granitehybrid", "nemotron_h"):
        _add_mamba(writer, config)
        rotates = getattr(config, "position_embedding_type", None) == "rope"
        writer.add_rope_scaling_finetuned(rotates)


def _add_states(writer: gguf.GGUFWriter, config: PreTrainedConfig, rope: dict[str, Any]) -> None:
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_full_attention_interval(3)
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
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_add_space_prefix(False)
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
    writer.add_key_length(full.head_dim)
    writer.add_key_length_swa(shapes[slides.index(True)].head_dim)
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
    writer.add_expert_used_count(config.num_experts_per_tok)
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


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    parameter: torch.nn.Parameter,
    config: PreTrainedConfig,
    matrix_format: str,
    seed: int,
) -> None:
    if ".experts." in name or name.endswith("shared_mlp.input_linear.weight"):
        _add_experts(writer, name, parameter, config, matrix_format, seed)
        return
    name = name.replace(".sinks", ".sinks.weight").replace(".dt_bias", ".dt_bias.bias")
    name = name.replace(".layer_scalar", ".layer_scalar.weight")
    name = name + "." if name.endswith(".D") else name
    module, kind = name.replace(".A_log", ".A_log.").rsplit(".", 1)
    has_offset = config.model_type.startswith(("gemma3", "qwen3_5"))
    if module in _TOP_LEVEL:
        target = _TOP_LEVEL[module]
    else:
        _, _, layer, part = module.split(".", 3)
        names = _NAMES | _OWN_NAMES.get(config.model_type, {})
        if not _has_experts(config):
            names |= {"shared_mlp.output_linear": "ffn_down"}
        target = f"blk.{layer}.{names[part]}"
    offset = np.float32(has_offset and target.endswith("norm") and not target.endswith("ssm_norm"))
    values = parameter.detach().numpy()
    if ".linear_attn." in name:
        values = _tiled(name, values, config)
    if target.endswith("ssm_a"):
        values = -np.exp(values)
    # A convolution of one input for each output is a matrix there, a linear of one output a vector.
    flat = values.squeeze(1) if values.ndim == 3 else np.atleast_1d(values.squeeze())
    is_matrix = values.ndim == 2 and flat.ndim == 2
    stored_format = gguf.GGMLQuantizationType[matrix_format if is_matrix else "F32"]
    stored = _stored(flat + offset, stored_format, seed)
    read = gguf.dequantize(stored, stored_format).reshape(values.shape) - offset
    if target.endswith("ssm_a"):
        read = np.log(-read)
    if ".linear_attn." in name:
        read = _tiled(name, read, config, back=True)
    parameter.data = torch.from_numpy(read)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = target.rpartition(".")[2]
    if part in ("ssm_a", "ssm_d", "ssm_norm") and ".linear_attn." not in name:
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        stored = stored.reshape(groups if part == "ssm_norm" else len(stored), -1)
    if config.model_type in _PAIRED and part in heads:
        stored = _permuted(stored, getattr(config, heads[part]))
    writer.add_tensor(f"{target}.{kind}".rstrip("."), stored, raw_dtype=stored_format)


def _tiled(
    name: str, values: np.ndarray, config: PreTrainedConfig, *, back: bool = False
) -> np.ndarray:
    """Value heads of a key head apart, where it has several, as llama.cpp wants them."""
    if name.endswith("linear_attn.norm.weight"):
        return values
    keys = config.linear_num_key_heads
    shape = (keys, config.linear_num_value_heads // keys)
    count = config.linear_num_value_heads
    axis = 1 if "out_proj" in name else 0
    moved = np.moveaxis(values, axis, 0)
    first = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    heads = moved[first:].reshape(count, -1, *moved.shape[1:])
    order = np.arange(count).reshape(shape).T.ravel()
    heads = heads[np.argsort(order) if back else order].reshape(moved[first:].shape)
    return np.ascontiguousarray(np.moveaxis(np.concatenate([moved[:first], heads]), 0, axis))


def _has_experts(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "num_local_experts", 1))


def _add_experts(
    writer: gguf.GGUFWriter,
    name: str,
    parameter: torch.nn.Parameter,
    config: PreTrainedConfig,
    matrix_format: str,
    seed: int,
) -> None:
    """A tensor of all experts of a layer: gates and what they let pass are two in the file.

    A shared expert's are too.
    """
    _, _, layer, module, *_, kind = name.split(".")
    ending, kind = ("_shexp", "gate_up") if module == "shared_mlp" else ("_exps", kind)
    if module == "shared_mlp" and not _has_experts(config):
        ending = ""
    values = parameter.detach().numpy().copy()
    has_outputs_last = config.model_type == "gpt_oss"
    by_output = values.swapaxes(1, 2) if has_outputs_last and values.ndim == 3 else values
    parts = {"down": by_output}
    if kind.startswith("gate_up"):
        half = by_output.shape[-2] // 2
        parts = {"gate": by_output[..., :half, :], "up": by_output[..., half:, :]}
        if has_outputs_last:
            parts = {"gate": by_output[:, ::2], "up": by_output[:, 1::2]}
    is_bias = kind.endswith("_bias")
    stored_format = gguf.GGMLQuantizationType["F32" if is_bias else matrix_format]
    for part, numbers in parts.items():
        flat = _stored(numbers.reshape(-1, numbers.shape[-1]), stored_format, seed)
        target = f"blk.{layer}.ffn_{part}{ending}.{'bias' if is_bias else 'weight'}"
        stored = flat.reshape(*numbers.shape[:-1], -1)
        writer.add_tensor(target, stored, raw_dtype=stored_format)
        numbers[...] = gguf.dequantize(flat, stored_format).reshape(numbers.shape)
    parameter.data = torch.from_numpy(values)


def _stored(values: np.ndarray, kind: gguf.GGMLQuantizationType, seed: int) -> np.ndarray:
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(kind.name, *values.shape, seed=seed)


def random_blocks(quant_format: str, outputs: int, inputs: int, *, seed: int) -> np.ndarray:
    """Rows of random valid blocks, as a GGUF file holds them, whose numbers are below 1."""
    kind = gguf.GGMLQuantizationType[quant_format]
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (outputs, inputs // numbers, size), dtype=np.uint8)
    for place, largest in _SCALES[quant_format].items():
        scales = rng.uniform(-1, 1, (outputs, inputs // numbers, 1)) / largest
        data[:, :, place : place + 2] = scales.astype(np.float16).view(np.uint8)
    if quant_format == "MXFP4":
        data[:, :, 0] = rng.integers(110, 125, data.shape[:2])
    return data.reshape(outputs, -1)


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """A rotated pair's rows side by side, which Hugging Face keeps half a head apart."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
