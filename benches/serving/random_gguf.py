"""Writes a model of random blocks as a GGUF file: as large as a real one, its text makes no sense.

    python benches/serving/random_gguf.py q4_k_m MODEL.gguf
    python benches/serving/random_gguf.py iq4_xs MODEL.gguf --layers 2
    python benches/serving/random_gguf.py q4_k_m MODEL.gguf --shape Qwen3-30B-A3B --layers 8
    python benches/serving/random_gguf.py mxfp4_moe MODEL.gguf --shape gpt-oss-20b --layers 6

By default it has TinyLlama's shape, 1.1 billion weights; the shapes are those of
`tests/support/public_shapes.py`. What a tensor is quantized to follows llama.cpp's mixes; scales
are such that activations keep their size. llama.cpp reads it too.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType as Type
from rich.progress import track
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.public_shapes import SHAPES, Mix, num_bytes, skeleton, tensors_of
from support.tiny_gguf import add_metadata, architecture_of, random_blocks

_NUMPY = {Type.F32: np.dtype("<f4"), Type.F16: np.dtype("<f2")}
_SAMPLE_BLOCKS = 65_537
"""What is drawn, over and over: a prime, so that no two rows begin alike."""
_MEASURED_BLOCKS = 4096


def write(mix: Mix, target: Path, model: PreTrainedModel) -> None:
    """One tensor in memory at a time."""
    writer = gguf.GGUFWriter(target, architecture_of(model.config))
    writer.add_file_type(mix.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_metadata(writer, model)
    _add_tokenizer(writer, model.config.vocab_size)
    tensors = {name: (shape, kind) for name, shape, kind in tensors_of(model, mix)}
    for name, (shape, kind) in tensors.items():
        size = num_bytes(shape, kind)
        stored = (*shape[:-1], num_bytes(shape[-1:], kind)) if kind not in _NUMPY else shape
        dtype = _NUMPY.get(kind, np.dtype(np.uint8))
        writer.add_tensor_info(name, stored, dtype, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    described = list(writer.tensors[0].items())
    for name, info in track(described, f"Writing {target.name}", transient=True):
        # What the metadata has already is not drawn.
        data = info.tensor if name not in tensors else _data(name, *tensors[name])
        writer.write_tensor_data(data)
    writer.close()


def _data(name: str, shape: tuple[int, ...], kind: Type) -> np.ndarray:
    if kind in _NUMPY:
        return _numbers(name, shape).astype(_NUMPY[kind])
    sample = _sample(kind, shape[-1])
    return np.resize(sample, (num_bytes(shape, kind) // sample.shape[1], sample.shape[1]))


def _numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(0)
    if name.endswith("ssm_a"):
        return -np.exp(random.uniform(-3, 0.5, shape))
    if "norm" in name or "scale" in name:
        return np.ones(shape)
    if name.endswith((".bias", "attn_sinks.weight")):
        return np.zeros(shape)
    return random.standard_normal(shape) * shape[-1] ** -0.5


@cache
def _sample(kind: Type, inputs: int) -> np.ndarray:
    """Blocks [B, bytes of one] of a matrix whose products with unit activations are about 1."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    measured = random_blocks(kind.name, _MEASURED_BLOCKS, numbers, seed=0)
    largest = inputs**-0.5 / float(gguf.dequantize(measured, kind).std())
    blocks = random_blocks(kind.name, _SAMPLE_BLOCKS, numbers, seed=0, largest=largest)
    return blocks.reshape(-1, size)


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """Bytes, with names that no text holds for the rest of the vocabulary."""
    kinds = gguf.TokenType
    tokens = dict.fromkeys(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], kinds.CONTROL)
    tokens |= dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()), kinds.NORMAL)
    tokens |= {"th": kinds.NORMAL, "the": kinds.NORMAL}
    tokens |= {f"<unused{i}>": kinds.UNUSED for i in range(size - len(tokens))}
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)


def main(
    mix: Mix,
    target: Path,
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "TinyLlama-1.1B",
    layers: Annotated[int | None, typer.Option(min=1, help="The first of the shape's.")] = None,
) -> None:
    """Write the file."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"must be one of {', '.join(SHAPES)}", param_hint="--shape")
    write(mix, target, skeleton(shape, layers))


if __name__ == "__main__":
    typer.run(main)
