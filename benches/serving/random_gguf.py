"""Writes a Llama of random blocks as a GGUF file: as large as a real one, its text makes no sense.

    python benches/serving/random_gguf.py q4_k_m MODEL.gguf
    python benches/serving/random_gguf.py q8_0 MODEL.gguf --layers 2
    python benches/serving/random_gguf.py q4_k_m MODEL.gguf --shape llama-7b
    python benches/serving/random_gguf.py q4_k_m MODEL.gguf --shape qwen3-30b-a3b --layers 8

By default it has TinyLlama's shape, 1.1 billion weights. What a tensor is quantized to follows
llama.cpp's mixes; scales are such that activations keep their size. llama.cpp reads it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from rich.progress import track
from tokenizers import pre_tokenizers

_HEADER_DTYPE = np.dtype("<f2")
# Where the float16 scales of a block stand: byte offsets of scale and of minimum.
_SCALES: dict[Type, tuple[int, int | None]] = {
    Type.Q8_0: (0, None),
    Type.Q4_K: (0, 2),
    Type.Q6_K: (208, None),
}
_SAMPLE_BLOCKS = 4096


class Mix(str, Enum):
    """llama.cpp's names of what a file's tensors are quantized to."""

    Q4_K_M = "q4_k_m"
    Q8_0 = "q8_0"

    @property
    def file_type(self) -> gguf.LlamaFileType:
        """What the file says it is."""
        return gguf.LlamaFileType[f"MOSTLY_{self.name}"]

    def of(self, name: str, layer: int, layers: int) -> Type:
        """The type of a matrix."""
        if self is Mix.Q8_0:
            return Type.Q8_0
        is_wide = name.startswith(("attn_v", "ffn_down")) and _gets_more_bits(layer, layers)
        return Type.Q6_K if is_wide or name == "output" else Type.Q4_K


def _gets_more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


@dataclass(frozen=True)
class Shape:
    """A model without tied embeddings: a Llama, or where there are experts a Qwen3-MoE.

    `intermediate` is the size of an expert where there are some.
    """

    hidden: int = 2048
    intermediate: int = 5632
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    vocab: int = 32000
    head_dim: int = 64
    experts: int = 0
    experts_used: int = 0

    @property
    def architecture(self) -> str:
        """GGUF's name."""
        return "qwen3moe" if self.experts else "llama"

    @property
    def norms(self) -> dict[str, int]:
        """GGUF names of a layer's norms, and how wide they are."""
        heads = dict.fromkeys(("attn_q_norm", "attn_k_norm"), self.head_dim)
        return dict.fromkeys(("attn_norm", "ffn_norm"), self.hidden) | (
            heads if self.experts else {}
        )

    def matrices(self) -> Iterator[tuple[str, int, int, int]]:
        """GGUF name, layer, outputs and inputs of each."""
        queries, kv = self.head_dim * self.heads, self.head_dim * self.kv_heads
        kind = "_exps" if self.experts else ""
        count = self.experts or 1
        yield "token_embd", 0, self.vocab, self.hidden
        yield "output", 0, self.vocab, self.hidden
        for layer in range(self.layers):
            yield "attn_q", layer, queries, self.hidden
            yield "attn_k", layer, kv, self.hidden
            yield "attn_v", layer, kv, self.hidden
            yield "attn_output", layer, self.hidden, queries
            yield f"ffn_gate{kind}", layer, count * self.intermediate, self.hidden
            yield f"ffn_up{kind}", layer, count * self.intermediate, self.hidden
            yield f"ffn_down{kind}", layer, count * self.hidden, self.intermediate
            if self.experts:
                yield "ffn_gate_inp", layer, self.experts, self.hidden


class Blocks:
    """Random blocks: every code and small scale, weights of mean 0 and about a wanted spread."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def rows(self, kind: Type, outputs: int, inputs: int) -> NDArray[np.uint8]:
        """Raw rows [outputs, bytes of a row] whose products with unit activations are about 1."""
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = self._draw(outputs * inputs // numbers, size)
        scale, minimum = self._scales(kind, inputs**-0.5)
        _set(blocks, _SCALES[kind][0], scale)
        if (place := _SCALES[kind][1]) is not None:
            _set(blocks, place, minimum)
        return blocks.reshape(outputs, -1)

    def _scales(self, kind: Type, spread: float) -> tuple[float, float]:
        """The block's scale and minimum for weights of mean 0 and that spread."""
        place, minimum_place = _SCALES[kind]
        sample = self._draw(_SAMPLE_BLOCKS, gguf.GGML_QUANT_SIZES[kind][1])
        _set(sample, place, 1.0)
        ratio = 0.0
        if minimum_place is not None:
            _set(sample, minimum_place, 0.0)
            positive = gguf.dequantize(sample, kind).mean()
            _set(sample, place, 0.0)
            _set(sample, minimum_place, 1.0)
            ratio = float(-positive / gguf.dequantize(sample, kind).mean())
            _set(sample, place, 1.0)
            _set(sample, minimum_place, ratio)
        scale = spread / float(gguf.dequantize(sample, kind).std())
        return scale, scale * ratio

    def _draw(self, blocks: int, size: int) -> NDArray[np.uint8]:
        return self._random.integers(0, 256, (blocks, size), np.uint8)


class ShapeName(str, Enum):
    """Models whose shapes files can have."""

    TINYLLAMA = "tinyllama"
    LLAMA_7B = "llama-7b"
    QWEN3_30B_A3B = "qwen3-30b-a3b"


SHAPES = {
    ShapeName.TINYLLAMA: Shape(),
    ShapeName.LLAMA_7B: Shape(
        hidden=4096, intermediate=11008, layers=32, kv_heads=32, head_dim=128
    ),
    ShapeName.QWEN3_30B_A3B: Shape(
        intermediate=768,
        layers=48,
        vocab=151_936,
        head_dim=128,
        experts=128,
        experts_used=8,
    ),
}


def _set(blocks: NDArray[np.uint8], place: int, value: float) -> None:
    blocks[:, place : place + 2] = np.array([value], _HEADER_DTYPE).view(np.uint8)


def write(mix: Mix, target: Path, shape: Shape) -> None:
    """One tensor in memory at a time."""
    writer = gguf.GGUFWriter(target, shape.architecture)
    _add_metadata(writer, mix, shape)
    matrices = [
        (_name(name, layer), mix.of(name, layer, shape.layers), outputs, inputs)
        for name, layer, outputs, inputs in shape.matrices()
    ]
    for name, kind, outputs, inputs in matrices:
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        row = inputs // numbers * size
        rows = (outputs,)
        if "_exps" in name:
            rows = (shape.experts, outputs // shape.experts)
        writer.add_tensor_info(
            name, (*rows, row), np.dtype(np.uint8), outputs * row, raw_dtype=kind
        )
    norms = [
        (f"blk.{i}.{name}.weight", np.ones(width, np.float32))
        for i in range(shape.layers)
        for name, width in shape.norms.items()
    ]
    norms.append(("output_norm.weight", np.ones(shape.hidden, np.float32)))
    for name, ones in norms:
        writer.add_tensor_info(name, ones.shape, ones.dtype, ones.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    blocks = Blocks(seed=0)
    for _, kind, outputs, inputs in track(matrices, f"Writing {target.name}", transient=True):
        writer.write_tensor_data(blocks.rows(kind, outputs, inputs))
    for _, ones in norms:
        writer.write_tensor_data(ones)
    writer.close()


def _name(name: str, layer: int) -> str:
    top = name in ("token_embd", "output")
    return f"{name}.weight" if top else f"blk.{layer}.{name}.weight"


def _add_metadata(writer: gguf.GGUFWriter, mix: Mix, shape: Shape) -> None:
    writer.add_file_type(mix.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(shape.vocab)
    _add_tokenizer(writer, shape.vocab)


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """Bytes, with names that no text holds for the rest of the vocabulary."""
    kinds = gguf.TokenType
    tokens = dict.fromkeys(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], kinds.CONTROL)
    tokens |= dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()), kinds.NORMAL)
    tokens |= {"th": kinds.NORMAL, "the": kinds.NORMAL}
    tokens |= {f"<unused{i}>": kinds.UNUSED for i in range(size - len(tokens))}
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
    shape: Annotated[ShapeName, typer.Option()] = ShapeName.TINYLLAMA,
    layers: Annotated[int | None, typer.Option(min=1, help="other than the shape's")] = None,
) -> None:
    """Write the file."""
    chosen = SHAPES[shape]
    write(mix, target, replace(chosen, layers=layers or chosen.layers))


if __name__ == "__main__":
    typer.run(main)
