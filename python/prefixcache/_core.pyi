"""The Rust core: block pool, prefix index, block tables."""

from collections.abc import Sequence as _Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

type Tokens = ...  # placeholder: see contract (numpy int32/int64/uint32, array.array, list[int])

@final
class BlockHashes:
    """Chained hashes of a token sequence's full blocks."""
    def __len__(self) -> int: ...
    def to_bytes(self, index: int) -> bytes: ...

@final
class Sequence:
    """A request's tokens, block hashes and block tables. Made by `PrefixCache.new_sequence`."""
    @property
    def num_tokens(self) -> int: ...          # tokens known (prompt + generated)
    @property
    def num_slots(self) -> int: ...           # tokens that have a KV slot (hits + allocated)
    @property
    def num_filled(self) -> int: ...          # tokens whose KV is there (mark_blocks_filled)
    def extend(self, tokens: Tokens) -> None: ...
    def block_table(self, group: int = 0) -> list[int]: ...
    def block_hashes(self, start: int = 0, stop: int | None = None) -> list[bytes]: ...

@final
class PrefixCache:
    def __init__(
        self,
        num_blocks: int,              # block 0 is the null block and is never handed out (as in vLLM)
        block_size: int = 16,
        *,
        model: str = "",
        revision: str = "",
        kv_dtype: str = "",
        num_groups: int = 1,
        free_order: Literal["unhashed_first", "append"] = "unhashed_first",
        threads: Literal["single_writer", "shared"] = "single_writer",   # 2nd form only
        max_blocks: int | None = None,   # the most resize() may ever reach
    ) -> None: ...
    # hashing (any thread)
    def compute_block_hashes(self, tokens: Tokens, *, cache_salt: str | None = None, lora: str | None = None, extras: _Sequence[bytes] | None = None) -> BlockHashes: ...
    def new_sequence(self, tokens: Tokens, *, cache_salt: str | None = None, lora: str | None = None, extras: _Sequence[bytes] | None = None) -> Sequence: ...
    # reading (any thread, wait-free)
    def probe(self, hashes: BlockHashes) -> int: ...                 # leading TOKENS that hit (full blocks)
    def count_prefix_hits(self, sequence: Sequence) -> int: ...      # the same for a sequence; only reads
    # writing (the scheduler)
    def commit_prefix_plan(self, sequence: Sequence, hit_tokens: int, num_tokens: int) -> int | None: ...
        # takes the first `hit_tokens` (a block multiple, 0 allowed) as hits and allocates slots for
        # `num_tokens` more, all or nothing. Returns the hit tokens really taken (fewer only when another
        # thread evicted some meanwhile), or None when blocks are lacking (nothing changed).
    def append_slots(self, sequences: list[Sequence], counts: list[int]) -> int: ...
        # in order; returns how many leading sequences got all their slots (stops at the first that could not;
        # that one is unchanged)
    def append_tokens(self, sequences: list[Sequence], tokens: Tokens) -> None: ...   # one sampled token each
    def mark_blocks_filled(self, sequences: list[Sequence], upto: list[int]) -> list[tuple[int, int, int, int]]: ...
        # publishes full blocks below `upto` tokens; idempotent; returns twins (sequence index, group, block index, block that already holds it)
    def replace_block(self, sequence: Sequence, group: int, index: int, block: int) -> None: ...
    def release(self, sequences: list[Sequence]) -> None: ...        # tail first; the sequence can be committed again
    def clear_cache_index(self) -> None: ...                         # O(1); live sequences keep blocks, publish nothing more
    def new_weight_version(self) -> int: ...                         # clear_cache_index + next version into the root hash
    @property
    def weight_version(self) -> int: ...
    def pin(self, sequence: Sequence, num_tokens: int) -> int: ...
    def unpin(self, sequence: Sequence) -> int: ...
    def demote(self, count: int) -> int: ...
    def resize(self, num_blocks: int) -> int: ...                    # blocks still busy above the new size
    def fill_block_tables(
        self,
        sequences: list[Sequence],
        starts: list[int],
        counts: list[int],
        group: int,
        indptr: npt.NDArray[np.int32],        # S+1
        indices: npt.NDArray[np.int32],       # at least sum(pages)
        last_page_len: npt.NDArray[np.int32], # S
        slot_mapping: npt.NDArray[np.int64],  # T
    ) -> int: ...
        # for each sequence the pages that cover positions [0, start+count), and block*B+offset for each
        # computed token; returns the number of indices written
    # looking
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...          # usable ones: without the null block
    @property
    def num_free_blocks(self) -> int: ...
    def free_order(self) -> list[int]: ...    # debugging: next to be handed out first
    def cached_blocks(self) -> list[int]: ... # debugging: ids that hold a hash
    def stats(self) -> dict[str, int]: ...    # queries, hits (tokens), evictions, ... lifetime; blocks by state
    def validate(self) -> None: ...           # raises RuntimeError naming the broken invariant
    def adopt_writer(self) -> None: ...       # single_writer: this thread is the writer from now on
