"""The Rust core: block pool, prefix index, block tables, and the CPU's kernels.

A number that is negative or out of its range raises ValueError; misuse (a released sequence, the
sequence of another cache, a sequence that two calls use at once, a closed cache) and a resize that
another thread prevents RuntimeError; a wrong type TypeError; what there is no memory for
MemoryError. Each names the argument. A call that raises has changed nothing unless it says so, and
none ends the process.

Arguments are read, by whatever code of the caller that runs, before anything is changed. An array
that a call reads or writes must not be resized by another thread meanwhile, as with numpy.
"""

from array import array
from collections.abc import Iterable as _Iterable
from collections.abc import Sequence as _Sequence
from os import PathLike as _PathLike
from typing import Any, Literal, Protocol, TypeAlias, final, type_check_only

import numpy as np
import numpy.typing as npt

__all__ = [
    "AttentionMixer",
    "BlockHashes",
    "BlockPool",
    "BlockPseudonyms",
    "BlockStaging",
    "Cpu",
    "DecoderLayer",
    "DecoderStack",
    "DeltaMixer",
    "DenseAndExperts",
    "DenseFeedForward",
    "DraftIndex",
    "DraftStream",
    "EventSnapshot",
    "ExpertsFeedForward",
    "KVFile",
    "LaidOutFile",
    "OwnInput",
    "PackedLinear",
    "PagedAttention",
    "PrefixCache",
    "ReplicaChooser",
    "ReplicaIndex",
    "RowOps",
    "Sampler",
    "SamplerRow",
    "Sequence",
    "ShortConvMixer",
    "StopStream",
    "StopStrings",
    "TraceReader",
    "TraceReplay",
    "derive_digest",
    "describe_kv_file",
    "hash_file_ranges",
    "parse_json",
    "replay_recording",
]

@type_check_only
class _SupportsArray(Protocol):
    """What numpy can view as an array: a torch tensor on the CPU, for one."""

    def __array__(self) -> Any: ...

_Gate: TypeAlias = Literal["silu", "gelu_tanh", "clamped_swiglu", "squared_relu"]

# Token ids from 0 to 2**32 - 1 in one dimension. An array costs no Python object for each token.
_Tokens: TypeAlias = (
    npt.NDArray[np.int32]
    | npt.NDArray[np.int64]
    | npt.NDArray[np.uint32]
    | array[int]
    | _Sequence[int]
    | _SupportsArray
)
_GroupKind: TypeAlias = Literal["full", "state"] | tuple[Literal["sliding_window"], int]
_FreeOrder: TypeAlias = Literal["unhashed_first", "append"]
_EvictionPolicy: TypeAlias = Literal["lru", "reuse-queue"]
# Who may change a cache or pool: one thread at a time, which is cheaper, or any. The first one to
# change a single-writer one is its writer; another gets RuntimeError until it calls `adopt_writer`.
_Threads: TypeAlias = Literal["single_writer", "shared"]
_Logprobs: TypeAlias = tuple[int, float, int, tuple[int, ...], tuple[float, ...]]
# Kind, group, hash of the block before the first (None at a prompt's beginning), hashes and tokens.
# A hash is its last 8 bytes, big endian. "removed" has no tokens, "cleared" neither.
_Event: TypeAlias = tuple[
    Literal["stored", "removed", "cleared"], int, int | None, list[int], list[int]
]

@final
class BlockHashes:
    """Hashes of a token sequence's full blocks."""

    @staticmethod
    def compute(
        tokens: _Tokens, block_hash: bytes, block_size: int, *, cache_salt: str | None = None
    ) -> BlockHashes:
        """Those that a cache has whose `root_hash()` is `block_hash`. Any thread."""
    @staticmethod
    def from_state(state: bytes) -> BlockHashes:
        """What `state` gave in another process; ValueError for anything else."""
    def state(self) -> bytes:
        """All of it as bytes. Not for hashes with extras."""
    def short(self) -> npt.NDArray[np.uint64]:
        """The hashes as KV events name them: the last 8 bytes of each, big endian."""
    def __len__(self) -> int: ...
    def to_bytes(self, index: int) -> bytes:
        """The 32 bytes of a block's hash; IndexError past the last."""

@final
class SamplerRow:
    """The options of one row of logits.

    Tokens in it must be of the vocabulary of the logits that it is sampled with.
    """

    def __new__(
        cls,
        temperature: float,
        seed: int,
        position: int,
        *,
        min_p: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        bias_tokens: _Iterable[int] = (),
        bias: _Iterable[float] = (),
        banned: _Iterable[int] = (),
        allowed: _Iterable[int] | None = None,
        bad_words: _Iterable[int] = (),
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        prompt: npt.NDArray[np.int32] | None = None,
        answer: npt.NDArray[np.int32] | None = None,
        mask: npt.NDArray[np.int32] | None = None,
        logprobs: int | None = None,
    ) -> SamplerRow:
        """Copies what it is given. Temperature 0 takes the likeliest token.

        The noise of a draw is made from `seed` and `position`, both below 2**64. `top_k` 0, `min_p`
        0 and `top_p` 1 keep all tokens. `bias` has a number for each of `bias_tokens`, each of them
        once. `bad_words` are tokens that would end one. The penalties are on tokens of `prompt` and
        `answer`. In `mask` bit i of word w is set where token 32 * w + i may be chosen. `logprobs`
        is a number of likeliest tokens.
        """

@final
class Sampler:
    """Chooses next tokens from float32 logits [R, V], contiguous, of at most 2**19 tokens.

    What a row gives depends on that row alone: the same bits in any batch, at any number of
    threads, with any instructions. A log probability and its rank come as (token, log probability,
    rank, likeliest tokens, their log probabilities), of the logits as they are given.
    """

    def __new__(cls, cpu: Cpu) -> Sampler: ...
    def likeliest(self, logits: npt.NDArray[np.float32]) -> list[int | None]:
        """The likeliest token of each row, the first of equals; None without a finite maximum."""
    def sample(
        self, logits: npt.NDArray[np.float32], rows: _Iterable[SamplerRow]
    ) -> list[tuple[int | None, _Logprobs | None]]:
        """The token of each row, None without a finite maximum, and its log probabilities.

        These come where the row asks for them. ValueError where the rows do not fit the logits.
        """
    def logprobs(
        self, logits: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int32], count: int
    ) -> list[_Logprobs]:
        """Log probabilities of one token a row, and of the `count` likeliest ones.

        They are NaN, and there are no likeliest ones, where the logits have no finite maximum.
        """

@final
class Sequence:
    """A request's tokens, block hashes and block tables. Made by `PrefixCache.new_sequence`.

    Release it when the request is done. One that is collected before gives its blocks back then,
    or, in a thread that may not write to the cache, with the writer's next call.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and what was generated."""
    @property
    def num_slots(self) -> int:
        """Tokens that have a KV slot: hits and allocated ones; 0 while nothing is held."""
    @property
    def num_ready_slots(self) -> int:
        """Tokens that have a KV slot in every group; 0 while nothing is held."""
    @property
    def num_filled(self) -> int:
        """Tokens whose KV is there; 0 while nothing is held."""
    @property
    def is_committed(self) -> bool:
        """Whether the sequence holds blocks: from a commit until its release."""
    def extend(self, tokens: _Tokens) -> None:
        """Add tokens, and hash the blocks that they fill."""
    def set_retention(
        self,
        interval: int | None,
        *,
        pin: bool = False,
        min_pin_blocks: int = 0,
        pin_prefix: bool = True,
    ) -> None:
        """Say which of the blocks that `drop_unneeded` drops keep their content.

        `interval` None, the default: all. Otherwise those that a request needs which stands at an
        anchor, and one block below them; every multiple of `interval` tokens is an anchor too, if
        it is not 0. With `pin` anchors are pinned, but for those fewer than `min_pin_blocks` past
        the last pinned one; with `pin_prefix` so is, by `pin_anchors`, all before them in groups
        that need it.
        """
    @property
    def weight_version(self) -> int:
        """The version of the weights that its hashes stand for."""
    def at_version(self, version: int) -> Sequence | None:
        """The same tokens under the weights of another version, with which the new sequence stays.

        None for a version that has not been, or whose content was forgotten; once it is, calls that
        count, commit or pin the new sequence raise RuntimeError. It holds nothing.
        """
    def add_anchor(self, position: int) -> None:
        """Make `position` (tokens) an anchor: its last full block is where requests can stand."""
    def add_prompt_end(self, position: int) -> None:
        """Make `position` (tokens) an anchor, since the prompt ends there."""
    def set_hints(
        self, owner: str, hints: _Sequence[tuple[int, int | None, int, float | None]]
    ) -> None:
        """Say how dear ranges of the tokens are, in the place of what was said before.

        Each is (start, end, priority, ttl): tokens from `start` to `end`, None: to the end of the
        sequence, what is generated included; a priority from 0 to 100, whose bands from 35 to 49,
        the default, from 50, 60, 70, 80 and 90 are evicted one after the other, and those below 15
        and below 35 first of all; seconds from the last use on, after which the priority is the
        default again, None: for ever. At most 32 ranges, which do not overlap.

        They act at each release, on what was published then, and a hit by whomever makes the TTL
        begin again. A block is at least as dear as what follows it: what lies before a range above
        the default is raised with it, and what follows a lowered one is lowered. What lies before
        the end of a range above the default is not forgotten behind a window.

        Of the cache's blocks `owner` may raise `retention_budget`; beyond it loses what was used
        longest ago, and of one sequence the end. No allocation is ever refused for a hint. Lowered
        content is made default by the first hit. RuntimeError for a cache with threads="shared".
        """
    def block_table(self, group: int = 0) -> list[int]:
        """The blocks of a group by position, 0 where it needs none; empty while nothing is held."""
    def block_hashes(self, start: int = 0, stop: int | None = None) -> list[bytes]:
        """The hashes of full blocks `start` to `stop`, 32 bytes each."""

@final
class PrefixCache:
    """A prefix cache: a pool of KV cache blocks, found again by the tokens that filled them."""

    def __new__(
        cls,
        num_blocks: int,
        block_size: int = 16,
        *,
        model: str = "",
        revision: str = "",
        weights: str | None = None,
        kv_dtype: str = "",
        arithmetic: str = "",
        num_groups: int | None = None,
        groups: _Sequence[_GroupKind] | None = None,
        free_order: _FreeOrder = "unhashed_first",
        eviction_policy: _EvictionPolicy = "lru",
        threads: _Threads = "single_writer",
        max_blocks: int | None = None,
        retention_budget: float = 0.2,
        max_cached_blocks: int | None = None,
    ) -> PrefixCache:
        """A cache of `num_blocks` blocks of `block_size` tokens (a power of two from 1 to 256).

        Block 0, the null block, counts among them and is never handed out, as in vLLM. `model`,
        `revision`, `kv_dtype` (the type of the KV's numbers) and `arithmetic` (what the model
        computes with) enter every hash, and so does what the weights are called: `weights`, a kind,
        a colon and a name as in "tag:step-1200", or how often they were changed. `max_blocks` is
        the most that `resize` may reach, and `max_cached_blocks` bounds what is cached and free
        (`set_max_cached_blocks`). Warns (UserWarning) without a `model`. `groups` names the kind of
        each group of layers, one of full attention by default, as `num_groups` counts them where
        all are. A window is at least 1 token. `eviction_policy` says which free block goes first:
        the one unused for longest, or the one that promises the fewest hits. `retention_budget`,
        from 0 to 1, is the share of the present blocks that each owner of hints may raise
        (`Sequence.set_hints`).
        """
    def root_hash(self, *, cache_salt: str | None = None, lora: str | None = None) -> bytes:
        """The 32 bytes before the first block's hash under the current weights. Any thread.

        With them the hashes of any prompt can be computed (docs/reference/hashing.md).
        """
    def compute_block_hashes(
        self,
        tokens: _Tokens,
        *,
        cache_salt: str | None = None,
        lora: str | None = None,
        extras: _Sequence[bytes] | None = None,
    ) -> BlockHashes:
        """The hashes of the full blocks of `tokens`. Any thread."""
    def new_sequence(
        self,
        tokens: _Tokens,
        *,
        cache_salt: str | None = None,
        lora: str | None = None,
        extras: _Sequence[bytes] | None = None,
        hashes: BlockHashes | None = None,
    ) -> Sequence:
        """A sequence that holds nothing yet, its full blocks hashed. Any thread.

        `hashes` of these very tokens and salt are taken instead of hashing, unless they were made
        under other weights or there are extras.

        Sequences share blocks only where `cache_salt` and `lora` are equal; None and "" differ.
        `extras` are bytes that a block's KV depends on besides its tokens, one entry for each block
        from the first on, empty where there is none.
        """
    def probe(self, hashes: BlockHashes, max_tokens: int | None = None) -> int:
        """How many leading tokens hit, in full blocks. Any thread; changes nothing.

        The longest length up to `max_tokens` of which every group has the blocks that it needs: all
        under full attention, those of the window before its end otherwise. A shorter length need
        not hit, so a caller who will use fewer tokens says so here.
        """
    def count_prefix_hits(self, sequence: Sequence, max_tokens: int | None = None) -> int:
        """`probe` for a sequence."""
    def count_whole_hits(self, sequence: Sequence, max_tokens: int | None = None) -> int:
        """How many leading tokens hit in all groups of full attention, whatever the others have.

        In full blocks, up to `max_tokens`; 0 where no group has full attention. What this is above
        `count_prefix_hits` is lost for want of a window's blocks. Changes nothing.
        """
    def count_tiered_hits(
        self, sequence: Sequence, staging: BlockStaging, max_tokens: int | None = None
    ) -> tuple[int, int]:
        """`count_prefix_hits` where blocks that the tier behind `staging` holds count too.

        And how many of these blocks the hit needs. Any thread; changes nothing.
        """
    def commit_prefix_plan(
        self, sequence: Sequence, hit_tokens: int, num_tokens: int, chunk: int | None = None
    ) -> int | None:
        """Take the first `hit_tokens` as hits and slots for `num_tokens` more, all or none.

        `hit_tokens` is a multiple of the block size, 0 included. Returns the hit tokens really
        taken: the longest length up to `hit_tokens` that hits; None when blocks are lacking, and
        then nothing has changed. With `chunk`, groups that have a window get slots for that many
        of the new tokens alone, and for the next ones by `ensure_slots`.
        """
    def commit_missing(
        self, sequence: Sequence, hit_tokens: int, num_tokens: int, chunk: int
    ) -> tuple[list[int], list[bytes], list[int]] | None:
        """`commit_prefix_plan` of a hit of which blocks come from a slower tier.

        What the hit needs and the pool does not have gets new blocks. Returns these, their keys and
        their places in the block tables, in the order of the places. The caller fills them, and
        publishes them by `mark_blocks_filled` as far as all are filled. None when blocks are
        lacking, and then nothing has changed.
        """
    def append_slots(self, sequences: _Sequence[Sequence], counts: _Sequence[int]) -> int:
        """Give each sequence `counts[i]` (at least 1) more slots, in order.

        Returns how many leading sequences got all of theirs; it stops at the first that could not,
        which is unchanged as all after it.
        """
    def ensure_slots(self, sequences: _Sequence[Sequence], upto: _Sequence[int]) -> int:
        """Give each sequence slots in every group for its first `upto[i]` tokens, in order.

        Returns how many leading sequences have theirs, as `append_slots` does. Of a state a
        sequence gets the block of the last token alone, where a step has to end.
        """
    def keep_snapshots(self, sequences: _Sequence[Sequence], starts: _Sequence[int]) -> int:
        """Give blocks to the snapshots of states that are worth keeping; how many got theirs.

        That is what `set_retention` says, in the places from token `starts[i]` on: before the step
        that computes it, once slots for the step are there. While few blocks are free none is
        given, and no snapshot kept.
        """
    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at once, in all groups.

        That is where `chunk` tokens are computed at a time, those of steps planned ahead counted,
        and `drop_unneeded` is called before slots for the next are taken.
        """
    def append_tokens(self, sequences: _Sequence[Sequence], tokens: _Tokens) -> None:
        """Add one token to each sequence."""
    def mark_blocks_filled(
        self, sequences: _Sequence[Sequence], upto: _Sequence[int]
    ) -> list[tuple[int, int, int, int]]:
        """Say that the KV of the first `upto[i]` tokens is there; publish their full blocks.

        Marking again, or less, changes nothing. Returns the duplicates among the published:
        (sequence, group, index in the block table, the block that already holds the content). A
        sequence committed before the last clear publishes nothing.
        """
    def drop_unneeded(self, sequences: _Sequence[Sequence], upto: _Sequence[int]) -> int:
        """Drop the blocks that no token from `upto[i]` on needs; how many.

        The tokens before are computed, in no in-flight step, and their full blocks published. The
        null block stands where one was dropped. `set_retention` says which keep their content;
        what others hold keeps it in any case, and so does what was a hit.
        """
    def pin_anchors(self, sequences: _Sequence[Sequence]) -> int:
        """Pin what the sequences' anchors need, as their retention says; how many pins are new.

        The end of what was published is an anchor. For requests that ended well, before `release`.
        """
    def replace_block(self, sequence: Sequence, group: int, index: int) -> None:
        """Swap a published block for the one that hits for its content, and give the own one up.

        It loses its content unless others hold it, so that no copy pushes out other content. The
        sequence keeps its block where that one hits by now, or none does.
        """
    def release(self, sequences: _Sequence[Sequence]) -> None:
        """Give all blocks of each sequence back, the tail first: it is evicted before the head.

        A released sequence can be committed again.
        """
    def name_blocks(self, key: bytes) -> None:
        """Let the eviction policy go by names in place of hashes, in sequences made from now on.

        They are the `BlockPseudonyms` of this `key` of 32 bytes, so that a recording of them
        can be replayed under `eviction_policy="reuse-queue"`. Once in a cache's life, ValueError
        after that.
        """
    def clear_cache_index(self) -> None:
        """Forget everything cached, in constant time; sequences keep blocks and publish no more."""
    def new_weight_version(self, weights: str | None = None, *, keep: bool = False) -> int:
        """Forget everything cached, and hash under other weights from now on; their version.

        Every hash calls them `weights`, or by the version's digits. A name may come back: what was
        cached under it before does not, and sequences that hold blocks publish no more.

        With `keep` nothing is forgotten, unless the name comes back: what older weights computed is
        found by sequences of their version (`Sequence.at_version`), and sequences that hold blocks
        publish on in the chain of theirs. Nothing is kept in a file from then on.
        """
    def end_hints(self, owner: str, sequence: Sequence, first: int) -> int:
        """End what `owner`'s hints asked for the sequence's full blocks from number `first` on.

        Whoever released them. Returns how many moved to another priority. Counts take longer until
        the cache is cleared where the owner has raised more behind them.
        """
    @property
    def weight_version(self) -> int:
        """Counts the changes of the weights; 0 at first."""
    @property
    def weights_name(self) -> str:
        """What every hash calls the weights of now. Any thread."""
    def pin(self, sequence: Sequence, num_tokens: int) -> int:
        """Pin the blocks that the longest hit within `num_tokens` tokens needs: evicted last.

        Returns how many pins are new. The sequence need not hold anything.
        """
    def unpin(self, sequence: Sequence) -> int:
        """Take the pins off the sequence's cached blocks. Returns how many were pinned."""
    def demote(self, count: int) -> int:
        """Take the pins off the oldest `count` free pinned blocks; how many there were.

        Each moves to the end of the line of its priority, which is the default one without a hint.
        """
    def demote_expired(self, max_blocks: int = 256) -> int:
        """Give content whose TTL has ended the priority that it has without, `max_blocks` at most.

        Those that ended first, in bounded time: call it once a step. Returns how many blocks moved.
        """
    def set_time(self, seconds: float) -> None:
        """Set the time that TTLs and the eviction policy go by, and end the use of the clock.

        With times that are given, the same calls have the same outcome.
        """
    def resize(self, num_blocks: int) -> int:
        """Set the number of blocks, the null block counted; how many above it are still held.

        Those are retired when they are released. Blocks that come back are handed out first. What
        is cached above is lost, wherever it stands in the order: `begin_moves` keeps what is worth
        most.
        """
    def begin_moves(
        self, num_blocks: int, max_moves: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Begin one slice of a shrink to `num_blocks` that keeps what is worth most.

        Returns (from, to): up to `max_moves` cached blocks from `num_blocks` on that go after
        others below, the last of all first, each with the block below that goes first, which is
        held and loses its content. The caller copies the KV of each `from` to its `to` and calls
        `finish_moves`, or `abort_moves` where it could not; until then the content is found where
        it was. From the first slice on no block from `num_blocks` on is handed out, and none of
        them counts as free; those with content can be hit. Other calls may come between slices.

        When both arrays are empty, what remains above is held, or goes before all that stays:
        `resize` ends the shrink. `resize` to the present size, or any other, takes it back.
        RuntimeError while moves are in flight, or another thread is inside a call.
        """
    def finish_moves(self) -> int:
        """End the slice whose KV was copied: content is found in `to`, at its place in the order.

        Returns how many moved: a block that was taken since, or lost its content, stays as it is.
        """
    def abort_moves(self) -> None:
        """Take the slice back: content stays where it is, and what `to` had is lost."""
    def release_cached(self, count: int) -> int:
        """Give up the content of the `count` free blocks that would lose it first; how many."""
    def set_max_cached_blocks(self, max_cached_blocks: int | None) -> None:
        """Bound the free blocks that keep their content; what is above goes in the eviction order.

        At once, and whenever blocks are released. 0: nothing outlives its last holder; None: no
        bound.
        """
    def fill_block_tables(
        self,
        sequences: _Sequence[Sequence],
        starts: _Sequence[int],
        counts: _Sequence[int],
        group: int,
        indptr: npt.NDArray[np.int32],
        indices: npt.NDArray[np.int32],
        last_page_len: npt.NDArray[np.int32],
        slot_mapping: npt.NDArray[np.int64],
        first_pages: npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Write the block tables of a batch of S sequences and T computed tokens.

        For each sequence: the pages up to position `starts[i] + counts[i]`, of a group with a
        window those alone that the tokens from `starts[i]` on need (`indptr` [S + 1], `indices`
        [pages], `last_page_len` [S]: tokens on the last page; `first_pages` [S]: how many are left
        out before the first), and block * block_size + offset for each of the `counts[i]` computed
        tokens (`slot_mapping` [T]).
        The arrays may be longer. Returns the number of pages written.
        """
    @property
    def block_size(self) -> int:
        """Tokens in a block."""
    @property
    def num_blocks(self) -> int:
        """Blocks, block 0, the null block, counted: it is never handed out."""
    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds.

        Those of collected sequences count at once for the writer's thread, for others from the
        writer's next call on.
        """
    def free_order(self) -> list[int]:
        """The free blocks, the one to be handed out next first. For debugging."""
    def cached_blocks(self) -> list[int]:
        """The blocks that hold a hash, lowest id first. For debugging."""
    def stats(self) -> dict[str, int]:
        """Lifetime counts, and blocks by state.

        Lifetime, in tokens: queries and hits. Lifetime, in blocks: allocations, touches (blocks
        taken as hits), evictions, pins, demotions (those of `demote`), and pinned_hits and
        pinned_evictions, which are the touches and evictions of pinned blocks. Now: cached_blocks,
        blocks_in_use, free_blocks, pinned_blocks (all that carry a pin, held or free),
        pinned_free_blocks, and held_above_blocks, those in use that a shrink waits for. Lifetime,
        of shrinks: moved_blocks, and lost_to_resize_blocks, which are evictions too. A pin from
        before the index was cleared counts until its block is handed out or loses its content, and
        is no eviction. Of hints: hinted_blocks, raised or lowered now (what a sequence that
        grows evicts is counted until the next commit or release); hints_demoted, those that lost
        their priority over a budget, and hints_expired, those whose TTL ended.
        """
    def block_map(
        self, cells: int, age_bounds: _Sequence[float] = ()
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Where in the pool blocks are free, cached, pinned or held, and when they were used last.

        The pool's blocks, but the null block, stand in `cells` cells (at most 65536, and as many as
        there are blocks): with n blocks, block b is in cell (b - 1) * cells // n. Returns two
        arrays with a row for each cell: blocks free, cached, pinned and held; and blocks with
        content by the seconds since their last use, up to each of `age_bounds`, which rise (at most
        64), then above the last. The second is 0 unless somebody listens. From any thread, also
        during calls that change the cache, none of which waits.
        """
    def listen(self, capacity: int, gap_bounds: _Sequence[float] = ()) -> None:
        """Keep a log of content that is lost from now on, of up to `capacity` blocks.

        `capacity` is rounded up to a power of two. The gaps between uses of content are counted by
        `gap_bounds`, in seconds that rise. Once in a cache's life, RuntimeError after that. From
        any thread, as `take_evictions`, `missed_evictions` and `reuse_gaps`.
        """
    def take_evictions(self, max_evictions: int) -> dict[str, npt.NDArray[Any]]:
        """Take up to `max_evictions` evictions out of the log, the oldest first.

        An eviction is one row in each of the arrays, all of length n: hash (n x 32 uint8), group
        (uint16), cause (uint8: 0 the index was cleared, one row for everything; 1 evicted;
        2 discarded by its last holder; 3 dropped at its release for want of a place in line;
        4 the pool shrank; 5 more was cached than `max_cached_blocks`), band (uint8, of its
        priority: the lowest goes first, 2 without one), hits (uint32), age since the content was
        registered and idle time since its last holder gave it up (float64, seconds; nothing before
        `listen` counts), is_last (bool, whether no other block has the content any more). Blocks
        that a clear left behind are reported by its row alone.
        """
    @property
    def missed_evictions(self) -> int:
        """How many evictions the log had no room for."""
    def take_losses(self, max_losses: int) -> dict[str, npt.NDArray[Any]]:
        """`take_evictions`, by its first name."""
    @property
    def missed_losses(self) -> int:
        """`missed_evictions`, by its first name."""
    def reuse_gaps(self) -> tuple[list[int], float]:
        """How many gaps between uses lie up to each bound, above the last, and their sum (s).

        Each hit of content ends a gap, which began when a holder hit it or gave it up.
        """
    def keep_in(self, file: KVFile, staging: BlockStaging | None = None) -> tuple[int, int]:
        """Restore what `file` has kept, and keep there what is published from now on.

        With `staging` also do what `stage_evicted` does. Of another process' blocks it gives those
        alone that are as that process wrote them, whether or not they were compared before.

        Once, before the cache's first use: RuntimeError otherwise. ValueError where several threads
        may write. The pool's KV lies in the file. Returns how many blocks were restored, and how
        many of the file's were not. While the weights are not named by their content nothing is
        kept.
        """
    def reads_first(self, sequence: Sequence, hit_tokens: int, most: int) -> bool:
        """Whether a hit needs more than `most` blocks of a file that were not compared yet.

        They are compared with their checksums on another thread then, `KVFile.num_asked` of them
        still; otherwise the commit reads them. False without a file.
        """
    def stage_evicted(self, staging: BlockStaging) -> None:
        """Copy what is evicted from now on into `staging`, if it is worth it.

        Once, before the cache's first use, and not with `keep_in`: RuntimeError otherwise.
        ValueError where several threads may write. While the weights are not named by their content
        nothing is copied.
        """
    def keep_events(self) -> None:
        """Keep a record, from now on, of what can be found and cannot any more.

        Of blocks under no salt and no LoRA alone. Before anything is cached, and once in a cache's
        life: RuntimeError otherwise. ValueError where several threads may write.
        """
    def take_events(self, max_blocks: int) -> list[_Event]:
        """Take the oldest changes, about `max_blocks` blocks of them.

        Blocks of a "stored" event are each the one after the block before it. Where much was not
        taken for long, "cleared" comes and then all that can be found. From any thread. Also empty
        while another call receives changes; RuntimeError before `keep_events`.
        """
    def snapshot_events(self) -> EventSnapshot | None:
        """What all changes taken have led to; None while there are others to take, or received.

        From any thread; copies as much as is cached. RuntimeError before `keep_events`.
        """
    def validate(self, sequences: _Sequence[Sequence] | None = None) -> None:
        """Check every invariant of the cache, at rest; RuntimeError names the broken one.

        With `sequences`, all that hold blocks, also that each block counts its holders and no more.
        """
    def adopt_writer(self) -> None:
        """Make the calling thread the one that may write; nothing changes for a shared cache."""
    def close(self) -> None:
        """End the cache: every later call raises RuntimeError."""

@final
class EventSnapshot:
    """What could be found in a cache at one moment."""

    @property
    def num_blocks(self) -> int:
        """All its blocks, each counted once a group."""
    def take(self, max_blocks: int) -> list[_Event]:
        """The next "stored" events, up to about `max_blocks` blocks; empty at the end.

        A block comes behind its parent where that could be found too.
        """

@final
class BlockPool:
    """A pool of blocks that are handed out, counted, given back, and found again by their hashes.

    The pool alone, for a caller that keeps its own hashes (32 bytes each) and block tables.
    """

    def __new__(
        cls,
        num_blocks: int,
        *,
        free_order: _FreeOrder = "unhashed_first",
        threads: _Threads = "single_writer",
        max_blocks: int | None = None,
    ) -> BlockPool:
        """A pool of `num_blocks` blocks, block 0, the null block, counted."""
    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks from the front of the free order, all or none; None if lacking."""
    def commit(
        self, hashes: _Sequence[bytes], num_new: int = 0, group: int = 0
    ) -> tuple[int, list[int]] | None:
        """Take the blocks of the leading `hashes` that hit, then `num_new` new ones, all or none.

        Returns how many hits there are and all blocks, hits first; None when blocks are lacking.
        """
    def lookup(self, block_hash: bytes, group: int = 0) -> int | None:
        """The block that hits for `block_hash`, or None."""
    def register(
        self, blocks: _Sequence[int], hashes: _Sequence[bytes], epoch: int, group: int = 0
    ) -> list[int | None]:
        """Let held blocks be found under `hashes`, one for each.

        `epoch` is the value of `epoch` from before the blocks were allocated: nothing is registered
        if the index was cleared since. Returns, for each block, the block that already holds the
        same content and hits, or None. At a block that cannot be registered it raises; those before
        it are registered.
        """
    def release(self, blocks: _Sequence[int]) -> None:
        """Give up one hold of each block; those without a holder become free, in this order.

        At a block that cannot be released it raises: those before it are released, the rest is not.
        """
    @property
    def epoch(self) -> int:
        """Counts the clears of the index."""
    def clear_index(self) -> None:
        """Forget every hash, in constant time."""
    def pin(self, blocks: _Sequence[int]) -> int:
        """Pin held blocks that have a hash; they are evicted last. How many were not pinned."""
    def unpin(self, blocks: _Sequence[int]) -> int:
        """Take the pins off held blocks. How many were pinned."""
    def demote(self, count: int) -> int:
        """Move the oldest `count` free pinned blocks to the regular tier; how many there were."""
    def resize(self, num_blocks: int) -> int:
        """Set the number of blocks, the null block counted; how many above it are still held."""
    @property
    def num_blocks(self) -> int:
        """Blocks, block 0, the null block, counted: it is never handed out."""
    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
    def free_order(self) -> list[int]:
        """The free blocks, the one to be handed out next first. For debugging."""
    def cached_blocks(self) -> list[int]:
        """The blocks that hold a hash, lowest id first. For debugging."""
    def stats(self) -> dict[str, int]:
        """Lifetime counts, and blocks by state, as those of `PrefixCache` without its tokens."""
    def validate(self) -> None:
        """Check every invariant of the pool, at rest; RuntimeError names the broken one."""
    def adopt_writer(self) -> None:
        """Make the calling thread the one that may write; nothing changes for a shared pool."""

_KernelDType: TypeAlias = Literal["bfloat16", "float32"]
_BlockFormat: TypeAlias = Literal[
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q2_K",
    "Q3_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]

# The kernels take tensors as addresses (`Tensor.data_ptr()`): the caller vouches for their type,
# their size, and that they outlive the call. Strides count numbers, and numbers of a row are
# adjacent; "dense" means that rows follow each other without gaps. The interpreter is released.

@final
class Cpu:
    """The threads and the instruction set that kernels run with.

    Results are the same, bit for bit, at any number of threads; between instruction sets they are
    not.
    """

    def __new__(cls, threads: int, instructions: str | None = None) -> Cpu:
        """`threads` threads, the caller's among them; the best instructions, or those named.

        RuntimeError where the system does not give that many threads.
        """
    @property
    def threads(self) -> int:
        """Threads that share a computation."""
    @property
    def instructions(self) -> str:
        """Name of the instruction set in use."""
    @staticmethod
    def available_instructions() -> list[str]:
        """Names of the instruction sets that this processor has, the slowest first."""

@final
class KVFile:
    """An open file of KV blocks and their records, which the caller has locked.

    An empty file becomes one of this layout; another one must have the same `digest` (32 bytes),
    `num_tensors`, `block_bytes` (of a block in one tensor) and `block_tokens` (for the tokens of a
    block, which KV events report; None without), and room for `capacity` blocks, the null block
    counted. Raises ValueError with the reason why a file is not used, and OSError.
    """

    def __new__(
        cls,
        descriptor: int,
        digest: bytes,
        num_tensors: int,
        block_bytes: int,
        capacity: int,
        about: str = "",
        block_tokens: int | None = None,
    ) -> KVFile: ...
    @property
    def capacity(self) -> int:
        """The most blocks that fit, the null block counted."""
    def tensor_at(self, tensor: int) -> int:
        """Where a tensor begins, in bytes; that after the last is the end of the file."""
    def allocate(self, start: int, length: int) -> None:
        """Give bytes space on the disk, so that writing to them cannot fail. Raises OSError."""
    def punch(self, start: int, length: int) -> None:
        """Give space back; the bytes read as zero. Raises OSError."""
    def survey(self, *, reads: bool) -> tuple[int, int]:
        """Blocks with a valid record, and, if it `reads` them, those with other bytes than it says.

        Of a file that no cache uses.
        """
    @property
    def num_asked(self) -> int:
        """Blocks that `PrefixCache.reads_first` asked for and that were not read yet.

        Any thread.
        """
    def counts(self) -> dict[str, int]:
        """What this process did: kept, and of the restored blocks checked and failed. Any thread.

        `failed_syncs` are clears that the disk did not take.
        """

@final
class BlockStaging:
    """Evicted blocks on their way to a slower tier and back.

    A cache that was given it (`PrefixCache.stage_evicted`) copies evicted blocks out of the tensors
    at `addresses` while up to `capacity` bytes wait. Each tensor has `max_blocks` blocks of
    `block_bytes`, and `owner` keeps all of them there. Copied are blocks that were used `min_uses`
    times, their computing counted, or that a hint or a pin keeps longer than others.

    A key has 34 bytes: the hash, and the group, big endian. What is taken out is the bytes of a
    block in all tensors, with a checksum of 8 bytes. A clear of the cache begins another era, in
    which nothing is stored. From any thread.
    """

    def __new__(
        cls,
        addresses: _Sequence[int],
        block_bytes: int,
        max_blocks: int,
        capacity: int,
        min_uses: int,
        owner: object,
    ) -> BlockStaging: ...
    @property
    def era(self) -> int:
        """How many clears of the cache there were."""
    @property
    def has_staged(self) -> bool:
        """Whether there are blocks to take."""
    @property
    def num_stored(self) -> int:
        """How many blocks the tier holds."""
    def take(self, max_blocks: int, era: int) -> list[tuple[bytes, npt.NDArray[np.uint8]]]:
        """Take evicted blocks, the oldest first and none of another era: key and value of each.

        Where there is none, blocks that no request uses and that are not evicted yet, once the pool
        holds more blocks than the queue could and than it has free.
        """
    def add_stored(self, keys: _Sequence[bytes], era: int) -> None:
        """The tier holds these from now on, unless another era has begun."""
    def remove_stored(self, keys: _Sequence[bytes]) -> None:
        """The tier holds these no more."""
    def clear_stored(self) -> None:
        """The tier holds nothing."""
    def count_stored(self, keys: _Sequence[bytes]) -> int:
        """How many leading ones of these the tier holds."""
    def take_events(self, max_blocks: int) -> list[_Event]:
        """Take what KV events are to report of blocks that the tier got or lost, without tokens.

        Blocks under a salt are never reported; those that an earlier process wrote are once this
        one has used them.
        """
    def report_again(self) -> None:
        """Report all that the tier holds again, to who has forgotten it."""
    def reported(self, group: int) -> npt.NDArray[np.uint64]:
        """The hashes of a group's blocks that the tier holds and that are reported."""
    def fill(self, blocks: _Sequence[int], keys: _Sequence[bytes], values: _Sequence[bytes]) -> int:
        """Write values to blocks, up to the first that is not what `take` gave; how many.

        Nobody else may read or write these blocks meanwhile. ValueError for a block that the pool
        does not have.
        """
    def counts(self) -> dict[str, int]:
        """Blocks so far: staged, dropped without room, skipped as not worth it, and damaged.

        Damaged are those that the tier, or another process, left with other bytes than it wrote.
        """

@final
class LaidOutFile:
    """A file of laid-out parts of linear layers, mapped to be read."""

    def __new__(cls, descriptor: int) -> LaidOutFile:
        """Maps the file of a descriptor, which may be closed then. Raises OSError.

        Nobody may write to the file any more, or cut it short: the process would end.
        """

@final
class PackedLinear:
    """A linear layer, its weight packed for the kernels of the CPU.

    It is made of parts, each of some outputs, which are kept as dense numbers or as GGUF's blocks.
    Blocks compute the very bits that dense numbers do: theirs, in float32, rounded once to the
    layer's type.
    """

    def __new__(
        cls,
        cpu: Cpu,
        inputs: int,
        outputs: int,
        dtype: _KernelDType,
        *,
        bias: bool = False,
        parts: _Sequence[int] | None = None,
        activations: Literal["exact", "int8"] = "exact",
    ) -> PackedLinear:
        """A layer of zeros; `inputs` is even for bfloat16. MemoryError where it cannot fit.

        `parts` are the numbers of outputs of each part, in their order; by default there is one.
        A part takes memory once it is written. With `activations="int8"` parts that hold blocks are
        multiplied with activations quantized to eight bits, a scale for each 32 of a row: other
        results, and no less a function of their row alone. MemoryError in `forward` where there is
        no room for those.
        """
    def copy_rows(self, start: int, address: int, rows: int) -> None:
        """Write `rows` rows of the weight, from output `start` on, from dense numbers.

        A part that held blocks becomes dense; its rows that are not written keep their numbers.
        MemoryError where it does not fit; nothing is written then.
        """
    def copy_blocks(self, start: int, address: int, rows: int, format: _BlockFormat) -> None:  # noqa: A002
        """Write the weight of the part that starts at output `start` and has `rows` outputs.

        A row is `inputs` numbers in dense blocks as GGUF has them; `inputs` is a multiple of their
        size. ValueError where a scale is NaN or infinite, MemoryError where it does not fit; the
        part is as it was then.
        """
    def read_rows(self, ids: int, count: int, out: int) -> None:
        """Write the rows of the weight that `count` int64 ids name, dense, in the layer's type.

        ValueError where an id is not that of an output; nothing is written then.
        """
    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias as they are kept."""
    def format_at(self, start: int) -> _KernelDType | _BlockFormat:
        """What the part is kept as that starts at output `start`; ValueError where none does.

        It is the layer's type where the part is dense or never written.
        """
    def write_laid_out(self, start: int, descriptor: int, offset: int) -> int:
        """Write the part that starts at output `start` to a file, as the kernels read it.

        Returns its bytes, which begin at `offset`: 0 where it was never written. OSError where the
        file does not take them.
        """
    def map_laid_out(
        self,
        start: int,
        file: LaidOutFile,
        offset: int,
        num_bytes: int,
        format: _BlockFormat | None = None,  # noqa: A002
    ) -> None:
        """Take for the part from output `start` on what `write_laid_out` wrote of one like it.

        Of the same inputs, outputs, type, instructions and activations; without a format it is
        dense. The part stays in the file until it is written again. ValueError where `num_bytes`
        are not those of such a part, or `offset` is no multiple of 64.
        """
    def copy_bias(self, start: int, address: int, count: int) -> None:
        """Write `count` biases, from output `start` on; ValueError where the layer has none."""
    def forward(
        self,
        x: int,
        rows: int,
        x_stride: int,
        out: int,
        residual: int = 0,
        *,
        wide_out: bool = False,
    ) -> None:
        """Write x W^T + bias + residual, rounded once, to `out`; a residual of 0 is none.

        `out` and the residual are dense, of the layer's type; float32 with `wide_out`.
        """

@final
class AttentionMixer:
    """Attention of a layer on the CPU: its weights, and the rotations of its queries and keys."""

    def __new__(
        cls,
        *,
        qkv: PackedLinear,
        gated: bool = False,
        makes: Literal["all", "queries_and_keys", "queries"] | None = None,
        qk_norm: int | None = None,
        whole_norms: bool = False,
        value_norm: int | None = None,
        sinks: int | None = None,
        out: PackedLinear,
        rope: int,
        query_rope: int | None = None,
    ) -> AttentionMixer:
        """Attention with these linears, and a norm of queries and keys at this address.

        It is of each head, or with `whole_norms` of all queries at once and all keys; `value_norm`
        is that of values. `sinks` is the address of a float32 a head. With `gated` outputs of `qkv`
        before those of queries are gates, whose sigmoid multiplies what heads make.

        `qkv` makes "all" of a token's queries, keys and values, or "queries_and_keys", whose keys
        are the values too, neither normalised nor turned; or "queries" alone: keys and values are
        then those of an earlier layer with the same cache.

        `rope` is the number of the layer's rotation among those of a step, `query_rope` that of its
        queries where it is another.
        """

@final
class ShortConvMixer:
    """A short convolution of a layer on the CPU: its weights."""

    def __new__(
        cls,
        *,
        in_proj: PackedLinear,
        taps: int,
        weight: int,
        bias: int | None = None,
        out: PackedLinear,
    ) -> ShortConvMixer:
        """A convolution over the last `taps` tokens, channel by channel, between these linears.

        `in_proj` makes B, C and x of a token. At `weight` is [taps, channels], the oldest token's
        first, at `bias` [channels].
        """

@final
class DeltaMixer:
    """The gated delta rule, or Mamba-2, of a layer on the CPU: its weights."""

    def __new__(
        cls,
        *,
        in_proj: PackedLinear,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        tiled: bool = False,
        alike: int | None = None,
        conv: int,
        conv_bias: int | None = None,
        decay: int,
        time_bias: int,
        norm: int,
        skip: int | None = None,
        eps: float,
        out: PackedLinear,
    ) -> DeltaMixer:
        """The rule between these linears: `value_heads` heads of values share `key_heads` of keys.

        Neighbours one, or with `tiled` those that are `key_heads` apart. `in_proj` makes queries,
        keys, values, z, b and a of a token. At the addresses is float32: at `conv` [taps,
        channels], the oldest token's first, at `decay` and `time_bias` [value_heads], at `norm`
        [value_dim], to whose mean squares `eps` is added.

        With `skip` [value_heads] it is Mamba-2: `in_proj` makes C, B, x, z and dt, and `norm` has a
        number for all values: a group of it are those of `alike` key heads in a row, which have the
        same B and C. `conv_bias` is [channels].
        """

@final
class DenseFeedForward:
    """An MLP of a layer on the CPU, gated or not."""

    def __new__(cls, *, gate_up: PackedLinear, gate: _Gate, down: PackedLinear) -> DenseFeedForward:
        """The MLP of these linears: `gate_up` has the gates, then what they let pass.

        For "squared_relu" it has one half alone.
        """

@final
class ExpertsFeedForward:
    """A mixture of experts of a layer on the CPU."""

    def __new__(
        cls,
        *,
        router: PackedLinear,
        scores: Literal["softmax", "sigmoid"],
        selection_bias: int | None = None,
        top_k: int,
        renormalise: float | None = None,
        scale: float | None = None,
        expert_scales: int | None = None,
        gate_up: PackedLinear,
        gate: _Gate,
        down: PackedLinear,
        shared: DenseFeedForward | None = None,
        shared_weight: PackedLinear | None = None,
    ) -> ExpertsFeedForward:
        """The experts of these linears, as many as the router has outputs.

        `gate_up` has for each expert its gates, then what they let pass, in parts of its own,
        `down` a part an expert. A row goes to the `top_k` experts with the highest scores, to which
        float32 numbers at `selection_bias` are added before. With `renormalise` a row's scores are
        divided by their sum plus this, and then multiplied by `scale`, and by an expert's float32
        at `expert_scales`. All rows go through `shared` too, which the sigmoid of the output of
        `shared_weight` weighs, if it is given.
        """

@final
class DenseAndExperts:
    """A gated MLP and experts next to it of a layer on the CPU, whose results are added."""

    def __new__(
        cls,
        *,
        dense: DenseFeedForward,
        experts: ExpertsFeedForward,
        dense_norm: int,
        dense_out_norm: int,
        router_norm: int,
        experts_norm: int,
        experts_out_norm: int,
    ) -> DenseAndExperts:
        """These two, and norms at these addresses.

        They are of what the MLP, the router and the experts read of the stream, and of what the MLP
        and the experts make. Their layer needs an `mlp_out_norm`.
        """

@final
class OwnInput:
    """What takes a layer's own input into the stream, on the CPU."""

    def __new__(
        cls, *, gate: PackedLinear, activation: _Gate, out: PackedLinear, norm: int
    ) -> OwnInput:
        """What gates, made of the stream, let pass of the layer's own input.

        It goes through a linear and the norm at this address.
        """

@final
class DecoderLayer:
    """A layer of a decoder on the CPU: a mixer and a feed-forward, and the norms around them."""

    def __new__(
        cls,
        *,
        input_norm: int | None = None,
        mixer: AttentionMixer | ShortConvMixer | DeltaMixer,
        mixer_out_norm: int | None = None,
        mlp_norm: int | None = None,
        feed_forward: DenseFeedForward | ExpertsFeedForward | DenseAndExperts | None = None,
        mlp_out_norm: int | None = None,
        norm_offset: float,
        own_input: OwnInput | None = None,
        stream_scale: int | None = None,
    ) -> DecoderLayer:
        """A layer of these parts, and of norms at these addresses.

        `input_norm` and `mlp_norm` are of what mixer and feed-forward read, `mixer_out_norm` and
        `mlp_out_norm` of what they add. `norm_offset` is added to the weights of all norms. In the
        end comes `own_input`, and the stream is multiplied by the float32 at `stream_scale`.
        """

@final
class DecoderStack:
    """The layers of a decoder on the CPU, one call a step."""

    def __new__(
        cls, cpu: Cpu, dtype: _KernelDType, hidden: int, eps: float, layers: list[DecoderLayer]
    ) -> DecoderStack:
        """A stack of `layers`, which may differ, over a residual stream of `hidden` numbers."""
    def forward(
        self,
        attentions: list[PagedAttention],
        layer_groups: list[int],
        caches: list[int],
        rotations: list[tuple[int, int]],
        x: int,
        kept_tokens: int | None = None,
        *,
        rotated: _Iterable[int] | None = None,
        states: _Iterable[tuple[int, int, int, int]] | None = None,
        page_stride: int | None = None,
        own_inputs: int | None = None,
        guesses: _Iterable[int] | None = None,
    ) -> None:
        """Take `x`, dense rows of the step that all `attentions` have planned, through all layers.

        In place. Layer i computes with `attentions[layer_groups[i]]`, over keys and values at
        `caches[i]`. A page of a cache begins `page_stride` numbers after the one before, by default
        where that ends. Each of `rotations` is (cos, sin): dense float32, half of `rotated` numbers
        a row. They turn the first `rotated` numbers of a head, one entry a rotation, by default
        all. At the cache of a convolution a block has the inputs of its last `kept_tokens` tokens,
        among those of others. `states` has the parts of states, in their order: of which layer, in
        which group, where that is in page 0, and how many float32 numbers. `own_inputs` are dense
        rows of what each layer with an `own_input` has, one layer after the other. As many of the
        last tokens of each sequence as `guesses` says are not taken into states.
        """
    def keep_accepted(
        self,
        attentions: list[PagedAttention],
        states: _Iterable[tuple[int, int, int, int]],
        accepted: _Iterable[int],
    ) -> None:
        """Take the first `accepted` guesses of each sequence of the last `forward` into `states`.

        These are as they were there, and so is what `attentions` have planned.
        """

@final
class RowOps:
    """Norms, gates and rotary positions, row by row, of tensors of one type."""

    def __new__(cls, cpu: Cpu, dtype: _KernelDType) -> RowOps: ...
    def softcap(self, x: int, rows: int, width: int, cap: float) -> None:
        """Replace each number x of dense float32 rows by cap * tanh(x / cap)."""
    def rms_norm(
        self,
        x: int,
        rows: int,
        width: int,
        x_stride: int,
        weight: int,
        weight_width: int,
        group: int,
        eps: float,
        out: int,
        *,
        offset: float = 0.0,
    ) -> None:
        """Write x / sqrt(mean(x^2) + eps) * (weight + offset), for each `group` numbers of a row.

        `weight_width` is a multiple of `group` and divides `width`: the weight repeats along a row.
        `out` is dense.
        """
    def gated(self, gate: _Gate, x: int, rows: int, width: int, x_stride: int, out: int) -> None:
        """Write gate(x[:width]) * x[width:] for rows of 2 * width numbers; `out` is dense.

        "clamped_swiglu" adds 1 to the second half; "squared_relu" has rows of width numbers alone.
        """
    def rotate(
        self, cos: int, sin: int, half: int, x: int, rows: int, width: int, x_stride: int, out: int
    ) -> None:
        """Write the heads of 2 * half numbers, turned by the angles of their row.

        `cos` and `sin` are float32, `half` numbers a row; they and `out` are dense.
        """

@final
class PagedAttention:
    """Attention over paged keys and values, on the CPU."""

    def __new__(
        cls,
        cpu: Cpu,
        dtype: _KernelDType,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        window_left: int | None = None,
        softcap: float | None = None,
        keeps_codes: bool = False,
    ) -> PagedAttention:
        """Position i sees keys from i - window_left; `head_dim` is a multiple of 16 up to 512.

        `softcap` c replaces a scaled score x by c tanh(x / c). With `keeps_codes` keys and values
        are kept in eight bits, with a float32 scale for each head's keys and values of a token;
        blocks are of a multiple of 16 tokens then.
        """
    def plan(
        self,
        num_pages: int,
        block_size: int,
        qo_indptr: npt.NDArray[np.int32],
        kv_indptr: npt.NDArray[np.int32],
        kv_indices: npt.NDArray[np.int32],
        last_page_len: npt.NDArray[np.int32],
        slot_mapping: npt.NDArray[np.int64],
        first_pages: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Take and check the block tables of a step over a cache [num_pages, 2, K, block_size, D].

        The queries of sequence s, rows `qo_indptr[s]:qo_indptr[s + 1]`, are its last tokens.
        `first_pages[s]` is the number of pages left out before its first; ValueError where a query
        sees one of them.
        """
    def run(
        self,
        cache: int,
        queries: int,
        query_stride: int,
        keys: int,
        key_stride: int,
        values: int,
        value_stride: int,
        out: int,
    ) -> None:
        """Write the step's keys and values to their slots, then attend; `out` is dense.

        Of `queries` there are [T, H * D], of `keys` and `values` [T, K * D].
        """

@final
class StopStrings:
    """Stop strings as one automaton: looking for a thousand costs what looking for one does."""

    def __new__(cls, stops: _Sequence[str]) -> StopStrings:
        """ValueError for an empty string."""
    def stream(self) -> StopStream:
        """A search in one text; any number may share the automaton."""

@final
class StopStream:
    """The search for stop strings in one text that comes in pieces. For one thread at a time."""

    def push(self, text: str) -> tuple[int, int] | None:
        """The match in `text` that begins first, of several the one listed first.

        Where it begins, in characters from the beginning of `text` (negative when it began in a
        piece before), and its index among the stop strings.
        """
    @property
    def num_held(self) -> int:
        """Characters at the end of all pieces that may be the beginning of a stop string."""

@final
class DraftIndex:
    """The recent text of all requests, from which the next tokens of one are guessed.

    A stream reads its own text, and what other streams of its scope share. Memory is fixed at the
    start, about 17 bytes a token; text is evicted in pages of 64 tokens, the least recently used
    first. Texts of a scope that begin alike are held once. Calls of an index and its streams are
    for one thread at a time, RuntimeError otherwise; the properties are for any.
    """

    def __new__(cls, max_tokens: int) -> DraftIndex:
        """It holds up to `max_tokens` tokens, from 64 to 2**24."""
    def stream(self, scope: bytes, shares: bool) -> DraftStream:
        """A request without text.

        Only streams of the same `scope` read what this one says, and none without `shares`.
        """
    @property
    def num_tokens(self) -> int:
        """Tokens that are held."""
    @property
    def num_bytes(self) -> int:
        """Bytes of memory, the same however many tokens are held."""

@final
class DraftStream:
    """The text of one request in a `DraftIndex`. RuntimeError once it is closed."""

    def append(self, tokens: _Tokens) -> None:
        """Add tokens: the prompt in one call, then what was accepted.

        About 0.2 microseconds a token, less for a prompt that begins as another did.
        """
    def draft(self, max_tokens: int) -> tuple[list[int], int, Literal["prompt", "cache"]]:
        """Up to `max_tokens` next tokens (at most 64), the length of the match, whose text it is.

        They followed the longest text that ends as this one does, of several the latest one. A
        match has 2 to 256 tokens; ([], 0, "prompt") without one. "cache" is another stream's.
        """
    def close(self) -> None:
        """End it; a second time does nothing. What it shares stays until it is evicted."""

@final
class TraceReader:
    """The requests of a trace, read as a stream: Mooncake's JSON lines, PTT, a server's recording.

    Plain or compressed by gzip or xz. It holds one request, of PTT also four bytes for each block
    so far, of a recording the requests since the oldest one without an end. For one thread at a
    time.
    """

    def __new__(cls, path: str | _PathLike[str]) -> TraceReader:
        """ValueError with the file and the line for one that is no trace or cannot be read."""
    @property
    def name(self) -> str:
        """What the file calls itself; else its path."""
    @property
    def block_size(self) -> int:
        """Tokens in a block."""
    def read(self, most: int) -> dict[str, npt.NDArray[Any]]:
        """The next requests, up to `most`, in the order of arrival; {} at the end.

        For n requests: time_ms (n uint64, from the trace's start), input_tokens and output_tokens
        (n uint32), session (n int64, -1 where unknown), and the full blocks of the prompts: those
        of request i are block_ids[indptr[i]:indptr[i + 1]] (uint64; indptr is n + 1 uint64). Blocks
        of one trace with the same id have the same content and the same content before them.

        ValueError "file, line N: field reason" for what is wrong with a line; the requests before
        it, since the last call, are lost with it.
        """

@final
class TraceReplay:
    """A trace through caches side by side, without a model. For one thread at a time."""

    def __new__(
        cls,
        path: str | _PathLike[str],
        *,
        threads: int,
        with_history: bool = True,
        caches_answers: bool = False,
    ) -> TraceReplay:
        """Open a trace as `TraceReader` does; `threads` run the caches.

        With a history, bounds are known at the end, for which about 45 bytes are held for each
        different block of the trace. `caches_answers` caches the blocks that answers
        fill too, where the trace knows them.
        """
    @property
    def name(self) -> str:
        """What the file calls itself; else its path."""
    @property
    def block_size(self) -> int:
        """Tokens in a block."""
    @property
    def bytes_read(self) -> int:
        """Bytes of the file, or of a recording's parts, that were read so far."""
    def add(
        self,
        num_blocks: int,
        *,
        eviction_policy: _EvictionPolicy = "lru",
        hints: _Sequence[tuple[int, int | None, int, float | None]] | None = None,
        ms_per_token: float | None = None,
        ms_per_request: float | None = None,
        objective_ms: float | None = None,
        max_delay_ms: float | None = None,
        snapshots: Literal["anchors", "ends", "every", "marconi"] = "anchors",
        snapshot_blocks: int | None = None,
        disk_blocks: int | None = None,
        min_uses: int | None = None,
    ) -> int:
        """Add a cache of `num_blocks` blocks, the null block not counted; returns its index.

        Hints (start, end or None, priority, TTL in seconds or None) hold for every prompt, instead
        of what the trace says. Without `ms_per_token` each request is answered as it arrives. With
        it, prompts are computed one after the other, each in `ms_per_request` and `ms_per_token`
        for each token that does not hit; `max_delay_ms` lets the longest hit of the first 64 go
        first, unless the oldest has waited so long. Of a model with states a snapshot takes
        `snapshot_blocks` blocks, and `snapshots` says where they are kept: as the server does,
        where prompts and answers end, at each block, or as Marconi does (arXiv 2411.19379), for
        which nothing else but the size counts. Behind the pool is a disk of `disk_blocks`, for
        evicted blocks that were used `min_uses` times; a model with states has none. RuntimeError
        after the first batch.
        """
    def advance(self) -> bool:
        """Run the next batch of requests; False after the last one. ValueError as `TraceReader`."""
    def outcome(self, index: int) -> dict[str, Any]:
        """What a cache's requests found so far.

        Counts: requests, hit_requests, input_tokens, hit_tokens, evictions (blocks),
        disk_tokens and disk_writes (blocks), and
        computed_p50, _p90 and _p99 (tokens of a request, up to a thousandth below). With
        `ms_per_token` also ttft_ms_p50, _p90 and _p99, good_requests (TTFT within `objective_ms`),
        start_ms of the first arrival, end_ms of the last prefill, and most_waiting.
        """
    def history(self) -> dict[str, int]:
        """Of the trace so far, and of a cache without a bound.

        requests, input_tokens, unique_blocks,
        block_references (full blocks of the prompts, each as often as it was asked for),
        hit_requests, hit_tokens. RuntimeError without a history.
        """
    def optimum(self, sizes: _Sequence[int]) -> list[dict[str, int]]:
        """hit_requests and hit_tokens of the best that a cache of each size, in blocks, can do."""

@final
class ReplicaIndex:
    """Which blocks each of many replicas has cached. Any thread; calls wait for each other.

    A block is an unsigned 64-bit hash of its content and of all before it; hashes are an array of
    uint64, contiguous and aligned. A replica is a number from 0; that of a removed one is given
    again. ValueError for a replica that is not in the index; RuntimeError once a call has panicked.
    Memory is bounded: about 25 bytes for each different block, and two bytes a replica for each
    different set of replicas.
    """

    def __new__(cls, max_blocks: int) -> ReplicaIndex:
        """It remembers up to `max_blocks` blocks of each replica, and as many expected ones."""
    def add_replica(self) -> int:
        """Add a replica without blocks; up to 8192, ValueError beyond."""
    def remove_replica(self, replica: int) -> None: ...
    def clear(self, replica: int) -> None:
        """Forget the blocks of a replica, expected ones too. Takes the same for any number."""
    def stored(self, replica: int, hashes: npt.NDArray[np.uint64]) -> int:
        """A replica has cached blocks. Returns how many of them found no room."""
    def removed(self, replica: int, hashes: npt.NDArray[np.uint64]) -> None:
        """A replica has evicted blocks; what it was not known to have is passed over."""
    def expected(self, replica: int, hashes: npt.NDArray[np.uint64]) -> int:
        """A replica was sent a prompt of these blocks, and counts as having them until `settled`.

        Returns how many of them found no room.
        """
    def settled(self, replica: int, hashes: npt.NDArray[np.uint64]) -> None:
        """Expect these blocks no more: they were stored, or never will be.

        Of blocks that two prompts have, nothing is expected once the first of them is settled.
        """
    def hits(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """For each replica, the leading blocks that it has or is expected to have.

        An item for each number up to the highest of a replica; 0 for numbers without a replica.
        """
    @property
    def num_blocks(self) -> int:
        """Different blocks; those of a cleared replica count until later calls took them out."""

@final
class ReplicaChooser:
    """Orders replicas by the tokens to compute before a prompt's first one. Any thread.

    That is what waits at a replica, and `overlap_weight` times what is not cached there of the
    prompt. To it come `balance` times the square of the tokens of work that it was given lately
    above the mean, over a tenth of the mean (over 4,096 where that is more). Work is the computed
    tokens of a prompt and `request_tokens`; it counts for less by a factor of e after
    `window_tokens` more a replica. And a prompt with a key counts as cached for a share `affinity`
    (0 to 1) of what is missing at the replica that the key names.
    Equal ones are drawn by the seed: the same calls give the same choices.
    """

    def __new__(
        cls,
        *,
        overlap_weight: float,
        request_tokens: float,
        window_tokens: float,
        balance: float,
        affinity: float,
        seed: int | None = None,
    ) -> ReplicaChooser: ...
    def add_replica(self, replica: int, name: str) -> None:
        """Add a replica under its number, or in place of one. Keys go by its name."""
    def remove_replica(self, replica: int) -> None: ...
    def choose(
        self,
        hit_tokens: npt.NDArray[np.uint32],
        prompt_tokens: int,
        loads: npt.NDArray[np.float64],
        *,
        key: str | None = None,
        most: int | None = None,
    ) -> list[int]:
        """The best replicas, up to `most`, the best first.

        `hit_tokens` and `loads` (tokens to compute before this prompt) have an item a number; the
        load of a replica that must not be chosen is inf.
        """
    def note(self, replica: int, num_tokens: int) -> None:
        """A replica was given a prompt of which it computes `num_tokens` tokens."""

def parse_json(text: bytes, *, max_numbers: int, max_others: int) -> Any:
    """The value of a JSON text in UTF-8, read while the interpreter's other threads run.

    At most `max_numbers` numbers, and `max_others` strings, arrays, objects, constants and keys.
    Stricter than `json.loads`: no NaN, no infinite number, no lone surrogate, no key twice in one
    object, 128 levels.

    Raises ValueError with three arguments: the kind ("invalid", "twice", "numbers" or "others"), a
    message, and the key that came twice, or the field of a number out of range or under which a
    limit was passed, or None.
    """

@final
class BlockPseudonyms:
    """Names the blocks of requests for one recording, by hashes under a `key` of 32 bytes.

    Names of blocks are equal where their content and all before it are;
    docs/reference/recording.md has the hash. Any thread.
    """

    def __new__(cls, key: bytes, block_size: int) -> BlockPseudonyms: ...
    @property
    def block_size(self) -> int:
        """Tokens in a block."""
    def begin(self, cache_salt: str | None = None) -> bytes:
        """The chain before the first block of requests with this cache salt: 32 bytes."""
    def extend(self, chain: bytes, tokens: _Tokens) -> tuple[bytes, str]:
        """The chain behind the full blocks of `tokens`, and their names: 16 digits each."""

def replay_recording(path: str | _PathLike[str]) -> dict[str, Any]:
    """Makes the calls of a recording again, to a cache of its size and policy.

    `path` is its first file. Returns what was found:

    - `agrees`: counts were compared, and all of them were the same;
    - `difference`: the first one, with file and line; None where there is none, and else the replay
      ended there;
    - `live` and `replayed`: the counts that were compared last, under their names in
      docs/reference/recording.md;
    - `checks`: points at which all counts were the same; `unchecked_events` came after the last;
    - `ended`: why the recording ended; None where it was cut off;
    - `parts`, `requests` and `events` that were read, `block_size`, `num_blocks` (the null block
      counted) and `eviction_policy` at its start.

    Raises ValueError, naming file, line and field, for what is no recording, and OSError for what
    cannot be read.
    """

def describe_kv_file(descriptor: int) -> dict[str, Any]:
    """The arguments of `KVFile` for the file of a descriptor, whoever has it open.

    Raises ValueError for a file that is none of this version, and OSError.
    """

def derive_digest(context: str, data: bytes) -> bytes:
    """BLAKE3 of `data` in key derivation mode, whose `context` says what it is of: 32 bytes."""

def hash_file_ranges(
    path: str | _PathLike[str], ranges: _Sequence[tuple[int, int]], threads: int
) -> list[bytes]:
    """BLAKE3, 32 bytes, of each range of bytes of a file, (start, end), read by `threads` threads.

    Other threads of Python run meanwhile. Raises OSError when the file cannot be read or ends
    within a range.
    """
