"""How many blocks fit, and errors with the numbers when they do not."""

from __future__ import annotations

import dataclasses
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import FieldError, OutOfMemoryError
from prefixcache.kv.kv_folder import FileLayout, KeptFile, open_kept_file
from prefixcache.kv.specs import KVGroup, KVLayout, kv_layout
from prefixcache.runner.cpu import file_memory, kv_memory
from prefixcache.runner.cpu.kv_memory import KVMemory
from prefixcache.runner.sizing import (
    MemorySize,
    available_memory,
    choose_num_blocks,
    host_memory,
)

LAYOUT = KVLayout((KVGroup((0, 1, 2)),), num_kv_heads=2, head_dim=16)
BLOCK_BYTES = 3 * 2 * 16 * 2 * 16 * 4


PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def page_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of pages: small ones unless a test says otherwise."""
    chosen = [PAGE]
    monkeypatch.setattr(kv_memory, "host_page_bytes", lambda *_: chosen[0])
    return chosen


def kv_of(
    num_blocks: int,
    *,
    max_blocks: int = 0,
    free: int = 1 << 40,
    layout: KVLayout = LAYOUT,
    file: KeptFile | None = None,
) -> KVMemory:
    return KVMemory(
        layout=layout,
        num_blocks=num_blocks,
        block_size=16,
        itemsize=4,
        free_memory=lambda: free,
        max_blocks=max_blocks,
        file=file,
    )


def rows_of(memory: KVMemory) -> list[npt.NDArray[np.float32]]:
    """The numbers of each block, tensor by tensor."""
    return [rows.view(np.float32) for rows in memory.rows()]


def allocated(num_blocks: int) -> list[npt.NDArray[np.float32]]:
    memory = kv_of(num_blocks)
    memory.allocate()
    return rows_of(memory)


def choose(cache: CacheConfig, free: int = 1 << 40) -> int:
    memory = dataclasses.replace(host_memory(), free=free)
    return choose_num_blocks(cache, LAYOUT, 4, memory)


def test_one_tensor_a_layer() -> None:
    tensors = allocated(5)
    assert [tensor.shape for tensor in tensors] == [(5, 2 * 16 * 2 * 16)] * 3
    assert sum(tensor.nbytes for tensor in tensors) == 5 * BLOCK_BYTES


def test_memory_is_reserved_and_not_touched() -> None:
    before = _resident_bytes()
    tensors = allocated(20_000)
    assert sum(tensor.nbytes for tensor in tensors) > 200 << 20
    assert _resident_bytes() - before < 50 << 20
    assert not tensors[0][-1].any()
    tensors[0][-1] = 1.0
    assert tensors[0][-1].all()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_more_than_the_free_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemoryError, match=r"1024 blocks.* 12 MiB, but only 4 MiB"):
        kv_of(1024, free=4 << 20).allocate()


def test_more_addresses_than_there_are_is_an_error_of_memory() -> None:
    with pytest.raises(OutOfMemoryError, match="Cannot allocate"):
        kv_of(10, max_blocks=1 << 52).allocate()


def test_asked_sizes_are_taken_at_their_word() -> None:
    assert choose(CacheConfig(num_blocks=77)) == 77
    assert choose(CacheConfig(kv_cache_memory=10 * BLOCK_BYTES + 1)) == 10


def test_without_a_size_half_of_the_free_memory_but_not_more_than_4_gib() -> None:
    assert choose(CacheConfig(), free=1 << 30) == (1 << 29) // BLOCK_BYTES
    assert choose(CacheConfig(), free=1 << 40) == (4 << 30) // BLOCK_BYTES


def test_a_share_is_one_of_what_is_free() -> None:
    cache = CacheConfig(kv_cache_memory=0.25)
    assert choose(cache, free=100 << 30) == (25 << 30) // BLOCK_BYTES
    gpu = MemorySize(40 << 30, 80 << 30)
    assert choose_num_blocks(cache, LAYOUT, 4, gpu) == (10 << 30) // BLOCK_BYTES
    assert choose_num_blocks(CacheConfig(), LAYOUT, 4, gpu) == (20 << 30) // BLOCK_BYTES


@pytest.mark.parametrize(
    ("limit", "usage", "free"), [("900", "400", 500), ("max", "400", 7000), ("900", "950", 0)]
)
def test_free_memory_is_the_systems_within_the_containers_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, usage: str, free: int
) -> None:
    files = tmp_path / "memory.max", tmp_path / "memory.current"
    for file, text in zip(files, (limit, usage), strict=True):
        file.write_text(text)
    missing = (str(tmp_path / "no"), str(tmp_path / "nothing"))
    monkeypatch.setattr("prefixcache.runner.sizing._CGROUP_FILES", (files, missing))
    monkeypatch.setattr("prefixcache.runner.sizing.machine_memory", lambda: (9000, 7000))
    assert available_memory() == free


def test_a_memory_limit_below_two_blocks_is_refused() -> None:
    with pytest.raises(FieldError, match=f"2 blocks of {BLOCK_BYTES} bytes"):
        choose(CacheConfig(kv_cache_memory=2 * BLOCK_BYTES - 1))


def test_free_memory_is_that_of_the_machine_or_less() -> None:
    assert 0 < available_memory() < 1 << 50


def test_a_model_of_full_attention_is_one_group() -> None:
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    assert kv_layout(model) == LAYOUT
    assert LAYOUT.bytes_per_block(16, 4) == BLOCK_BYTES


def test_given_up_memory_goes_back_to_the_system() -> None:
    memory = kv_of(6000, max_blocks=6000)
    before = _resident_bytes()
    for num_blocks in (6000, 100):
        memory.num_blocks = 6000
        memory.allocate()
        addresses = memory.addresses
        for kv in rows_of(memory):
            kv[:] = 1.0
        assert _resident_bytes() - before > 60 << 20
        memory.num_blocks = num_blocks  # A shrink that has not given anything back.
        memory.give_up()
        assert _resident_bytes() - before < 10 << 20
    memory.allocate()
    assert memory.addresses == addresses, "nothing is bound again"
    assert not rows_of(memory)[0].any()


def used_by_programs() -> int:
    """Bytes of all the system's programs; a shared mapping counts as long as it has content."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return (sizes["AnonPages"] + sizes["Shmem"]) << 10


def test_what_is_given_back_is_free_for_others_and_reads_as_zeros() -> None:
    """RSS alone would fall for a shared mapping too, which keeps its content and its memory."""
    blocks = 40_000
    memory = kv_of(blocks)
    memory.allocate()
    for kv in rows_of(memory):
        kv[:] = 1.0
    assert memory.num_mapped_bytes() >= memory.num_bytes
    used = used_by_programs()
    given = memory.give_back(100, blocks)
    assert used - used_by_programs() > given // 2
    assert given == pytest.approx(memory.num_bytes, rel=0.02)
    assert memory.num_mapped_bytes() <= memory.num_bytes - given + 3 * PAGE
    for kv in rows_of(memory):
        assert kv[:100].all()
        assert not kv[100:blocks:97].any()


@pytest.mark.parametrize("pages", [1, 16])
def test_memory_goes_back_in_granules_without_held_blocks_and_never_the_first(pages, page_bytes):
    """A block has 4 KiB in each tensor: one page, or a sixteenth of one."""
    page_bytes[0] = pages * PAGE
    memory = kv_of(200)
    memory.allocate()
    granule = memory.granule_blocks
    assert granule == pages
    (kv, *_) = rows_of(memory)
    kv[:] = 1.0
    memory.give_back(1, 200, held=[70, 71, 190])
    kept = {0, 70 // granule, 71 // granule, 190 // granule}
    for block in range(200):
        assert bool(kv[block].any()) == (block // granule in kept)


def test_a_block_that_fills_no_page_alone_goes_back_with_its_neighbours() -> None:
    layout = KVLayout((KVGroup((0,)),), num_kv_heads=1, head_dim=12)  # 1,536 bytes a block
    memory = kv_of(64, layout=layout)
    memory.allocate()
    assert memory.granule_blocks == 8
    (kv,) = rows_of(memory)
    kv[:] = 1.0
    memory.give_back(9, 64)
    assert kv[:16].all()
    assert not kv[16:].any()


@pytest.mark.parametrize("order", ["up", "down", "both", "scattered"])
def test_blocks_are_copied_in_every_tensor(order: str) -> None:
    memory = kv_of(100)
    memory.allocate()
    for number, kv in enumerate(rows_of(memory)):
        kv[:] = np.arange(kv.size).reshape(kv.shape) + number
    before = [kv.copy() for kv in rows_of(memory)]
    sources = np.arange(60, 96, dtype=np.int32)
    targets = np.arange(3, 39, dtype=np.int32)
    if order == "scattered":
        targets = np.random.default_rng(1).permutation(targets)
    elif order == "both":
        targets = np.array([*range(3, 12), *range(20, 11, -1), *range(21, 38), 38], dtype=np.int32)
    elif order == "down":
        targets = targets[::-1].copy()
    memory.copy_blocks(sources, targets)
    for was, kv in zip(before, rows_of(memory), strict=True):
        was[targets] = was[sources]
        assert np.array_equal(kv, was)


def test_growing_beyond_the_free_memory_changes_nothing() -> None:
    memory = kv_of(10, max_blocks=1000, free=1 << 20)
    memory.allocate()
    with pytest.raises(OutOfMemoryError, match=r"1000 blocks"):
        memory.grow(1000)
    assert memory.num_blocks == 10
    memory.grow(50)
    assert memory.num_blocks == 50
    assert memory.num_reserved_bytes == 1000 * BLOCK_BYTES


def test_holes_of_a_file_are_filled_before_a_step_writes_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "_FILL_BYTES", 64 * PAGE)
    block_bytes = BLOCK_BYTES // LAYOUT.num_tensors
    on_disk = FileLayout(
        facts={}, num_tensors=LAYOUT.num_tensors, block_bytes=block_bytes, max_blocks=256
    )
    file = open_kept_file(tmp_path, on_disk, 256, None)
    assert file is not None
    memory = kv_of(256, file=file)
    memory.allocate()
    part = 64 * PAGE // block_bytes

    def is_data(block: int) -> list[bool]:
        starts = [file.core.tensor_at(t) + block * block_bytes for t in range(LAYOUT.num_tensors)]
        return [file_memory._first_data(file.descriptor, at) == at for at in starts]

    assert all(is_data(part - 1))
    assert not any(is_data(part))
    memory.before_writes(np.array([part, 3 * part - 1]))
    assert all(is_data(3 * part - 1))
    assert not any(is_data(3 * part))
    for tensor in rows_of(memory):
        tensor[3 * part] = 7.0
    memory.before_writes(np.array([3 * part]))
    assert all(tensor[3 * part].all() for tensor in rows_of(memory))  # Was no hole any more.
    memory.give_back(2 * part, 3 * part)
    assert not any(is_data(2 * part))
    memory.before_writes(np.array([2 * part]))
    assert all(is_data(3 * part - 1))
    memory.give_back(2 * part, 3 * part)
    memory.before_load([2 * part + 1])
    memory.before_writes(np.array([2 * part]))
    assert not any(is_data(3 * part - 1)), "zeros could fall on what is loaded there"
    end = 2 * part + 3
    memory.num_blocks = end
    memory.give_back(end, 256, held=[3 * part, 4 * part - 1])
    memory.before_writes(np.array([2 * part, 3 * part, 4 * part - 1]))
    assert not any(is_data(3 * part + 1)), "requests hold blocks there, and nobody needs the rest"
    assert not any(is_data(2 * part)), "what is below the end may be loaded"
    memory.num_blocks = 256
    for held in ([], [3 * part + 1]):
        memory.give_back(3 * part, 4 * part, held)
    memory.before_writes(np.array([3 * part]))
    assert not any(is_data(3 * part)), "what requests hold may be loaded"
