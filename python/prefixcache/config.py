"""What an engine is made of: the model's shape, the cache, the scheduler. Frozen and checked.

Every wrong value raises `ConfigError` naming the field and what is allowed. Nothing here imports
torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from prefixcache.exceptions import ConfigError, ModelLoadError, UnsupportedModelError

DEFAULT_MODEL = "smollm2-135m-instruct"

DType = Literal["auto", "bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]

MAX_BLOCK_SIZE = 256
# What a model's config may count: more than any tensor has in one direction.
_LARGEST_INTEGER = 2**31 - 1
_CPU_STEP_MS = 250

_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def supported_architectures() -> tuple[str, ...]:
    """Names as they stand in `architectures` of a Hugging Face config.json."""
    return _ARCHITECTURES


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it is scaled to longer contexts.

    Scaling kinds and field names are those of Hugging Face's `rope_parameters`. Fields that a kind
    does not use stay at their defaults. `original_max_position` is in tokens; None of
    `attention_factor` lets YaRN derive it from `factor` and the two `mscale` values.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_one_of("rope_type", self.kind, get_args(RopeKind))
        _check_positive("rope_theta", self.theta)
        _check_positive("rope factor", self.factor)
        if self.kind in ("llama3", "yarn"):
            _check_at_least("original_max_position_embeddings", self.original_max_position, 1)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope high_freq_factor ({self.high_freq_factor}) must exceed "
                f"low_freq_factor ({self.low_freq_factor})."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling values a model's authors recommend; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def sampling_options(self) -> dict[str, Any]:
        """Those values that are given, by their names in `SamplingParams`; not the length."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder of the Llama family, and the flags in which its members differ.

    `qkv_bias`, `output_bias` and `mlp_bias` say which linears carry a bias, `qk_norm` whether each
    query and key head is RMS-normalised before rotation. `checkpoint_dtype` is the type the
    weights were saved in, None when the checkpoint does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    checkpoint_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def __post_init__(self) -> None:
        _check_architecture([self.architecture])
        for name in _MODEL_SIZES:
            _check_at_least(name, getattr(self, name), 1)
        _check_positive("rms_norm_eps", self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}.")

    @property
    def max_context_length(self) -> int:
        """Tokens a sequence may have, with the room that linear and YaRN scaling add."""
        if self.rope.kind == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            scaled = int(self.rope.original_max_position * self.rope.factor)
            return max(self.max_position_embeddings, scaled)
        return self.max_position_embeddings

    @classmethod
    def from_hf(
        cls,
        source: Mapping[str, Any] | str | Path,
        generation: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Reads a Hugging Face config.json: its dict, the file, or the folder that holds it.

        `generation` is the dict of generation_config.json; with a path it is read from beside
        config.json when it is there. Raises `UnsupportedModelError` naming what is not supported,
        `ConfigError` for a missing or wrong field, `ModelLoadError` for an unreadable file.
        """
        if isinstance(source, (str, Path)):
            config_path = _config_path(Path(source))
            source = read_json_object(config_path)
            beside = config_path.with_name("generation_config.json")
            if generation is None and beside.is_file():
                generation = read_json_object(beside)
        return _parse_model(_Fields(source), _Fields(generation or {}))


_MODEL_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. `num_blocks` counts the null block, as vLLM's override does.

    `kv_cache_memory` (bytes) sizes the pool instead. With neither, a CPU's pool takes a share of
    the free memory, and a GPU's what `gpu_memory_utilization` of its memory leaves beside the
    weights and the largest step.

    With `merge_duplicate_blocks` a block whose content another one holds is given up for that one,
    where equal content means equal bytes: in batch-invariant mode.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    merge_duplicate_blocks: bool = True

    def __post_init__(self) -> None:
        _check_block_size(self.block_size)
        if self.num_blocks is not None:
            _check_at_least("num_blocks", self.num_blocks, 2)
        if self.kv_cache_memory is not None:
            _check_at_least("kv_cache_memory", self.kv_cache_memory, 1)
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("Give num_blocks or kv_cache_memory, not both.")
        _check_positive("gpu_memory_utilization", self.gpu_memory_utilization)
        if self.gpu_memory_utilization > 1:
            raise ConfigError(
                f"gpu_memory_utilization must be at most 1, got {self.gpu_memory_utilization}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. `max_model_len` None takes the model's own context length.

    A request whose share of cached tokens is below `global_cache_hit_threshold` ends at once (0:
    none does) unless it brings a threshold of its own. With `share_in_flight` a request waits, at
    most `max_wait_steps` steps, for blocks that another one is computing.

    While answers are under way, chunks of prompts are so short that a step takes `max_step_ms`
    milliseconds at most, as far as earlier steps tell (0: no limit). None is 250 on a CPU and no
    limit on CUDA.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_step_ms: float | None = None
    max_model_len: int | None = None
    global_cache_hit_threshold: float = 0.0
    share_in_flight: bool = True
    max_wait_steps: int = 4096

    def __post_init__(self) -> None:
        _check_at_least("max_num_seqs", self.max_num_seqs, 1)
        _check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        if self.max_model_len is not None:
            _check_at_least("max_model_len", self.max_model_len, 1)
        if self.max_step_ms:
            _check_positive("max_step_ms", self.max_step_ms)
        _check_fraction("global_cache_hit_threshold", self.global_cache_hit_threshold)
        _check_at_least("max_wait_steps", self.max_wait_steps, 1)

    def step_limit(self, device_type: str) -> float:
        """`max_step_ms` on that type of device, 0 for no limit."""
        if self.max_step_ms is not None:
            return self.max_step_ms
        return _CPU_STEP_MS if device_type == "cpu" else 0

    def context_length(self, model: ModelConfig) -> int:
        """Most tokens of a sequence. Raises `ConfigError` when more is asked than the model has."""
        longest = model.max_context_length
        if self.max_model_len is None:
            return longest
        if self.max_model_len > longest:
            raise ConfigError(
                f"max_model_len must be at most the model's context length of {longest} tokens, "
                f"got {self.max_model_len}."
            )
        return self.max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is started with.

    `model` is an alias, a folder, a GGUF file or a hub id. `attention` names a backend of
    `attention/registry.py`; "auto" takes the best one for the device. `batch_invariant` None is on
    for a CPU and off for CUDA, where its cost is not known yet; off, the fastest kernels are taken,
    whether they keep it or not. `enforce_eager` runs without CUDA graphs.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    dtype: DType = "auto"
    device: Device = "auto"
    seed: int = 0
    batch_invariant: bool | None = None
    attention: str = "auto"
    enforce_eager: bool = False
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        _check_one_of("dtype", self.dtype, get_args(DType))
        _check_one_of("device", self.device, get_args(Device))
        _check_at_least("seed", self.seed, 0)
        if not self.model:
            raise ConfigError("model must not be empty.")

    def keeps_batch_invariant(self, device_type: str) -> bool:
        """Whether answers on that type of device must not depend on the batch."""
        if self.batch_invariant is not None:
            return self.batch_invariant
        return device_type != "cuda"


def _check_at_least(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}.")


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not is_finite(value) or value <= 0:
        raise ConfigError(f"{name} must be a positive number, got {value!r}.")


def is_finite(value: float) -> bool:
    """Whether a float can hold the number: an integer may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_fraction(value: object) -> bool:
    """Whether `value` is a number from 0 to 1; NaN and booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value <= 1.0


def _check_fraction(name: str, value: object) -> None:
    if not is_fraction(value):
        raise ConfigError(f"{name} must be a number from 0.0 to 1.0, got {value!r}.")


def _check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def _check_block_size(value: int) -> None:
    _check_at_least("block_size", value, 1)
    if value > MAX_BLOCK_SIZE or value & (value - 1):
        raise ConfigError(
            f"block_size must be a power of two from 1 to {MAX_BLOCK_SIZE}, got {value}."
        )


def _check_architecture(names: list[str]) -> None:
    if not any(name in _ARCHITECTURES for name in names):
        raise UnsupportedModelError(
            f"The architecture {', '.join(names) or '(none named)'} is not supported. "
            f"Supported: {', '.join(_ARCHITECTURES)}."
        )


def _config_path(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def read_json_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises `ModelLoadError` when it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"Cannot read {path}: it does not hold a JSON object.")
    return cast("dict[str, Any]", value)


class _Fields:
    """Typed reading of a JSON object; a null counts as absent. Errors name the field."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.optional_integer(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"The model's config lacks {name}.")
        return default

    def optional_integer(self, name: str) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} in the model's config must be an integer, got {value!r}.")
        if abs(value) > _LARGEST_INTEGER:
            raise ConfigError(f"{name} in the model's config is out of range.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.optional_number(name)
        return default if value is None else value

    def optional_number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} in the model's config must be a number, got {value!r}.")
        if not is_finite(value):
            raise ConfigError(f"{name} in the model's config is out of range.")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{name} in the model's config must be true or false, got {value!r}.")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ConfigError(f"{name} in the model's config must be an object, got {value!r}.")
        return dict(cast("dict[str, Any]", value))

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(_Fields({name: one}).integer(name) for one in cast("list[object]", ids))


def _parse_model(hf: _Fields, generation: _Fields) -> ModelConfig:
    architecture = _architecture(hf)
    _refuse_unsupported(hf, architecture)
    hidden_size = hf.integer("hidden_size")
    num_heads = hf.integer("num_attention_heads")
    max_position = hf.integer("max_position_embeddings")
    _check_at_least("num_attention_heads", num_heads, 1)
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=hf.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=hf.integer("num_key_value_heads", num_heads),
        head_dim=hf.integer("head_dim", hidden_size // num_heads),
        max_position_embeddings=max_position,
        rms_norm_eps=hf.number("rms_norm_eps", 1e-6),
        rope=_parse_rope(hf, max_position),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        checkpoint_dtype=_checkpoint_dtype(hf),
        bos_token_id=hf.optional_integer("bos_token_id"),
        eos_token_ids=_eos_token_ids(hf, generation),
        generation=_parse_generation(generation),
        **_biases(hf, architecture),
    )


def _architecture(hf: _Fields) -> str:
    names = hf.get("architectures")
    names = cast("list[str]", names) if isinstance(names, list) else []
    _check_architecture(names)
    return next(name for name in names if name in _ARCHITECTURES)


def _biases(hf: _Fields, architecture: str) -> dict[str, bool]:
    """Qwen2 has a bias on q, k and v without saying so; Mistral never has one."""
    if architecture == "Qwen2ForCausalLM":
        return {"qkv_bias": True}
    if architecture == "MistralForCausalLM":
        return {}
    attention = hf.flag("attention_bias")
    return {"qkv_bias": attention, "output_bias": attention, "mlp_bias": hf.flag("mlp_bias")}


def _refuse_unsupported(hf: _Fields, architecture: str) -> None:
    if hf.get("quantization_config") is not None:
        raise UnsupportedModelError(
            "quantization_config is not supported. Supported weights: unquantized safetensors "
            "(float32, float16, bfloat16) and GGUF files."
        )
    if (activation := hf.get("hidden_act")) not in (None, "silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported. Supported: silu.")
    if _has_sliding_window(hf, architecture):
        raise UnsupportedModelError(
            f"Sliding window attention (sliding_window {hf.get('sliding_window')!r}) is not "
            "supported. Supported: full attention in every layer."
        )


def _has_sliding_window(hf: _Fields, architecture: str) -> bool:
    layer_types = hf.get("layer_types")
    if isinstance(layer_types, list):
        return any(kind != "full_attention" for kind in cast("list[object]", layer_types))
    window = hf.optional_integer("sliding_window")
    if window is None or window >= hf.integer("max_position_embeddings"):
        return False
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        first = hf.integer("max_window_layers", 28)
        return hf.flag("use_sliding_window") and first < hf.integer("num_hidden_layers")
    return architecture == "MistralForCausalLM"


def _parse_rope(hf: _Fields, max_position: int) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_scaling` with `rope_theta`."""
    values = hf.mapping("rope_parameters") or hf.mapping("rope_scaling")
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedModelError(
            "rope_parameters that differ by layer type are not supported. "
            "Supported: one set for all layers."
        )
    rope = _Fields(values)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    _refuse_rope(rope, hf, kind)
    theta = rope.number("rope_theta", hf.number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    original = rope.integer("original_max_position_embeddings", max_position)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=rope.number("factor", max_position / original),
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        truncate=rope.flag("truncate", default=True),
    )


def _refuse_rope(rope: _Fields, hf: _Fields, kind: object) -> None:
    if kind not in get_args(RopeKind):
        raise UnsupportedModelError(
            f"Rope scaling {kind!r} is not supported. Supported: {', '.join(get_args(RopeKind))}."
        )
    rotated = rope.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {rotated} is not supported. Supported: 1.0."
        )


def _checkpoint_dtype(hf: _Fields) -> str | None:
    name = hf.get("dtype") or hf.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")


def _eos_token_ids(hf: _Fields, generation: _Fields) -> tuple[int, ...]:
    """Ids of both files: either may hold the one that ends a chat turn."""
    ids = generation.token_ids("eos_token_id") + hf.token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _parse_generation(generation: _Fields) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=generation.optional_number("temperature"),
        top_p=generation.optional_number("top_p"),
        top_k=generation.optional_integer("top_k"),
        min_p=generation.optional_number("min_p"),
        repetition_penalty=generation.optional_number("repetition_penalty"),
        max_new_tokens=generation.optional_integer("max_new_tokens"),
    )
