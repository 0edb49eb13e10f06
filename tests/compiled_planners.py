"""Plans of ours through FlashInfer's compiled planners, which compute on the CPU.

    LD_PRELOAD=STAND_IN python tests/compiled_planners.py KERNELS SEED

KERNELS holds <uri>/<uri>.so of heads of 128; STAND_IN is built of compiled_planners.c. Prints how
many plans there were, and what is wrong with each that is.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi

from fakes.native_flashinfer import replace_native_modules
from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention
from reference.paged_attention import SlowSequence, batch_of

PAGE = 16
HEADS = ((28, 4), (16, 8), (32, 8), (64, 8), (8, 1), (40, 8), (48, 1), (96, 1), (12, 12))
SIZES = (1, 2, 8, 24, 64, 128, 256, 1024)
# Keys of a captured decode at most, in one plan of a size after the other.
MOST_KEYS = (40, 1000, 9000)
MOST_PAGES = 1024 * 9001 // PAGE
# How the modules of heads of 128 in bfloat16 end; FlashInfer's names tell all they are made for.
_PLAIN = "head_dim_qk_128_head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False"
ENDINGS = {
    "plain": _PLAIN,
    "fa2": f"{_PLAIN}_f16qk_False",
    "fa3": f"{_PLAIN}_f16qk_False_sm90",
}
# Of what FA2's planner returns (PrefillPlanInfo of scheduler.cuh): tiles launched, where the owners
# of tiles begin and the mask of those that are used, whether keys are split.
LAUNCHED, OWNERS, MASK, SPLITS = 0, 4, 12, 14
TILE_ROWS, REQUESTS, QUERY_TILES, KEY_TILES = 3, 4, 5, 6
# Of FA3's (PrefillPlanSM90Info): where the number of tiles before each multiprocessor's begins, and
# where tables of all tiles do.
WORK = 6
QUERY_TILE, QUERY_COUNT, KEY_COUNT, HEAD, SEQUENCE = 0, 3, 4, 5, 7
MULTIPROCESSORS = 132


class Planned:
    """A compiled module whose plans are kept; what it would compute is never asked for."""

    ragged_run = paged_run = run = None

    def __init__(self, kind: str, module: Any, kept: list[tuple[str, list[int], Any]]) -> None:
        self._kind, self._module, self._kept = kind, module, kept

    def plan(self, *arguments: Any) -> Any:
        info = self._module.plan(*arguments)
        self._kept.append((self._kind, [int(entry) for entry in info], arguments[1]))
        return info


def libraries(folder: Path) -> dict[str, Path]:
    """The compiled modules by kind, as far as they are there."""
    found = {}
    for kind, ending in ENDINGS.items():
        for library in folder.glob(f"*_dtype_q_bf16_*{ending}/*.so"):
            found[kind] = library
    return found


class Check:
    """Plans of one layout of heads, with and without batch invariance."""

    def __init__(
        self, heads: tuple[int, int], invariant: bool, kernels: Any, *, hopper: bool = True
    ) -> None:
        self._heads, self._invariant = heads, invariant
        spec = AttentionSpec(
            num_heads=heads[0], num_kv_heads=heads[1], head_dim=128, scale=128**-0.5
        )
        self._attention = FlashInferAttention(
            spec,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            kernels=kernels,
            batch_invariant=invariant,
            hopper=hopper,
        )
        self._attention.bind([torch.zeros(2, 2, PAGE, heads[1], 128, dtype=torch.bfloat16)])

    def graphs(self, kept: list[Any], rng: random.Random) -> Iterator[str | None]:
        """What is wrong with each plan of a captured size; None for nothing."""
        self._attention.reserve_graphs(SIZES, MOST_PAGES)
        for size in SIZES:
            first = None
            for most in MOST_KEYS:
                count = rng.randint(max(1, size // 2), size)
                lengths = [(rng.randint(0, most), 1) for _ in range(count)]
                batch = batch_of(sequences(lengths), PAGE)
                kept.clear()
                self._attention.plan_graph(batch, size)
                ((kind, info, tables),) = kept
                launched = list(self._attention.planner._graphs[size]._wrapper._plan_info)
                first = first or launched
                changed = launched != first
                wrong = "the plan of a graph changed" if changed else None
                if kind == "fa2":
                    wrong = wrong or self._wrong_fa2(size, info, launched, tables)
                if kind == "fa3":
                    wrong = wrong or self._wrong_fa3(size, info, tables)
                yield wrong and f"{self._heads} {self._invariant} {size} of {count}: {wrong}"

    def steps(self, rng: random.Random) -> Iterator[None]:
        """Plans of mixed steps, which raise where FlashInfer refuses them."""
        for _ in range(3):
            decodes = [(rng.randint(0, 3000), 1) for _ in range(rng.randint(0, 64))]
            chunks = [
                (rng.randint(0, 3000), rng.choice([1, 2, 17, 300, 2048]))
                for _ in range(rng.randint(1, 20))
            ]
            self._attention.plan(batch_of(sequences(decodes, chunks), PAGE))
            yield None

    def companions(self, kept: list[Any], rng: random.Random) -> Iterator[str | None]:
        """How each sequence's tiles differ between a step of its own and one with others."""
        for _ in range(3):
            decodes = [(rng.randint(0, 3000), 1) for _ in range(rng.randint(1, 40))]
            chunks = [
                (rng.randint(0, 3000), rng.choice([2, 17, 130, 300, 2048]))
                for _ in range(rng.randint(1, 12))
            ]
            together = self._tiles(kept, decodes, chunks)
            alone = [self._tiles(kept, [decode], [])[0] for decode in decodes]
            alone += [self._tiles(kept, [], [chunk])[0] for chunk in chunks]
            pairs = zip(decodes + chunks, together, alone, strict=True)
            for lengths, others, own in pairs:
                differs = f"{self._heads} {lengths}: {own} alone, {others} with others"
                yield None if others == own else differs

    def _tiles(
        self, kept: list[Any], decodes: list[tuple[int, int]], chunks: list[tuple[int, int]]
    ) -> list[Any]:
        """The tiles of each sequence in a step of all of them."""
        kept.clear()
        self._attention.plan(batch_of(sequences(decodes, chunks), PAGE))
        counts = [len(decodes), len(chunks)] if len(kept) == 2 else [len(decodes) + len(chunks)]
        counts = [count for count in counts if count]
        made = []
        for count, (kind, info, tables) in zip(counts, kept, strict=True):
            tiles_of = fa3_tiles if kind == "fa3" else fa2_tiles
            made += [(kind, tiles_of(info, tables, number)) for number in range(count)]
        return made

    def _wrong_fa2(
        self, size: int, info: list[int], launched: list[int], tables: torch.Tensor
    ) -> str | None:
        """Each tile that is launched has an owner that was written, and each row a tile."""
        count = launched[LAUNCHED]
        owners = tables[info[OWNERS] :][: 4 * count].view(torch.int32)
        if launched[SPLITS]:
            owners = owners[tables[info[MASK] :][:count].bool()]
        return None if set(owners.tolist()) == set(range(size)) else f"tiles of {owners.tolist()}"

    def _wrong_fa3(self, size: int, info: list[int], tables: torch.Tensor) -> str | None:
        """There are as many tiles of 128 rows as all heads need."""
        num_heads, kv_heads = self._heads
        work = int(tables[info[WORK] :][: 133 * 4].view(torch.int32)[-1])
        wanted = size * kv_heads * -(-num_heads // kv_heads // 128)
        return None if work == wanted else f"{work} tiles instead of {wanted}"


def fa3_tiles(info: list[int], tables: torch.Tensor, sequence: int) -> list[tuple[int, ...]]:
    """Of a sequence: (tile of queries, queries, keys, head). A tile reads all of its keys."""
    work = tables[info[WORK] :][: 4 * (MULTIPROCESSORS + 1)].view(torch.int32)
    columns = [
        tables[info[column] :][: 4 * int(work[-1])].view(torch.int32).tolist()
        for column in (QUERY_TILE, QUERY_COUNT, KEY_COUNT, HEAD, SEQUENCE)
    ]
    return sorted(tile[:-1] for tile in zip(*columns, strict=True) if tile[-1] == sequence)


def fa2_tiles(info: list[int], tables: torch.Tensor, sequence: int) -> list[tuple[int, ...]]:
    """Of a sequence: (rows of a tile, whether keys are split, tile of queries, tile of keys)."""
    columns = [
        tables[info[column] :][: 4 * info[LAUNCHED]].view(torch.int32).tolist()
        for column in (QUERY_TILES, KEY_TILES, REQUESTS)
    ]
    return sorted(
        (info[TILE_ROWS], info[SPLITS], query_tile, key_tile)
        for query_tile, key_tile, owner in zip(*columns, strict=True)
        if owner == sequence
    )


def sequences(*lengths: Sequence[tuple[int, int]]) -> list[SlowSequence]:
    """Of (tokens before the step, tokens in it), each in pages of its own; decodes come first."""
    made: list[SlowSequence] = []
    page = 1
    for position, part in enumerate(lengths):
        for before, count in part:
            pages = -(-(before + count) // PAGE)
            own = tuple(range(page, page + pages))
            made.append(SlowSequence(before, count, own, position == 0))
            page += pages
    return made


def main() -> None:
    """Exit status 1 where a plan is wrong."""
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    modules = {kind: tvm_ffi.load_module(str(path)) for kind, path in libraries(folder).items()}
    kept: list[Any] = []
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        kernels = replace_native_modules(patch, lambda kind, *_: Planned(kind, modules[kind], kept))
        reported: list[str | None] = []
        for heads, invariant in itertools.product(HEADS, (False, True)):
            check = Check(heads, invariant, kernels)
            reported += [*check.graphs(kept, rng), *check.steps(rng)]
            reported += check.companions(kept, rng) if invariant else ()
        # FA2 takes the rows of a tile from the mean of the step: the comparison must see it.
        planted = Check((28, 4), True, kernels, hopper=False)
        if not any(planted.companions(kept, rng)):
            reported.append("FA2's tiles, which depend on others, were not noticed")
    wrong = [line for line in reported if line]
    print(f"{len(reported)} plans, {len(wrong)} wrong", *wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
