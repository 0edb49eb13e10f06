"""`docs/models.md` says what the rows of families and formats say.

Where they change, write it again with
`PREFIXCACHE_WRITE_SNAPSHOTS=1 pytest tests/unit/repository/test_models_page.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from prefixcache.config.families import FAMILIES
from prefixcache.config.family import Family
from prefixcache.config.generation_fields import NOT_OBEYED, OBEYED
from prefixcache.config.model_config import ModelConfig
from prefixcache.kv.cache_settings import fitting_tokens
from prefixcache.kv.specs import STATE_BYTES, KVLayout, kv_layout
from prefixcache.models.gguf.choice import PREFERRED
from prefixcache.models.gguf.header import DENSE_FORMATS
from prefixcache.models.quantized import QUANT_FORMATS, quant_block_size
from support.public_shapes import SHAPES, Mix, num_bytes, skeleton, tensors_of
from support.tiny_models import STATE_SHAPES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/models.md"
WINDOWS = {
    "none": "none",
    "one": "one for all layers",
    "by_layer": "in layers that the file names",
    "switched": "where `use_sliding_window` is on",
    "unrotated": "where `use_sliding_window` is on",
}
NAMES = {
    "Exaone4ForCausalLM": "EXAONE 4",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3",
    "Gemma3ForConditionalGeneration": "Gemma 3, its text part",
    "Gemma4ForCausalLM": "Gemma 4",
    "Gemma4ForConditionalGeneration": "Gemma 4, its text part (26B-A4B too)",
    "Glm4ForCausalLM": "GLM-4",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "Granite 3",
    "GraniteMoeForCausalLM": "Granite 3, mixtures",
    "GraniteMoeSharedForCausalLM": "Granite 3, mixtures with a shared expert",
    "GraniteMoeHybridForCausalLM": "Granite 4",
    "Lfm2ForCausalLM": "LFM2, LFM2.5",
    "Lfm2MoeForCausalLM": "LFM2, mixtures",
    "LlamaForCausalLM": "Llama, SmolLM2, TinyLlama",
    "ArceeForCausalLM": "Arcee",
    "Ernie4_5ForCausalLM": "ERNIE 4.5",
    "HeliumForCausalLM": "Helium",
    "SeedOssForCausalLM": "Seed-OSS",
    "SmolLM3ForCausalLM": "SmolLM3",
    "MistralForCausalLM": "Mistral",
    "Mistral3ForConditionalGeneration": "Mistral 3, its text part",
    "Ministral3ForCausalLM": "Ministral 3",
    "NemotronHForCausalLM": "Nemotron-H",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoeForCausalLM": "OLMoE",
    "Phi3ForCausalLM": "Phi-3, Phi-4-mini",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen2MoeForCausalLM": "Qwen2, mixtures",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3, mixtures",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "Qwen3_5ForCausalLM": "Qwen3.5",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5, its text part",
    "Qwen3_5MoeForCausalLM": "Qwen3.5, mixtures",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5, mixtures, their text part",
}
"""What people call the models of an architecture."""
MACHINES = (8, 16, 32, 64)
"""Gigabytes of memory."""
LEFT = 2
"""Gigabytes of them for the system and the program."""
CHUNK = 512
"""Tokens of a step."""


def has_experts(family: Family) -> str:
    if "num_local_experts" in family.refused:
        return "refused"
    return "yes" if "num_experts_per_tok" in family.defaults else "no"


def named(names: Iterable[str]) -> str:
    return ", ".join(f"`{one}`" for one in names)


def rows(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table_of_families() -> Iterator[str]:
    yield rows("Models", "Architecture", "GGUF", "Windows", "Experts", "Ropes", "Refused")
    yield rows(*["---"] * 7)
    for name, family in FAMILIES.items():
        ropes = ", ".join(family.rope_kinds)
        yield rows(
            NAMES[name],
            f"`{name}`",
            f"`{family.gguf.architecture}`" if family.gguf else "none",
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


def table_of_machines() -> Iterator[str]:
    machines = [f"{size} GB" for size in MACHINES]
    yield rows("Model", "Format", "Weights", "KV of a token", "Snapshot", *machines)
    yield rows(*["---"] * (5 + len(MACHINES)))
    for name, shape in SHAPES.items():
        config, model = ModelConfig.from_hf(shape), skeleton(name)
        block_size = 64 if config.delta else 16
        layout = kv_layout(config, block_size, itemsize=2)
        states = sum(part.numbers for part in layout.states) * STATE_BYTES
        for mix in (Mix.MXFP4_MOE,) if config.sinks else (Mix.Q4_K_M, Mix.Q8_0):
            weights = sum(num_bytes(size, kind) for _, size, kind in tensors_of(model, mix))
            yield rows(
                name,
                mix.name,
                f"{weights / 1e9:.1f} GB",
                f"{kv_bytes_of_a_token(layout, block_size) / 1024:,.0f} KiB",
                f"{states / 1e6:.1f} MB" if states else "none",
                *(context_in(size, weights, config, layout, block_size) for size in MACHINES),
            )


def kv_bytes_of_a_token(layout: KVLayout, block_size: int) -> float:
    """What one more token of a long sequence takes."""
    pages = [sum(layout.most_pages(tokens, 1, block_size)) for tokens in (1 << 18, 1 << 19)]
    return (pages[1] - pages[0]) * layout.bytes_per_block(block_size, 2) / (1 << 18)


def context_in(
    gigabytes: int, weights: int, config: ModelConfig, layout: KVLayout, block_size: int
) -> str:
    """The tokens of the longest sequence next to the weights."""
    memory = (gigabytes - LEFT) * 10**9 - weights
    blocks = memory // layout.bytes_per_block(block_size, 2)
    if blocks < 2:
        return "-"
    most = config.max_context_length
    tokens = fitting_tokens(blocks, block_size, layout.kinds, chunk=CHUNK, most=most)
    return "-" if tokens < CHUNK else f"{tokens:,}"


def table_of_gemma4() -> Iterator[str]:
    names = ("Model", "Groups", "Bytes of a block", "Not used", "KV of 8192 tokens")
    yield rows(*names, "Of that not used")
    yield rows(*["---"] * 6)
    for name, shape in SHAPES.items():
        if not name.startswith("Gemma 4"):
            continue
        layout = kv_layout(ModelConfig.from_hf(shape))
        block = layout.bytes_per_block(16, 2)
        pages = layout.most_pages(8192, 1, 16)
        used = [len(group.layers) * group.part_numbers * 2 for group in layout.groups]
        held = sum(pages) * block
        lost = held - sum(count * size for count, size in zip(pages, used, strict=True))
        yield rows(
            name.removeprefix("Gemma 4 "),
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
    qwen = {name: SHAPES[name] for name in ("Qwen3.5-0.8B", "Qwen3.5-4B", "Qwen3.5-27B")}
    for name, shape in (qwen | STATE_SHAPES).items():
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
        f"Written by `{Path(__file__).relative_to(ROOT)}` from the rows of families and formats.",
        "",
        "## Families",
        "",
        *table_of_families(),
        "",
        "The CPU kernels and torch's run all of them; an attention that cannot compute a model",
        "refuses it by name. On a GPU dense models with heads of 64, 128 and 256 have run.",
        "",
        "## Formats of GGUF files",
        "",
        f"Unquantized tensors are {named(DENSE_FORMATS)}. A file may mix all formats.",
        "Others (`IQ1`, `IQ2`, `IQ3`, ternary) are refused from the header.",
        "Answers end at the tokens that the file names, and at those that llama.cpp finds by their",
        "text. A file without `tokenizer.ggml.pre` runs with a warning.",
        "",
        *table_of_formats(),
        "",
        f"Of a repository with several files the first of these is taken: {named(PREFERRED)}.",
        "",
        "## Fields of generation_config.json",
        "",
        f"Obeyed: {named(sorted(OBEYED))}. Suppressed tokens are never sampled, whatever a request",
        "asks for. Not obeyed, and named by a warning at the start where set to change answers:",
        f"{named(sorted(NOT_OBEYED))}. Others have no effect.",
        "As in vLLM answers also end at the tokenizer's `eos_token`.",
        "",
        "## What a machine holds",
        "",
        "Tokens of the longest sequence that fits next to the weights, up to the model's context;",
        f"{LEFT} GB are left for the system and the program, and keys and values are bfloat16.",
        "Sequences share this memory. Layers with windows and states take no more for a longer",
        "sequence; a conversation that hits keeps its keys and values and one or two snapshots.",
        "",
        *table_of_machines(),
        "",
        "With its published weights only the default model, SmolLM2-135M, has run. The others were",
        "compared with transformers as small random models, and some of these shapes measured with",
        "random weights.",
        "",
        "## Blocks of Gemma 4",
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


@pytest.mark.slow
def test_the_page_says_what_the_rows_do() -> None:
    if os.environ.get("PREFIXCACHE_WRITE_SNAPSHOTS"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()
