"""Configurations: both spellings of Hugging Face's, and a clear error for what is not supported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixcache.config import (
    CacheConfig,
    EngineConfig,
    GenerationDefaults,
    ModelConfig,
    RopeConfig,
    SchedulerConfig,
)
from prefixcache.exceptions import ConfigError, ModelLoadError, UnsupportedModelError


def llama(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return config | changes


def of(architecture: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(llama(architectures=[f"{architecture}ForCausalLM"], **changes))


def test_sizes_and_defaults() -> None:
    config = ModelConfig.from_hf(llama())
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert config.head_dim == 16
    assert config.rope == RopeConfig()
    assert config.max_context_length == 512
    assert not config.tie_word_embeddings


def test_every_head_has_its_own_kv_head_when_none_is_said() -> None:
    assert ModelConfig.from_hf(llama(num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    ("architecture", "changes", "flags"),
    [
        ("Llama", {}, (False, False, False, False)),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("Mistral", {}, (False, False, False, False)),
        ("Qwen2", {}, (True, False, False, False)),
        ("Qwen3", {}, (False, False, False, True)),
        ("Qwen3", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_flags_of_each_architecture(
    architecture: str, changes: dict[str, Any], flags: tuple[bool, ...]
) -> None:
    config = of(architecture, **changes)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == flags


_YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **_YARN}},
        {"rope_scaling": {"type": "yarn", **_YARN}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "yarn", **_YARN}, "rope_theta": 5e5},
    ],
)
def test_both_spellings_of_rope_mean_the_same(spelling: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(llama(**spelling))
    assert config.rope == RopeConfig(theta=5e5, kind="yarn", factor=4.0, original_max_position=512)
    assert config.max_context_length == 2048


def test_linear_scaling_lengthens_the_context() -> None:
    config = ModelConfig.from_hf(llama(rope_scaling={"type": "linear", "factor": 2.0}))
    assert config.max_context_length == 1024


def test_llama3_scaling_is_already_in_the_context_length() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    config = ModelConfig.from_hf(llama(rope_scaling=scaling))
    assert config.rope.kind == "llama3"
    assert config.max_context_length == 512


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Supported: LlamaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*Supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*llama3, yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "Sliding window"),
    ],
)
def test_unsupported_models_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        ModelConfig.from_hf(llama(**changes))


@pytest.mark.parametrize(
    ("architecture", "changes", "active"),
    [
        ("Mistral", {"sliding_window": 128}, True),
        ("Mistral", {"sliding_window": 512}, False),  # the whole context
        ("Mistral", {"sliding_window": None}, False),
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": False}, False),
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": True}, False),  # from layer 28 on
        (
            "Qwen2",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1},
            True,
        ),
        ("Qwen3", {"sliding_window": 128}, False),
        ("Llama", {"sliding_window": 128}, False),
    ],
)
def test_only_an_active_sliding_window_is_refused(
    architecture: str, changes: dict[str, Any], active: bool
) -> None:
    if active:
        with pytest.raises(UnsupportedModelError, match=r"sliding_window 128.*full attention"):
            of(architecture, **changes)
    else:
        assert of(architecture, **changes).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"head_dim": 15}, "head_dim"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(llama(**changes))


def test_eos_ids_of_both_files_and_generation_defaults() -> None:
    generation = {"eos_token_id": [5, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    config = ModelConfig.from_hf(llama(eos_token_id=2, bos_token_id=1), generation)
    assert config.eos_token_ids == (5, 2)
    assert config.bos_token_id == 1
    assert config.generation == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20)


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama(dtype="bfloat16")))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    config = ModelConfig.from_hf(tmp_path)
    assert config.generation.temperature == 0.5
    assert config.checkpoint_dtype == "bfloat16"
    assert ModelConfig.from_hf(tmp_path / "config.json") == config


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_an_unreadable_config_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("size", [1, 16, 256])
def test_block_sizes_are_powers_of_two(size: int) -> None:
    assert CacheConfig(block_size=size).block_size == size


@pytest.mark.parametrize("size", [0, -16, 3, 48, 512, True])
def test_other_block_sizes_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        CacheConfig(block_size=size)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_blocks": 1}, "num_blocks"),
        ({"kv_cache_memory": 0}, "kv_cache_memory"),
        ({"num_blocks": 8, "kv_cache_memory": 1 << 20}, "not both"),
    ],
)
def test_cache_sizes_are_checked(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CacheConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 32, "max_num_batched_tokens": 31}, "max_num_batched_tokens"),
        ({"max_model_len": 0}, "max_model_len"),
    ],
)
def test_scheduler_limits_are_checked(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SchedulerConfig(**arguments)


def test_context_length_is_the_models_unless_less_is_asked() -> None:
    model = ModelConfig.from_hf(llama())
    assert SchedulerConfig().context_length(model) == 512
    assert SchedulerConfig(max_model_len=100).context_length(model) == 100
    with pytest.raises(ConfigError, match="at most the model's context length of 512"):
        SchedulerConfig(max_model_len=513).context_length(model)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dtype": "int8"}, "dtype must be one of auto, bfloat16, float32"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"seed": -1}, "seed"),
        ({"model": ""}, "model"),
    ],
)
def test_engine_options_are_checked(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**arguments)


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, prefixcache.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


_HUGE = 10**310


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": _HUGE},
        {"vocab_size": 2**40},
        {"eos_token_id": [-_HUGE]},
        {"rms_norm_eps": _HUGE},
        {"rope_theta": _HUGE},
        {"rope_parameters": {"rope_type": "linear", "factor": _HUGE}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_numbers_that_nothing_holds_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        ModelConfig.from_hf(llama(**changes))


def test_a_number_that_no_float_holds_is_no_share() -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        CacheConfig(gpu_memory_utilization=_HUGE)
