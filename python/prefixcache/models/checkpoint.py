"""The fingerprint of a checkpoint's weights: docs/reference/hashing.md has the bytes."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prefixcache._core import derive_digest, hash_file_ranges
from prefixcache.config.model_config import (
    ExpertsConfig,
    GenerationDefaults,
    ModelConfig,
    RopeConfig,
    without_defaults,
)
from prefixcache.exceptions import ModelLoadError
from prefixcache.models.digests import FileState, file_state, range_digests, remembered_digests
from prefixcache.models.gguf.index import (
    INDEX_FILE,
    IndexedTensor,
    has_index,
    read_index,
)
from prefixcache.models.safetensors_file import TensorRange
from prefixcache.models.weights import INDEX_FILE as SHARDS_FILE
from prefixcache.models.weights import checkpoint_files, stored_tensors

_CONTEXT = "prefixcache v2 {}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder's weights as they were read at one time.

    `digest` is the same for the same tensors in other files, in hexadecimal. `states` tells when a
    file has changed since.
    """

    folder: Path
    digest: str
    states: tuple[FileState, ...] = ()

    def check_unchanged(self) -> None:
        """Raises `ModelLoadError` unless the folder's files are those that were read."""
        if self.states != _states(self.folder):
            raise ModelLoadError(f"The weights in {self.folder} were changed while they were read.")


def read_checkpoint(folder: Path, threads: int = 1) -> Checkpoint:
    """The weights in a folder, all of which it reads, unless they are remembered.

    Raises `ModelLoadError` when a file cannot be read.
    """
    checkpoint = _checkpoint(folder, partial(range_digests, threads=threads))
    assert checkpoint is not None
    return checkpoint


def remembered_checkpoint(folder: Path) -> Checkpoint | None:
    """`read_checkpoint` of files that have not changed since; None where it would read weights."""
    return _checkpoint(folder, remembered_digests)


def _checkpoint(
    folder: Path, digests_of: Callable[[Path, list[tuple[int, int]]], list[str] | None]
) -> Checkpoint | None:
    states = _states(folder)
    parts: list[tuple[TensorRange, str]] = []
    for file, ranges in _ranges(folder):
        try:
            digests = digests_of(file, [(part.start, part.end) for part in ranges])
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            raise ModelLoadError(f"Cannot read the weight file {file}: {error}") from error
        if digests is None:
            return None
        parts += zip(ranges, digests, strict=True)
    checkpoint = Checkpoint(folder, _digest_of(parts), states)
    checkpoint.check_unchanged()
    return checkpoint


def tensors_digest(file: Path, ranges: list[TensorRange], threads: int = 1) -> str:
    """The digest of a checkpoint that has just these tensors, which lie in `file`."""
    spans = [(part.start, part.end) for part in ranges]
    digests = [digest.hex() for digest in hash_file_ranges(file, spans, threads)]
    return _digest_of(list(zip(ranges, digests, strict=True)))


def _digest_of(parts: list[tuple[TensorRange, str]]) -> str:
    """Of tensors and the digests of their bytes."""
    parts.sort(key=lambda part: part[0].name.encode())
    return _derived("weights", b"".join(_described(part, digest) for part, digest in parts))


# Fields that count in a digest whatever they are. Those that came later count where they are not as
# in models that do without: these keep their digests.
_MODEL_FIELDS = frozenset(
    (
        *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers"),
        *("num_heads", "num_kv_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
        *("rope", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "layer_windows", "local_rope"),
        *("norm_offset", "sandwich_norms", "activation", "embedding_scale", "attention_scale"),
        *("tie_word_embeddings", "checkpoint_dtype", "bos_token_id", "eos_token_ids", "generation"),
    )
)
_GENERATION_FIELDS = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
)
_ROPE_FIELDS = frozenset(
    (
        *("theta", "kind", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position", "beta_fast", "beta_slow", "attention_factor"),
        *("mscale", "mscale_all_dim", "truncate"),
    )
)
_EXPERTS_FIELDS = frozenset(
    (
        *("count", "top_k", "intermediate_size", "scores", "selection_bias", "renormalise"),
        *("added_to_sum", "scale", "router_bias", "dense_layers"),
    )
)


def model_digest(config: ModelConfig) -> str:
    """A digest of all but the weights that decides what a model computes, in hexadecimal."""
    config = without_defaults(config)
    fields = _counted(config, _MODEL_FIELDS)
    for name in ("rope", "local_rope"):
        rope = getattr(config, name)
        fields[name] = None if rope is None else _counted(rope, _ROPE_FIELDS)
    fields["generation"] = _counted(config.generation, _GENERATION_FIELDS)
    if config.experts is not None:
        fields["experts"] = _counted(config.experts, _EXPERTS_FIELDS)
    return _derived("model", json.dumps(fields, sort_keys=True).encode())


def _counted(
    config: ModelConfig | RopeConfig | ExpertsConfig | GenerationDefaults, first: Set[str]
) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {
        name: value for name, value in values.items() if name in first or value != defaults[name]
    }


def formats_digest(formats: Mapping[str, str]) -> str:
    """A digest of the formats to which weights are quantized, by name, in hexadecimal."""
    return _derived("quantized", json.dumps(formats, sort_keys=True).encode())


def _derived(purpose: str, message: bytes) -> str:
    return derive_digest(_CONTEXT.format(purpose), message).hex()


def _described(part: TensorRange, digest: str) -> bytes:
    shape = struct.pack(f"<{len(part.shape)}Q", *part.shape)
    fields = (part.name.encode(), part.format.encode(), shape, bytes.fromhex(digest))
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def _states(folder: Path) -> tuple[FileState, ...]:
    try:
        return tuple(map(file_state, _files(folder)))
    except OSError as error:
        raise ModelLoadError(f"The weights in {folder} cannot be read: {error}") from error


def _files(folder: Path) -> list[Path]:
    """All files that say what the weights are, links followed."""
    if has_index(folder):
        return [folder / INDEX_FILE, *read_index(folder).files]
    shards = folder / SHARDS_FILE
    files = [file.resolve() for file in checkpoint_files(folder)]
    return [shards, *files] if shards.is_file() else files


def _ranges(folder: Path) -> Iterator[tuple[Path, list[TensorRange]]]:
    """Each file with tensors, links followed, and where they lie in it."""
    for file, tensors in stored_tensors(folder):
        yield file.resolve(), [*map(_range_of, tensors)]


def _range_of(tensor: TensorRange | IndexedTensor) -> TensorRange:
    if isinstance(tensor, TensorRange):
        return tensor
    form = tensor.format
    if tensor.paired_heads:
        form += f", rows paired in {tensor.paired_heads} heads"
    if tensor.offset_by:
        form += f", greater by {tensor.offset_by}"
    end = tensor.offset + tensor.nbytes
    return TensorRange(tensor.name, form, tensor.shape, tensor.offset, end)
