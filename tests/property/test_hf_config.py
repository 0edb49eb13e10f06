"""A config.json means what transformers' classes make of it, in each family and both spellings."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from prefixcache.config.families import FAMILIES
from prefixcache.config.family import Family
from prefixcache.config.hf_fields import HFFields
from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ConfigError
from support.repeatable import bounded

LAYERS = 6  # the last of which is not sliding by default in Gemma 3
_SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "shared_intermediate_size": 128,
    "num_local_experts": 0,
    "layer_types": ["attention"] * LAYERS,
}
_ROTATES = st.integers(0, 1)
_THETA = st.sampled_from([1e4, 5e5, 1e6, 123])


def some(required: dict[str, Any], **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    fixed = {name: st.just(value) for name, value in required.items()}
    return st.fixed_dictionaries(fixed, optional=optional)


_SCALED = st.sampled_from([1.0, 2.0, 4, 8.0])
_LENGTH = st.sampled_from([64, 128, 512])
_FACTORS = st.sampled_from([4, 8, 32]).map(lambda count: [1.0 + i / 2 for i in range(count)])
_ROPES = st.one_of(
    some(
        {"rope_type": "longrope"},
        short_factor=_FACTORS,
        long_factor=_FACTORS,
        factor=_SCALED,
        original_max_position_embeddings=_LENGTH,
        rope_theta=_THETA,
        attention_factor=st.sampled_from([1.0, 0.5]),
        partial_rotary_factor=st.sampled_from([1.0, 0.5]),
    ),
    some({}, rope_type=st.just("default"), rope_theta=_THETA),
    some({"rope_type": "linear"}, factor=_SCALED, rope_theta=_THETA),
    some(
        {"rope_type": "llama3", "factor": 8.0},
        low_freq_factor=st.just(1.0),
        high_freq_factor=st.sampled_from([4.0, 0.5]),
        original_max_position_embeddings=_LENGTH,
        rope_theta=_THETA,
    ),
    some(
        {"rope_type": "yarn"},
        factor=_SCALED,
        original_max_position_embeddings=_LENGTH,
        rope_theta=_THETA,
        attention_factor=st.sampled_from([1.0, 0.5]),
        beta_fast=st.just(16.0),
        beta_slow=st.just(2.0),
        mscale=st.just(1.0),
        mscale_all_dim=st.just(0.8),
        truncate=st.booleans(),
        llama_4_scaling_beta=st.just(0.2),
        partial_rotary_factor=st.sampled_from([1.0, 0.5]),
    ),
)


def _old_spelling(rope: dict[str, Any]) -> dict[str, Any]:
    return {"type" if name == "rope_type" else name: value for name, value in rope.items()}


def _ropes(family: Family) -> dict[str, Any]:
    """Fields of ropes, in spellings that the family's files have."""
    outer = {"rope_theta": _THETA, "original_max_position_embeddings": _LENGTH}
    if family.ropes_by_layer:
        by_layer = some({}, full_attention=st.none() | _ROPES, sliding_attention=_ROPES)
        scaling = _ROPES.filter(lambda rope: "rope_type" in rope)
        spelled = {"rope_parameters": by_layer.filter(bool), "rope_scaling": scaling}
        return outer | spelled | {"rope_local_base_freq": _THETA}
    scaling = st.none() | _ROPES | _ROPES.map(_old_spelling)
    partial = st.sampled_from([1.0, 0.5])
    spelled = {"rope_parameters": _ROPES, "rope_scaling": scaling, "partial_rotary_factor": partial}
    return outer | spelled


def _fields(name: str) -> st.SearchStrategy[dict[str, Any]]:
    family = FAMILIES[name]
    other = "conv" if family.convolves else "linear_attention" if family.recurs else None
    types = st.sampled_from(["full_attention", other or "sliding_attention"])
    required = {field: _SHAPE[field] for field in family.required}
    sizes = {field: st.just(value) for field, value in _SHAPE.items() if field not in required}
    hidden = st.sampled_from([64, 66, 256])
    fixed = {field: st.just(value) for field, value in required.items()} | {"hidden_size": hidden}
    if family.convolves and "layer_types" in fixed:
        fixed["layer_types"] = st.lists(types, min_size=LAYERS, max_size=LAYERS)
    optional = {
        **sizes,
        **_ropes(family),
        "num_key_value_heads": st.sampled_from([None, 1, 2, 4]),
        "head_dim": st.sampled_from([None, 15, 16, 32]),
        "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
        "query_pre_attn_scalar": st.sampled_from([64, 256]),
        "attention_bias": st.none() | st.booleans(),
        "attention_out_bias": st.none() | st.booleans(),
        "mlp_bias": st.none() | st.booleans(),
        "tie_word_embeddings": st.none() | st.booleans(),
        "sliding_window": st.sampled_from([None, 16, 128, 512, 600]),
        "use_sliding_window": st.none() | st.booleans(),
        "max_window_layers": st.integers(0, LAYERS + 1),
        "qkv_bias": st.booleans(),
        "shared_expert_intermediate_size": st.just(48),
        "sliding_window_pattern": st.integers(1, LAYERS + 1),
        "layer_types": st.none() | st.lists(types, min_size=LAYERS, max_size=LAYERS),
        "no_rope_layers": st.none() | st.lists(_ROTATES, min_size=LAYERS, max_size=LAYERS),
        "no_rope_layer_interval": st.integers(1, LAYERS + 1),
        "embedding_multiplier": st.sampled_from([12, 6.0]),
        "attention_multiplier": st.just(0.015625),
        "residual_multiplier": st.just(0.22),
        "logits_scaling": st.just(8),
        "num_experts_per_tok": st.integers(1, 9),
        "moe_intermediate_size": st.just(48),
        "norm_topk_prob": st.booleans(),
        "decoder_sparse_step": st.integers(1, 3),
        "swiglu_limit": st.sampled_from([7.0, 6.0]),
        "mlp_only_layers": st.none() | st.lists(st.integers(0, LAYERS)),
        "position_embedding_type": st.sampled_from([None, "rope", "nope"]),
        "norm_eps": st.sampled_from([1e-5, 1e-6]),
        "tie_embedding": st.booleans(),
        "full_attention_interval": st.integers(1, LAYERS + 1),
        "linear_num_key_heads": st.sampled_from([2, 4]),
        "linear_num_value_heads": st.sampled_from([4, 6]),
        "full_attn_idxs": st.lists(st.integers(0, LAYERS - 1)),
        "conv_L_cache": st.sampled_from([1, 3, 4]),
        "conv_bias": st.booleans(),
        "block_ff_dim": st.sampled_from([96, 1024]),
        "block_auto_adjust_ff_dim": st.booleans(),
        "block_ffn_dim_multiplier": st.sampled_from([1.0, 1.3]),
        "block_multiple_of": st.sampled_from([1, 32, 256]),
        "num_dense_layers": st.integers(0, LAYERS + 1),
        "use_expert_bias": st.booleans(),
        "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
        "linear_conv_kernel_dim": st.sampled_from([2, 4]),
        "linear_key_head_dim": st.sampled_from([16, 24, 64]),
        "bos_token_id": st.just(1),
        "eos_token_id": st.just([2, 3]),
        "dtype": st.just("bfloat16"),
    }
    given = st.fixed_dictionaries(
        fixed, optional={field: some for field, some in optional.items() if field not in fixed}
    )
    # One of Mamba's fields fits no hidden size but some by default.
    return given.map(lambda fields: {"architectures": [name], "mamba_n_heads": 1, **fields})


# Gemma 4's class says nothing of heads but layer by layer, and Nemotron-H's has no ropes and no
# feed-forwards in layers of their own: `test_models.py` compares them.
_OTHERS = [name for name in FAMILIES if not name.startswith(("Gemma4", "NemotronH"))]
_FILES = st.sampled_from(_OTHERS).flatmap(_fields)
_COMPLETED = "prefixcache.config.hf_config._completed"


def _read(source: dict[str, Any]) -> ModelConfig | type[ConfigError]:
    try:
        return ModelConfig.from_hf(source)
    except ConfigError:
        return ConfigError


def _as_transformers(source: dict[str, Any]) -> ModelConfig | type[ConfigError]:
    """What its own class makes of the file as it stands; null means that nothing is given."""
    null_is_given = ("sliding_window",)
    fields = {k: v for k, v in source.items() if v is not None or k in null_is_given}

    def completed(family: Family, given: dict[str, Any]) -> HFFields:
        if family.model_type == "exaone4" and "layer_types" not in fields:
            assume(fields.get("sliding_window", ...) is not None)  # it would divide by zero
        try:
            theirs = AutoConfig.for_model(family.model_type, **fields)
        except Exception as error:
            raise ConfigError("refused") from error
        # Qwen2's class has no field for it, and its model takes what fits.
        theirs.head_dim = getattr(theirs, "head_dim", None) or (
            theirs.hidden_size // theirs.num_attention_heads
        )
        if not hasattr(theirs, "num_local_experts") and hasattr(theirs, "num_experts"):
            theirs.num_local_experts = theirs.num_experts
        theirs.layer_types = getattr(theirs, "layer_types", None) or []
        if family.ropes_by_layer and fields.keys() & {"rope_parameters", "rope_scaling"}:
            # It checks and completes the ropes of those types alone that some layer has.
            assume(len(set(theirs.layer_types)) == 2)
        theirs.bos_token_id = given.get("bos_token_id")
        names = [part.name for part in dataclasses.fields(HFFields) if hasattr(theirs, part.name)]
        return HFFields(**{name: getattr(theirs, name) for name in names})

    with mock.patch(_COMPLETED, completed):
        return _read(source)


def _file(name: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], **_SHAPE, **fields}


_LINEAR = {"rope_type": "linear", "factor": 2.0}
_LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@settings(max_examples=bounded(usual=600, long=20_000), deadline=None)
@given(_FILES)
@example(_file("Llama", rope_scaling={}, rope_parameters=_LINEAR))
@example(
    _file(
        "Llama", partial_rotary_factor=0.5, rope_scaling={**_LINEAR, "partial_rotary_factor": 1.0}
    )
)
@example(_file("Llama", rope_parameters={"rope_type": "llama3", "factor": 2.0}))
@example(_file("Llama", head_dim=16, hidden_size=66))
@example(_file("Phi3", partial_rotary_factor=0.5, rope_scaling={"type": "longrope", **_LONG}))
@example(
    _file(
        "Phi3",
        rope_parameters={"rope_type": "longrope", "partial_rotary_factor": 0.5, **_LONG},
        original_max_position_embeddings=128,
        sliding_window=600,
    )
)
@example(_file("Qwen2", use_sliding_window=True, sliding_window=16))
@example(_file("Qwen3", use_sliding_window=True, max_position_embeddings=8192, max_window_layers=1))
@example(_file("Gemma2", sliding_window_pattern=1))
@example(_file("Gemma3", rope_parameters={"sliding_attention": {}}, rope_scaling=_LINEAR))
def test_a_file_means_what_transformers_makes_of_it(source: dict[str, Any]) -> None:
    assert _read(source) == _as_transformers(source)
