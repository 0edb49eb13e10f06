"""Configurations: both spellings of Hugging Face's, and a clear error for what is not supported."""

from __future__ import annotations

import dataclasses
import json
import socket
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from transformers import AutoConfig, GenerationConfig

from prefixcache.config.engine_config import Attention, EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.config.generation_fields import NOT_OBEYED, OBEYED, WITHOUT_EFFECT
from prefixcache.config.model_config import GenerationDefaults, ModelConfig
from prefixcache.config.rope_config import RopeConfig
from prefixcache.exceptions import ConfigError, ModelLoadError, UnsupportedModelError
from prefixcache.runner.torch.attention.registry import attention_names
from prefixcache.text.grammar.vocabulary import tokens_that_end


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


def test_llama3_scaling_is_already_in_the_context_length() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = ModelConfig.from_hf(llama(rope_scaling=scaling))
    assert config.rope.kind == "llama3"
    assert config.max_context_length == 512


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM.*Supported: .*Llama",
        ),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*Supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*llama3, yarn"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types that are not all"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types 'linear_attention'"),
    ],
)
def test_unsupported_models_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        ModelConfig.from_hf(llama(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mamba_d_head": 8}, r"mamba_n_heads \(4\) times mamba_d_head \(8\)"),
        ({"mamba_n_heads": 8}, "value_dim must be a multiple of 16, got 8"),
        ({"mamba_n_groups": 3}, r"value_heads must be a multiple of 3 \(key_heads\), got 4"),
        ({"mamba_d_conv": 9}, "taps must be at most 8"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit \[0.0, 0.1\] is not supported"),
        ({"layer_types": ["mamba"] * 2}, "must leave a layer of attention"),
    ],
)
def test_mamba_2_that_does_not_fit_is_refused(changes: dict[str, Any], named: str) -> None:
    sizes = {"shared_intermediate_size": 96, "mamba_n_heads": 4, "mamba_expand": 1}
    dense = {"num_local_experts": 0, "layer_types": ["mamba", "attention"]}
    with pytest.raises(ConfigError, match=named):
        of("GraniteMoeHybrid", **sizes | dense | changes)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("-M*", "Layers of an MLP that no mixer precedes"),
        ("M--*", "Layers of an MLP that no mixer precedes"),
        ("ME*", "layer_types 'moe'"),
        ("M*", "layers_block_type in the model's config must have all"),
    ],
)
def test_layers_of_nemotron_h_that_do_not_run_are_refused(pattern: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        of("NemotronH", hybrid_override_pattern=pattern, num_hidden_layers=max(3, len(pattern)))


def test_a_residual_scale_is_not_for_norms_of_what_is_added() -> None:
    config = of("Gemma3")
    with pytest.raises(ConfigError, match="residual_scale"):
        dataclasses.replace(config, residual_scale=0.5)


def test_a_list_of_rotating_layers_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no_rope_layers .* an entry for each layer"):
        of("SmolLM3", no_rope_layers=[])


def test_a_model_of_images_around_an_unknown_model_of_text_is_refused() -> None:
    outer = {"architectures": ["Mistral3ForConditionalGeneration"]}
    with pytest.raises(UnsupportedModelError, match="text_config of 'mistral4'"):
        ModelConfig.from_hf(outer | {"text_config": llama(model_type="mistral4")})


_TYPES = ["full_attention", "sliding_attention"]
_SWITCHED_ON = {"sliding_window": 128, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("Mistral", {"sliding_window": 128}, (128, 128)),
        ("Mistral", {"sliding_window": 128, "layer_types": ["sliding_attention"] * 2}, (128, 128)),
        ("Mistral", {"sliding_window": 512}, ()),  # the whole context
        ("Mistral", {}, ()),  # 4,096, more than the context
        ("Mistral", {"sliding_window": None}, ()),
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": False}, ()),
        ("Qwen2", {"sliding_window": 4096, "use_sliding_window": False}, ()),
        ("Qwen2", _SWITCHED_ON, ()),  # from layer 28 on
        ("Qwen2", _SWITCHED_ON | {"num_hidden_layers": 30}, (None,) * 28 + (128,) * 2),
        ("Qwen2", _SWITCHED_ON | {"max_window_layers": 1}, (None, 128)),
        ("Qwen2", _SWITCHED_ON | {"max_window_layers": 0}, (128, 128)),
        ("Qwen3", _SWITCHED_ON | {"layer_types": _TYPES[::-1]}, (128, None)),
        ("Qwen3", {"sliding_window": 128}, ()),
        ("Llama", {"sliding_window": 128}, ()),
    ],
)
def test_the_window_of_each_layer(architecture, changes, windows):
    assert of(architecture, **changes).layer_windows == windows


def test_a_window_counts_against_the_scaled_context() -> None:
    scaled = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert of("Mistral", sliding_window=512, **scaled).layer_windows == (512, 512)
    assert of("Mistral", sliding_window=1024, **scaled).layer_windows == ()


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("Mistral", {"sliding_window": 513}, "sliding_window .* at most the context of 512"),
        ("Mistral", {"sliding_window": 0}, "sliding_window .* greater than or equal to 1, got 0"),
        ("Mistral", {"sliding_window": -1}, "sliding_window"),
        ("Mistral", {"sliding_window": 128, "layer_types": _TYPES}, "layer_types .*_window 128"),
        ("Mistral", {"sliding_window": None, "layer_types": _TYPES}, "layer_types"),
        ("Qwen2", _SWITCHED_ON | {"layer_types": _TYPES * 2}, "layer_types .* 2 layers.*got 4"),
        ("Qwen2", {"sliding_window": 128, "layer_types": _TYPES}, "sliding_window .* null.*types"),
        ("Qwen3", _SWITCHED_ON | {"layer_types": ["full", "full"]}, "layer_types 'full'"),
        ("Gemma3", {"sliding_window": None}, "sliding_window .* null, and layer_types"),
        ("Gemma3", {"sliding_window": 0}, "sliding_window"),
        ("Gemma3", {"sliding_window": 1024}, "sliding_window .* at most the context of 512"),
        ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("Gemma3", {"layer_types": ["full_attention"] * 3}, "layer_types .* 2 layers"),
        ("Gemma3", {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
    ],
)
def test_windows_that_contradict_the_model_are_named(architecture, changes, named):
    with pytest.raises(ConfigError, match=named):
        of(architecture, **changes)


_GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
_GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


_GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}


def test_gemma_2_as_it_is_published() -> None:
    config = ModelConfig.from_hf(_GEMMA2_2B)
    assert config.layer_windows == (4096, None) * 13
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    assert (config.attention_scale, config.qk_norm) == (1 / 16, False)
    assert config.tie_word_embeddings


def test_the_text_part_of_a_model_that_sees_images() -> None:
    config = ModelConfig.from_hf(_GEMMA3_4B)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.local_rope == RopeConfig(theta=1e4)
    assert config.max_context_length == 131072  # the scaled one
    assert [i for i, window in enumerate(config.layer_windows) if window is None] == [
        *(5, 11, 17, 23, 29)
    ]
    assert config.tie_word_embeddings
    assert (config.checkpoint_dtype, config.eos_token_ids) == ("bfloat16", (1, 106))
    outer = {"tie_word_embeddings": False, "quantization_config": None}
    assert not ModelConfig.from_hf(_GEMMA3_4B | outer).tie_word_embeddings


@pytest.mark.parametrize(
    "published", [_GEMMA2_2B, _GEMMA3_1B, _GEMMA3_4B], ids=["2-2b", "3-1b", "3-4b"]
)
def test_gemma_as_transformers_writes_it_again(published):
    written = AutoConfig.for_model(**published).to_json_string()
    found = ModelConfig.from_hf(published)
    again = ModelConfig.from_hf(json.loads(written))
    assert dataclasses.replace(again, bos_token_id=found.bos_token_id) == found


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'.*gelu_pytorch_tanh"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters of one set for all layers"),
        ({"rope_parameters": {"chunked_attention": {}}}, "rope_parameters of chunked_attention"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}}, "'dynamic'"),
        ({"rope_scaling": {"full_attention": {}}}, "rope_scaling that differ by layer type"),
    ],
)
def test_what_gemma_3_may_not_be_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        of("Gemma3", **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        ModelConfig.from_hf(_GEMMA3_4B | {"text_config": _GEMMA3_4B["text_config"] | changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar"),
        ({"rope_local_base_freq": 0.0}, "rope_local_base_freq"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": -1.0}}}, "rope_theta"),
        ({"rope_parameters": {"sliding_attention": {}, "full_attention": 5}}, "full_attention"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"text_config": 5}, "text_config"),
        ({"text_config": {}}, "lacks hidden_size"),
        (
            {
                "rope_parameters": {"sliding_attention": {}},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_scaling, and rope_parameters without full_attention",
        ),
    ],
)
def test_wrong_fields_of_gemma_3_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        of("Gemma3", **changes)


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
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "lacks the low_freq_factor of its"),
        ({"hidden_size": 66}, r"hidden_size .* multiple of num_attention_heads \(4\), got 66"),
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


@pytest.mark.parametrize(
    ("config", "generation", "eos", "ends"),
    [
        # Llama 3.2: vLLM's tests/tokenization/test_get_eos.py.
        ([128001, 128008, 128009], [128001, 128008, 128009], 128009, {128001, 128008, 128009}),
        # Qwen3 base, trained for chats: github.com/hiyouga/LlamaFactory/issues/9338.
        (151643, 151643, 151645, {151643, 151645}),
        # chandra-ocr-2: github.com/Blaizzy/mlx-vlm/pull/2112.
        (248044, [248044], 248046, {248044, 248046}),
        # Gemma 3, whose tokenizer names the end of a text: huggingface/transformers/issues/38182.
        ([1, 106], [1, 106], 1, {1, 106}),
        # gpt-oss: `<|end|>`, 200007, ends a message of several.
        (200002, [200002, 199999, 200012], 200002, {199999, 200002, 200012}),
        (2, None, None, {2}),
    ],
)
def test_answers_end_at_what_the_models_files_or_its_tokenizer_name(config, generation, eos, ends):
    tokenizer = mock.Mock(eos_token_ids=() if eos is None else (eos,))
    model = ModelConfig.from_hf(llama(eos_token_id=config), {"eos_token_id": generation})
    assert {*tokens_that_end(tokenizer, model)} == ends


# Of each field that is not obeyed a value, next to null, that changes no answer.
CHANGING_NOTHING = {
    **{name: [] for name in ("bad_words_ids", "force_words_ids", "constraints", "stop_strings")},
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "watermarking_config")),
    **dict.fromkeys(("exponential_decay_length_penalty", "dola_layers")),
    "sequence_bias": {},
}


def test_each_field_of_a_generation_config_is_obeyed_warned_of_or_without_effect() -> None:
    config = GenerationConfig()
    assert OBEYED | NOT_OBEYED.keys() | WITHOUT_EFFECT >= vars(config).keys()
    assert len({*OBEYED, *NOT_OBEYED, *WITHOUT_EFFECT}) == sum(
        map(len, (OBEYED, NOT_OBEYED, WITHOUT_EFFECT))
    )
    lists = {"suppress_tokens": [3, 4], "begin_suppress_tokens": [5]}
    values = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "max_new_tokens": 9}
    values |= {"repetition_penalty": 1.5, **lists}
    assert {"eos_token_id", *values} == OBEYED
    others = config.to_dict() | CHANGING_NOTHING
    generation = ModelConfig.from_hf(llama(), others | values).generation
    expected = values | {name: (*ids,) for name, ids in lists.items()}
    assert asdict(generation) == expected | {"not_obeyed": ()}
    for name in ("max_new_tokens", *lists):
        del expected[name]
    assert generation.sampling_options() == expected


@pytest.mark.parametrize("name", CHANGING_NOTHING)
def test_a_field_of_a_generation_config_that_would_change_answers_is_noted(name: str) -> None:
    assert ModelConfig.from_hf(llama(), {name: [[7]]}).generation.not_obeyed == (name,)


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


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("2G", 2 * 2**30),
        ("2GB", 2_000_000_000),
        ("1.5 MiB", 3 * 2**19),
        (".5k", 512),
        ("64k", 65536),
        ("1T", 2**40),
        ("1048576", 1048576),
        (1048576, 1048576),
        ("100B", 100),
        ("0.5", 0.5),
        (0.5, 0.5),
        (".25", 0.25),
        ("1.0", 1.0),
    ],
)
def test_sizes_and_shares_of_memory_are_read(given: Any, size: float) -> None:
    found = CacheConfig(kv_cache_memory=given).kv_cache_memory
    assert (found, type(found)) == (size, type(size))


@pytest.mark.parametrize(
    "given",
    [
        *("", "G", "-1", "2 Gigs", "1e9", "2iB", "nan", "0x10", "2GiB 1", "5bit", "0", "0.0"),
        *("1.5", "-0.5", "0.5GiB GiB", "9" * 400 + "T", "9" * 5000, 0, -1, 0.0, 1.5, -0.5),
        *(10**400, True, False, float("nan"), float("inf"), [1], b"1"),
    ],
)
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory must be bytes, a size as 2GiB or"):
        CacheConfig(kv_cache_memory=given)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        *((8192, 8192), ("8192", 8192), ("8k", 8000), ("8K", 8192), (" 25.6k ", 25600)),
        *((".5M", 2**19), ("1m", 10**6), ("1g", 10**9), ("1", 1)),
    ],
)
def test_numbers_of_tokens_are_read_as_vllm_reads_them(given: Any, tokens: int) -> None:
    assert SchedulerConfig(max_model_len=given).max_model_len == tokens
    if tokens >= 64:
        assert SchedulerConfig(max_num_batched_tokens=given).max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    "given",
    ["", "k", "8kb", "8 k", "-8k", "1e3", "0", "0.1", "1.5", "9g", "9" * 5000, 8.0, True, b"8k"],
)
def test_what_is_no_number_of_tokens_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be a number of tokens"):
        SchedulerConfig(max_model_len=given)


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
        ({"record_trace": Path("x"), "disk_cache_memory": 1 << 20}, "excludes disk_cache_memory"),
        ({"disk_cache_min_uses": 2}, "needs disk_cache_memory"),
        ({"kv_cache_dir": Path(__file__)}, "kv_cache_dir must be a folder or a new path, not a f"),
        ({"disk_cache_dir": Path(__file__, "new")}, "disk_cache_dir must be a folder"),
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


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ({}, "cpu", (64, 2048, 250)),
        ({}, "cuda", (256, 8192, 0)),
        ({"max_step_ms": 40.0}, "cuda", (256, 8192, 40)),
        ({"max_step_ms": 0.0}, "cpu", (64, 2048, 0)),
        # What is not said makes room for what is.
        ({"max_num_batched_tokens": 32}, "cpu", (32, 32, 250)),
        ({"max_num_batched_tokens": 100}, "cuda", (100, 100, 0)),
        ({"max_num_seqs": 4096}, "cpu", (4096, 4096, 250)),
        ({"max_num_seqs": 4096}, "cuda", (4096, 8192, 0)),
    ],
)
def test_the_limits_of_a_step_go_by_the_device_where_nothing_is_said(given, device, expected):
    config = EngineConfig(scheduler=SchedulerConfig(**given))
    assert astuple(config.scheduler.limits(device)) == expected
    assert astuple(config.on(device).scheduler.limits()) == expected
    assert config.on(device).on("cpu") == config.on(device)


def test_context_length_is_the_models_unless_less_is_asked() -> None:
    model = ModelConfig.from_hf(llama())
    assert SchedulerConfig().context_length(model) == 512
    assert SchedulerConfig(max_model_len=100).context_length(model) == 100
    with pytest.raises(ConfigError, match="at most the model's context length of 512"):
        SchedulerConfig(max_model_len=513).context_length(model)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dtype": "int8"}, "dtype must be 'auto', 'bfloat16' or 'float32', got 'int8'"),
        ({"device": "tpu"}, "device must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        ({"seed": -1}, "seed"),
        ({"model": ""}, "model"),
    ],
)
def test_engine_options_are_checked(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**arguments)


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
    name, value = next(iter(changes.items()))
    named = next(reversed(value)) if isinstance(value, dict) else name
    with pytest.raises(ConfigError, match=f"^{named} in the model's config must be"):
        ModelConfig.from_hf(llama(**changes))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_num_seq": 3}, "Unknown flag max_num_seq; did you mean max_num_seqs"),
        ({"cache": CacheConfig()}, "Unknown flag cache"),
        ({"port": 3}, "Unknown flag port"),
        ({"max_num_seqs": True}, "^max_num_seqs must be a valid integer, got True"),
        ({"max_num_seqs": "3"}, "^max_num_seqs must be a valid integer, got '3'"),
        ({"max_num_seqs": 10**5000}, "^max_num_seqs must be less than"),
        ({"max_step_ms": float("nan")}, "^max_step_ms must be a finite number"),
        ({"max_step_ms": -1}, "^max_step_ms must be greater than or equal to 0"),
        ({"enforce_eager": 1}, "^enforce_eager must be a valid boolean"),
        ({"attention": "best"}, "^attention must be 'auto', 'torch', 'cpu'"),
    ],
)
def test_flags_of_python_are_checked_by_the_fields_names(flags: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flags(**flags)


def test_flags_of_python_have_the_same_names_and_defaults() -> None:
    config = EngineConfig.from_flags(num_gpu_blocks_override=7, max_step_ms=5, dtype=None)
    assert config == EngineConfig(
        cache=CacheConfig(num_blocks=7), scheduler=SchedulerConfig(max_step_ms=5.0)
    )


def test_attention_backends_are_those_that_can_be_made() -> None:
    assert sorted(get_args(Attention)) == sorted(("auto", "cpu", *attention_names()))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "yarn", "factor": "4", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "x"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}},
        {"rope_scaling": {"type": "linear"}, "factor": None},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
        {"rope_scaling": {"type": ["yarn"]}},
        {"rope_parameters": "yarn"},
        {"num_hidden_layers": 2**31 - 1},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": True},
        {"layer_types": ["full_attention", 5]},
        {"layer_types": ["full_attention"]},
        {"layer_types": "full_attention"},
        {"max_window_layers": -1},
        {"use_sliding_window": "yes"},
        {"sliding_window": 0, "use_sliding_window": True},
        {"eos_token_id": "2"},
        {"eos_token_id": [[2]]},
        {"bos_token_id": 1.5},
        {"rms_norm_eps": float("inf")},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": "10000"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": "LlamaForCausalLM"},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["Mistral", "Gemma3"])
def test_hostile_fields_are_errors_that_name_them(architecture, changes):
    fields = llama(architectures=[f"{architecture}ForCausalLM"]) | changes
    names = {"rope_parameters", "rope_scaling", "Rope scaling", "architecture", *changes}
    for value in changes.values():
        names |= set(value) if isinstance(value, dict) else set()
    with pytest.raises(ConfigError, match="|".join(names)):
        ModelConfig.from_hf(fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "0.7"), ("top_k", 1.5), ("max_new_tokens", 2**40), ("eos_token_id", "x")],
)
def test_wrong_generation_defaults_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_hf(llama(), {name: value})


def test_a_window_that_nothing_is_said_of_is_the_familys() -> None:
    config = of("Mistral", max_position_embeddings=8192)
    assert config.layer_windows == (4096, 4096)


def test_what_nobody_reads_may_hold_anything() -> None:
    odd = {"auto_map": {"AutoConfig": "evil.Config"}, "id2label": 5, "dtype": "nn", "per_layer": {}}
    assert ModelConfig.from_hf(llama(model_type="mamba", num_labels="x", **odd)).num_layers == 2


def test_code_of_the_folder_never_runs_and_no_network_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    (tmp_path / "evil.py").write_text("raise SystemExit('the code of a folder ran')")
    remote = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(llama(model_type="evil", **remote)))
    assert ModelConfig.from_hf(tmp_path).num_layers == 2


def test_a_number_that_no_float_holds_is_no_share() -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        CacheConfig(gpu_memory_utilization=_HUGE)
