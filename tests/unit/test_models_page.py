"""`docs/models.md` says what the rows of families and formats say.

Where they change, write it again with
`PREFIXCACHE_WRITE_SNAPSHOTS=1 pytest tests/unit/test_models_page.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prefixcache.config.hf_config import FAMILIES, Family
from prefixcache.config.model_config import ModelConfig
from prefixcache.kv.specs import STATE_BYTES, kv_layout
from prefixcache.models.gguf.choice import PREFERRED
from prefixcache.models.gguf.folder import ARCHITECTURES
from prefixcache.models.gguf.header import DENSE_FORMATS
from prefixcache.models.quantized import QUANT_FORMATS, quant_block_size
from tiny_models import GEMMA4_SHAPES, STATE_SHAPES

PAGE = Path(__file__).parents[2] / "docs/models.md"
WINDOWS = {
    "none": "none",
    "one": "one for all layers",
    "by_layer": "in layers that the file names",
    "switched": "where `use_sliding_window` is on",
    "unrotated": "where `use_sliding_window` is on",
}
# Layers, heads of keys and values, and their size, as published files have them.
SHAPES = {
    "SmolLM2-135M": (30, 3, 64),
    "Llama-3.2-1B": (16, 8, 64),
    "Qwen3-0.6B": (28, 8, 128),
    "Qwen3-8B": (36, 8, 128),
    "Phi-4-mini": (32, 8, 128),
    "gpt-oss-20b": (24, 8, 64),
    "Qwen3-30B-A3B": (48, 4, 128),
}


def has_experts(family: Family) -> str:
    if {"num_local_experts", "enable_moe_block"} & {*family.refused}:
        return "refused"
    return "yes" if "num_experts_per_tok" in family.defaults else "no"


def named(names: Iterable[str]) -> str:
    return ", ".join(f"`{one}`" for one in names)


def rows(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table_of_families() -> Iterator[str]:
    yield rows("Architecture", "GGUF", "Windows", "Experts", "Ropes", "Refused")
    yield rows(*["---"] * 6)
    for name, family in FAMILIES.items():
        of = {"Olmo3ForCausalLM": "Olmo2ForCausalLM"}.get(name, name)
        files = [one for one, architecture in ARCHITECTURES.items() if architecture == of]
        ropes = ", ".join(family.rope_kinds)
        yield rows(
            f"`{name}`",
            named(files) or "none",
            seen_by(family),
            has_experts(family),
            f"{ropes}; in part" if family.rotates_partly else ropes,
            named(family.refused) or "nothing",
        )


def seen_by(family: Family) -> str:
    convolutions = "short convolutions" if family.convolves else None
    return family.recurs or convolutions or WINDOWS[family.windows]


def table_of_formats() -> Iterator[str]:
    yield rows("Format", "Numbers a block", "Bits a number")
    yield rows(*["---"] * 3)
    for name in QUANT_FORMATS:
        numbers, size = quant_block_size(name)
        yield rows(f"`{name}`", str(numbers), f"{8 * size / numbers:g}")


def table_of_shapes() -> Iterator[str]:
    yield rows("Model", "KV of a token, bfloat16", "KV of 8192 tokens")
    yield rows(*["---"] * 3)
    for name, (layers, heads, size) in SHAPES.items():
        num_bytes = 2 * layers * heads * size * 2
        mebibytes = f"{num_bytes * 8192 / 2**20:,.0f} MiB"
        yield rows(name, f"{num_bytes / 1024:,.1f} KiB", mebibytes)


def table_of_gemma4() -> Iterator[str]:
    names = ("Model", "Groups", "Bytes of a block", "Not used", "KV of 8192 tokens")
    yield rows(*names, "Of that not used")
    yield rows(*["---"] * 6)
    for name, shape in GEMMA4_SHAPES.items():
        layout = kv_layout(ModelConfig.from_hf(shape))
        block = layout.bytes_per_block(16, 2)
        pages = layout.most_pages(8192, 1, 16)
        used = [len(group.layers) * group.part_numbers * 2 for group in layout.groups]
        held = sum(pages) * block
        lost = held - sum(count * size for count, size in zip(pages, used, strict=True))
        yield rows(
            name,
            str(len(layout.groups)),
            f"{block:,}",
            f"{layout.unused_share:.1%}",
            f"{held / 2**20:,.0f} MiB",
            f"{lost / held:.1%}",
        )


def table_of_states() -> Iterator[str]:
    names = ("Model", "Snapshot", "KV of a token", "Tokens whose KV take as much")
    yield rows(*names, "Blocks of a snapshot", "Of them empty")
    yield rows(*["---"] * 6)
    for name, shape in STATE_SHAPES.items():
        layout = kv_layout(ModelConfig.from_hf(shape), 64, itemsize=2)
        snapshot = sum(part.numbers for part in layout.states) * STATE_BYTES
        block, blocks = layout.bytes_per_block(64, 2), len(layout.groups) - 1
        yield rows(
            name,
            f"{snapshot / 1e6:.1f} MB",
            f"{block / 64 / 1024:.0f} KiB",
            f"{snapshot * 64 / block:,.0f}",
            str(blocks),
            f"{1 - snapshot / (blocks * block):.1%}",
        )


def page() -> str:
    lines = [
        "# Models",
        "",
        "Written by `tests/unit/test_models_page.py` from the rows of families and formats.",
        "",
        "## Families",
        "",
        *table_of_families(),
        "",
        "The CPU kernels and torch's run all of them; an attention that cannot compute a model",
        "refuses it by name. CUDA compiles and has not run on a GPU.",
        "",
        "## Formats of GGUF files",
        "",
        f"Unquantized tensors are {named(DENSE_FORMATS)}. A file may mix all formats.",
        "Others (`IQ1`, `IQ2`, `IQ3`, ternary) are refused from the header.",
        "",
        *table_of_formats(),
        "",
        f"Of a repository with several files the first of these is taken: {named(PREFERRED)}.",
        "",
        "## Memory of keys and values",
        "",
        "Layers with windows keep less where a sequence is longer than the window.",
        "",
        *table_of_shapes(),
        "",
        "Layers of Gemma 4 without a window have heads of 512 numbers, others of 256. A block of",
        "16 tokens is cut into the parts of a group's layers, so that any block serves any group.",
        "Layers that read the keys and values of another take nothing.",
        "",
        *table_of_gemma4(),
        "",
        "## Memory of states",
        "",
        "A snapshot has the states of all layers, in float32. It takes blocks of several groups,",
        "here of 64 tokens in bfloat16. [How to size the cache](explanation/windows.md#states).",
        "",
        *table_of_states(),
    ]
    return "\n".join(lines) + "\n"


def test_the_page_says_what_the_rows_do() -> None:
    if os.environ.get("PREFIXCACHE_WRITE_SNAPSHOTS"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()
