"""Models in another format: weights quantized to one of GGUF's, or dequantized to safetensors."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors import SafetensorError
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]
from tqdm import tqdm

from prefixcache.config.model_config import ModelConfig, read_json_object
from prefixcache.exceptions import FieldError, ModelLoadError
from prefixcache.models.arrays import DTYPES, Array, dense
from prefixcache.models.gguf.header import read_header
from prefixcache.models.gguf.index import (
    INDEX_FILE,
    UNQUANTIZED_TYPES,
    WEIGHTS_FILE,
    IndexedTensor,
    write_index,
    write_json,
)
from prefixcache.models.hub import make_whole, resolve_model
from prefixcache.models.loader import check_weights
from prefixcache.models.quantize import QUANTIZABLE, quantized
from prefixcache.models.quantized import QuantizedTensor, quant_block_size
from prefixcache.models.weights import NamedTensor, read_folder

_SHARD_BYTES = 2 << 30
_FORMATS = {dtype: name for name, dtype in UNQUANTIZED_TYPES.items()}
_OTHER_FILES = ("*.json", "*.jinja", "tokenizer.model")
# Small, and what they choose among is decided by little.
_ROUTERS = (
    ".mlp.gate.weight",
    ".mlp.router.weight",
    ".feed_forward.gate.weight",
    ".router.layer.weight",
    ".router.proj.weight",
    ".shared_expert_gate.weight",
)
_SAFETENSORS_INDEX = "model.safetensors.index.json"


def quantize_folder(source: Path, target: Path, quant_format: str) -> None:
    """Writes the model into the empty folder `target`, its matrices in one of `QUANTIZABLE`.

    Vectors and routers become float32; matrices whose rows are not whole quant blocks stay as they
    are. One tensor is in memory at a time. Raises `ModelLoadError` for weights that are not those
    of the folder's configuration, are quantized already, or do not fit into the format.
    """
    config = ModelConfig.from_hf(source)
    names = check_weights(config, source)
    formats = {named.name: _format_of(named, quant_format) for named in read_folder(source, names)}
    file = target / WEIGHTS_FILE
    with closing(GGUFWriter(file, config.architecture)) as writer:
        for named in read_folder(source, names):
            _announce(writer, named.name, tuple(named.tensor.shape), formats[named.name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for named in _shown(read_folder(source, names), len(formats), f"To {quant_format}"):
            writer.write_tensor_data(_data(named, formats[named.name]))
    write_index(target, _indexed(file), [(file.stat().st_size, None)])
    _copy_others(source, target)


def dequantize_folder(source: Path, target: Path, dtype: str) -> None:
    """Writes the model into the empty folder `target` as safetensors, rounded once to `dtype`.

    `dtype` is bfloat16 or float32. Vectors keep their type. Raises `ModelLoadError` for weights
    that are not those of the folder's configuration.
    """
    names = check_weights(ModelConfig.from_hf(source), source)
    count = sum(1 for _ in read_folder(source, names))
    tensors = _shown(read_folder(source, names), count, f"To {dtype}")
    weight_map = dict[str, str]()
    for number, shard in enumerate(
        _shards((named.name, _dequantized(named, DTYPES[dtype])) for named in tensors)
    ):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": weight_map}
    write_json(target / _SAFETENSORS_INDEX, index)
    _copy_others(source, target)
    said = read_json_object(target / "config.json") | {"dtype": dtype}
    write_json(target / "config.json", said)


def convert_model(
    model: str,
    revision: str | None,
    output: Path | None,
    *,
    quant_format: str | None = None,
    dtype: Literal["bfloat16", "float32"] | None = None,
) -> Path:
    """The folder `output` with the model in another format: one of `QUANTIZABLE`, or unquantized.

    Without `output` it is named after model and form, in the current folder. It is complete or
    absent. Raises `FieldError` when it is there already, and as `resolve_model`,
    `quantize_folder` and `dequantize_folder`; what was begun is then gone.
    """
    source = resolve_model(model, revision)
    form = (quant_format or dtype or "").lower()
    target = output or Path(f"{Path(model).name.removesuffix('.gguf')}-{form}")
    if target.exists() or target.is_symlink():
        raise FieldError("output", f"{target} is there already.")

    def write(new: Path) -> None:
        if quant_format is not None:
            quantize_folder(source, new, quant_format)
        else:
            dequantize_folder(source, new, form)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        make_whole(target, write, f".{target.name}-")
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"Cannot write {target}: {error}") from error
    return target


def _shown(tensors: Iterable[NamedTensor], count: int, what: str) -> Iterator[NamedTensor]:
    """Each of them, with a progress bar on stderr."""
    return iter(tqdm(tensors, what, total=count, leave=False, disable=None))


def _format_of(named: NamedTensor, quant_format: str) -> str:
    """What the tensor becomes."""
    tensor = named.tensor
    if isinstance(tensor, QuantizedTensor):
        raise ModelLoadError(
            f"{named.name} in {named.source} is quantized to {tensor.format} already. Convert the "
            "weights that it was made of."
        )
    if tensor.ndim != 2 or named.name.endswith(_ROUTERS):
        return "F32"
    if tensor.shape[1] % quant_block_size(quant_format)[0] == 0:
        return quant_format
    return _FORMATS.get(tensor.dtype, "F32")


def _announce(writer: GGUFWriter, name: str, shape: tuple[int, ...], tensor_format: str) -> None:
    """Gives the tensor its place in the file's header."""
    kind = GGMLQuantizationType[tensor_format]
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    in_bytes = (*shape[:-1], shape[-1] // numbers * size)
    writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), prod(in_bytes), raw_dtype=kind)


def _data(named: NamedTensor, tensor_format: str) -> np.ndarray:
    """The tensor's bytes in the file."""
    assert isinstance(named.tensor, np.ndarray)
    if tensor_format in QUANTIZABLE:
        return quantized(named.name, named.tensor, tensor_format).blocks
    return dense(named.tensor, UNQUANTIZED_TYPES[tensor_format]).view(np.uint8)


def _indexed(file: Path) -> Iterator[IndexedTensor]:
    for tensor in read_header(file).tensors:
        yield IndexedTensor(
            name=tensor.name, format=tensor.format, shape=tensor.shape, offset=tensor.start
        )


def _dequantized(named: NamedTensor, dtype: np.dtype[Any]) -> Array:
    if isinstance(named.tensor, QuantizedTensor):
        return named.tensor.dequantized(dtype)
    return dense(named.tensor, dtype if named.tensor.ndim == 2 else named.tensor.dtype)


def _shards(tensors: Iterator[tuple[str, Array]]) -> Iterator[dict[str, Array]]:
    """Of bounded size, so that a large model is never in memory as a whole."""
    shard: dict[str, Array] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _copy_others(source: Path, target: Path) -> None:
    """Configuration, tokenizer and chat template."""
    for pattern in _OTHER_FILES:
        for file in source.glob(pattern):
            if file.name not in (_SAFETENSORS_INDEX, INDEX_FILE):
                shutil.copyfile(file, target / file.name)
