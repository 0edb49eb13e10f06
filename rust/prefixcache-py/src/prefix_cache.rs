//! The Python class `PrefixCache`.

use std::sync::Arc;
use std::time::Duration;

use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use prefixcache_core::TableBuffers;
use prefixcache_core::cache;
use prefixcache_core::error::{Argument, CacheError, ResizeError};
use prefixcache_core::groups::{GroupSpec, Groups};
use prefixcache_core::hash::{HashConfig, Scope};
use prefixcache_core::hints::Owner;
use prefixcache_core::id::BlockId;
use prefixcache_core::policy::EvictionPolicy;
use prefixcache_core::pool::{AnyWriter, BlockState};
use prefixcache_core::sequence as core;
use prefixcache_core::store::{FreeOrder, Lookup, Move, Moves, PoolConfig};
use prefixcache_core::weights::WeightsName;
use prefixcache_file::staging::key_to_bytes;
use prefixcache_replay::recording::Pseudonyms;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use crate::arguments::{
    Array, Group, List, Number, Numbers, One, OneOf, Value, Word, ids_of, or, or_empty, wrong_type,
};
use crate::block_hashes::BlockHashes;
use crate::detach::{run, run_on_tokens};
use crate::errors::{Result, out_of_range};
use crate::events::{Event, EventSnapshot, event};
use crate::evictions;
use crate::exclusive::{Exclusive, Using};
use crate::kv_file::KVFile;
use crate::names::{self, Name};
use crate::sequence::{Batch, Sequence};
use crate::shared_cache::{Cache, Core, Reader, blocks_looked_at};
use crate::staging::BlockStaging;
use crate::tokens::Tokens;
use crate::writer::Threads;

/// Counts in rows and columns.
type CountTable<'py> = Bound<'py, PyArray2<u32>>;

/// A prefix cache: a pool of KV cache blocks, found again by the tokens that filled them.
#[pyclass(frozen, module = "prefixcache.core")]
pub struct PrefixCache(Arc<Cache>);

impl Word for FreeOrder {
    const ARGUMENT: &'static str = "free_order";
    const WORDS: &'static [(&'static str, Self)] =
        &[("unhashed_first", Self::UnhashedFirst), ("append", Self::Append)];
}

impl Word for EvictionPolicy {
    const ARGUMENT: &'static str = "eviction_policy";
    const WORDS: &'static [(&'static str, Self)] =
        &[("lru", Self::Lru), ("reuse-queue", Self::ReuseQueue)];
}

/// "full", ("sliding_window", window) or "state".
impl Value for GroupSpec {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let kinds = r#""full", ("sliding_window", window) or "state""#;
        let (name, window) = match value.cast::<PyTuple>() {
            Ok(pair) if pair.len() == 2 => (pair.get_item(0)?, Some(pair.get_item(1)?)),
            _ => (value.clone(), None),
        };
        let Ok(name) = name.cast::<PyString>() else {
            return Err(wrong_type(argument, kinds, value));
        };
        match (&*name.to_string_lossy(), window) {
            ("full", None) => Ok(Self::FullAttention),
            ("state", None) => Ok(Self::State),
            ("sliding_window", Some(window)) => {
                let window = usize::read(names::Window::NAME.into(), &window)?;
                Ok(Self::SlidingWindow { window })
            }
            (other, _) => {
                let reason = format!("must be {kinds}, not {other:?}");
                Err(out_of_range(argument, reason))
            }
        }
    }
}

/// The size and order of a pool, as its constructor's arguments say.
pub fn pool_config(
    num_blocks: Number<names::NumBlocks>,
    max_blocks: Option<Number<names::MaxBlocks>>,
    free_order: FreeOrder,
) -> PoolConfig {
    let num_blocks = num_blocks.0;
    PoolConfig::new(num_blocks)
        .with_max_blocks(or(max_blocks, num_blocks))
        .with_free_order(free_order)
}

/// A kind, a colon and a name.
impl Value for WeightsName {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let Ok(name) = value.cast::<PyString>() else {
            return Err(wrong_type(argument, "a string", value));
        };
        Ok(Self::new(name.to_cow()?.as_ref())?)
    }
}

/// Bytes, of any length.
impl Value for Vec<u8> {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        PyBackedBytes::read(argument, value).map(|bytes| bytes.to_vec())
    }
}

/// The share of the pool that each owner of hints may raise, unless another is given.
const RETENTION_BUDGET: f64 = 0.2;

/// Blocks whose TTL has ended that one call looks at, unless another number is given.
const EXPIRED_AT_ONCE: usize = 256;

/// Block ids, int32.
type BlockArray<'py> = Bound<'py, PyArray1<i32>>;

/// Blocks, and of each its key and its place.
type Missing = (Vec<u32>, Vec<Py<PyBytes>>, Vec<usize>);

/// The argument `extras`.
type BlockExtras = List<names::Extras, Vec<u8>>;

#[pymethods]
impl PrefixCache {
    /// A cache of `num_blocks` blocks (block 0, the null block, counted) of `block_size` tokens.
    #[new]
    #[pyo3(
        signature = (
            num_blocks, block_size=None, *, model="", revision="", weights=None, kv_dtype="",
            arithmetic="", num_groups=None, groups=None, free_order=OneOf(FreeOrder::UnhashedFirst),
            eviction_policy=OneOf(EvictionPolicy::Lru), threads=OneOf(Threads::SingleWriter), max_blocks=None,
            retention_budget=None, max_cached_blocks=None,
        ),
        text_signature = "(num_blocks, block_size=16, *, model='', revision='', weights=None, kv_dtype='', \
arithmetic='', num_groups=None, groups=None, free_order='unhashed_first', eviction_policy='lru', threads='single_writer', max_blocks=None, \
retention_budget=0.2, max_cached_blocks=None)"
    )]
    fn new(
        num_blocks: Number<names::NumBlocks>,
        block_size: Option<Number<names::BlockSize>>,
        model: &str,
        revision: &str,
        weights: Option<One<names::Weights, WeightsName>>,
        kv_dtype: &str,
        arithmetic: &str,
        num_groups: Option<Number<names::NumGroups, u16>>,
        groups: Option<List<names::Groups, GroupSpec>>,
        free_order: OneOf<FreeOrder>,
        eviction_policy: OneOf<EvictionPolicy>,
        threads: OneOf<Threads>,
        max_blocks: Option<Number<names::MaxBlocks>>,
        retention_budget: Option<One<names::RetentionBudget, f64>>,
        max_cached_blocks: Option<Number<names::MaxCachedBlocks>>,
    ) -> Result<Self> {
        let share = or(retention_budget, RETENTION_BUDGET);
        let pool = pool_config(num_blocks, max_blocks, free_order.0)
            .with_eviction_policy(eviction_policy.0);
        let groups = match (groups, num_groups) {
            (Some(_), Some(_)) => {
                let reason = "must not be given with groups, which says how many there are";
                return Err(out_of_range("num_groups", reason));
            }
            (Some(specs), None) => Groups::new(specs.0),
            (None, count) => Groups::full(or(count, 1).into()),
        };
        let hashing = HashConfig::new(or(block_size, 16), groups?)
            .with_model(model, kv_dtype, arithmetic)
            .with_revision(revision);
        let weights = weights.map(|name| name.0);
        let cache = Cache::new(hashing, weights, pool, threads.0, share)?;
        // The calling thread does not become the writer.
        cache.pause()?.set_max_cached(max_cached_blocks.map(|most| most.0));
        Ok(Self(Arc::new(cache)))
    }

    /// `h_0`, the hash before the first block, under the current weights. Any thread.
    #[pyo3(signature = (*, cache_salt=None, lora=None))]
    fn root_hash<'py>(
        &self,
        py: Python<'py>,
        cache_salt: Option<String>,
        lora: Option<String>,
    ) -> Result<Bound<'py, PyBytes>> {
        let scope = Scope { lora, cache_salt };
        let root = self.0.reader()?.root_hash(&scope);
        Ok(PyBytes::new(py, root.as_bytes()))
    }

    /// The hashes of the full blocks of `tokens`. Any thread.
    #[pyo3(signature = (tokens, *, cache_salt=None, lora=None, extras=None))]
    fn compute_block_hashes(
        &self,
        py: Python<'_>,
        tokens: Tokens,
        cache_salt: Option<String>,
        lora: Option<String>,
        extras: Option<BlockExtras>,
    ) -> Result<BlockHashes> {
        let core = self.0.reader()?;
        let (tokens, scope, extras) = (tokens.0, Scope { lora, cache_salt }, or_empty(extras));
        let hash = || core.compute_block_hashes(&tokens, &scope, extras);
        Ok(BlockHashes(run_on_tokens(py, tokens.len(), hash)))
    }

    /// A sequence that holds nothing yet, its full blocks hashed. Any thread.
    ///
    /// `extras` are bytes that a block's KV depends on besides its tokens, one entry for each block
    /// from the first on, empty where there is none.
    /// `hashes` of these very tokens and salt, without extras, are taken where the weights are the same.
    #[pyo3(signature = (tokens, *, cache_salt=None, lora=None, extras=None, hashes=None))]
    fn new_sequence(
        &self,
        py: Python<'_>,
        tokens: Tokens,
        cache_salt: Option<String>,
        lora: Option<String>,
        extras: Option<BlockExtras>,
        hashes: Option<PyRef<'_, BlockHashes>>,
    ) -> Result<Sequence> {
        let core = self.0.reader()?;
        let (tokens, scope) = (tokens.0, Scope { lora, cache_salt });
        let sequence = match (hashes, extras) {
            (Some(hashes), None) => core.new_hashed_sequence(tokens, scope, hashes.0.clone()),
            (_, extras) => run_on_tokens(py, tokens.len(), || {
                core.new_sequence(tokens, scope, or_empty(extras))
            }),
        };
        Ok(Sequence::new(sequence, Arc::downgrade(&self.0)))
    }

    /// How many leading tokens hit, in full blocks, `max_tokens` at most. Any thread; changes nothing.
    #[pyo3(signature = (hashes, max_tokens=None))]
    fn probe(
        &self,
        py: Python<'_>,
        hashes: &BlockHashes,
        max_tokens: Option<Number<names::MaxTokens>>,
    ) -> Result<usize> {
        let (core, hashes) = (self.0.reader()?, &hashes.0);
        let work = blocks_looked_at(core, hashes.as_slice().len());
        Ok(run(py, work, || core.probe_within(hashes, or(max_tokens, usize::MAX))))
    }

    /// `probe` for a sequence.
    #[pyo3(signature = (sequence, max_tokens=None))]
    fn count_prefix_hits(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        max_tokens: Option<Number<names::MaxTokens>>,
    ) -> Result<usize> {
        self.count(py, sequence, max_tokens, Reader::count_prefix_hits_within)
    }

    /// How many leading tokens hit in all groups of full attention, whatever the others have.
    #[pyo3(signature = (sequence, max_tokens=None))]
    fn count_whole_hits(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        max_tokens: Option<Number<names::MaxTokens>>,
    ) -> Result<usize> {
        self.count(py, sequence, max_tokens, Reader::count_whole_hits)
    }

    /// `count_prefix_hits` where blocks that `staging`'s tier holds count too; and how many of these the hit needs.
    #[pyo3(signature = (sequence, staging, max_tokens=None))]
    fn count_tiered_hits(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        staging: &BlockStaging,
        max_tokens: Option<Number<names::MaxTokens>>,
    ) -> Result<(usize, usize)> {
        let most = or(max_tokens, usize::MAX);
        let sequence = &mut *sequence.use_as("sequence")?;
        let core = self.0.reader()?;
        Ok(run(py, sequence.hashes().len(), || {
            staging.0.with_stored(|stored| {
                core.count_hits_with(sequence, most, |key| stored.contains(key))
            })
        })?)
    }

    /// Take the first `hit_tokens` as hits and slots for `num_tokens` more, all or none.
    ///
    /// Returns the hit tokens really taken: the longest length up to `hit_tokens` that hits; None when
    /// blocks are lacking, and then nothing has changed. Groups with a window get slots for `chunk` of
    /// the `num_tokens` alone, if that is given, and `ensure_slots` gives them the next.
    #[pyo3(signature = (sequence, hit_tokens, num_tokens, chunk=None))]
    fn commit_prefix_plan(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        hit_tokens: Number<names::HitTokens>,
        num_tokens: Number<names::NumTokens>,
        chunk: Option<Number<names::Chunk>>,
    ) -> Result<Option<usize>> {
        let (hit_tokens, num_tokens) = (hit_tokens.0, num_tokens.0);
        let chunk = or(chunk, num_tokens);
        let sequence = &mut *sequence.use_as("sequence")?;
        let work = hit_tokens.saturating_add(num_tokens);
        Ok(self.0.write_hinted(|core| {
            run_on_tokens(py, work, || {
                core.commit_in_chunks(sequence, hit_tokens, num_tokens, chunk)
            })
        })??)
    }

    /// `commit_prefix_plan` of a hit of which blocks come from a tier: blocks, keys and places of what is to be read.
    ///
    /// None when blocks are lacking, and then nothing has changed.
    fn commit_missing(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        hit_tokens: Number<names::HitTokens>,
        num_tokens: Number<names::NumTokens>,
        chunk: Number<names::Chunk>,
    ) -> Result<Option<Missing>> {
        let (hit_tokens, num_tokens, chunk) = (hit_tokens.0, num_tokens.0, chunk.0);
        let sequence = &mut *sequence.use_as("sequence")?;
        let work = hit_tokens.saturating_add(num_tokens);
        let missing = self.0.write_hinted(|core| {
            run_on_tokens(py, work, || core.commit_missing(sequence, hit_tokens, num_tokens, chunk))
        })??;
        Ok(missing.map(|all| {
            let key = |key| PyBytes::new(py, &key_to_bytes(key)).unbind();
            (
                all.iter().map(|one| one.block.get()).collect(),
                all.iter().map(|one| key(&one.key)).collect(),
                all.iter().map(|one| one.index).collect(),
            )
        }))
    }

    /// Give each sequence `counts[i]` more slots, in order.
    ///
    /// Returns how many leading sequences got all of theirs; it stops at the first that could not,
    /// which is unchanged as all after it.
    fn append_slots(
        &self,
        py: Python<'_>,
        sequences: Batch,
        counts: Numbers<names::Counts>,
    ) -> Result<usize> {
        let counts = &counts.0;
        self.on_batch(&sequences, |core, batch| {
            run_on_tokens(py, saturating_sum(counts), || core.append_slots(batch, counts))
        })
    }

    /// Give each sequence slots in every group for its first `upto[i]` tokens, in order.
    ///
    /// Returns how many leading sequences have theirs, as `append_slots` does.
    fn ensure_slots(
        &self,
        py: Python<'_>,
        sequences: Batch,
        upto: Numbers<names::Upto>,
    ) -> Result<usize> {
        let upto = &upto.0;
        self.on_batch(&sequences, |core, batch| {
            let ready = batch.iter().map(|one| one.num_ready_slots()).sum();
            run_on_tokens(py, saturating_sum(upto).saturating_sub(ready), || {
                core.ensure_slots(batch, upto)
            })
        })
    }

    /// Give each sequence blocks for the snapshots of its states that are worth keeping from `starts[i]` on.
    ///
    /// Returns how many snapshots got theirs. To be called before the step from there on, once its slots are there.
    fn keep_snapshots(
        &self,
        py: Python<'_>,
        sequences: Batch,
        starts: Numbers<names::Starts>,
    ) -> Result<usize> {
        let starts = &starts.0;
        self.on_batch(&sequences, |core, batch| {
            run(py, batch.len(), || core.keep_snapshots(batch, starts))
        })
    }

    /// The most blocks that a sequence of `num_tokens` holds at once, computed `chunk` tokens at a time.
    fn most_blocks(
        &self,
        num_tokens: Number<names::NumTokens>,
        chunk: Number<names::Chunk>,
    ) -> Result<usize> {
        let (num_tokens, chunk) = (num_tokens.0, chunk.0);
        Ok(self.0.reader()?.most_blocks(num_tokens, chunk))
    }

    /// Add one token to each sequence.
    fn append_tokens(&self, py: Python<'_>, sequences: Batch, tokens: Tokens) -> Result<()> {
        let tokens = &tokens.0;
        self.on_batch(&sequences, |core, batch| {
            run_on_tokens(py, tokens.len(), || core.append_tokens(batch, tokens))
        })
    }

    /// Say that the KV of the first `upto[i]` tokens is there, and publish the full blocks among them.
    ///
    /// Returns the duplicates among them: (sequence, group, index in the block table, the block that
    /// already holds the content). A sequence committed before the last clear publishes nothing.
    fn mark_blocks_filled(
        &self,
        py: Python<'_>,
        sequences: Batch,
        upto: Numbers<names::Upto>,
    ) -> Result<Vec<(usize, u16, usize, u32)>> {
        let upto = &upto.0;
        let duplicates = self.on_batch(&sequences, |core, batch| {
            let filled = batch.iter().map(|sequence| sequence.num_filled()).sum();
            run_on_tokens(py, saturating_sum(upto).saturating_sub(filled), || {
                core.mark_blocks_filled(batch, upto)
            })
        })?;
        let plain = |duplicate: &cache::Duplicate| {
            let group = duplicate.group.get();
            (duplicate.sequence, group, duplicate.index, duplicate.holder.get())
        };
        Ok(duplicates.iter().map(plain).collect())
    }

    /// Drop the blocks that no token from `upto[i]` on needs; how many.
    ///
    /// The tokens before are computed and their full blocks published. Each sequence's retention says
    /// which of the blocks keep their content.
    fn drop_unneeded(
        &self,
        py: Python<'_>,
        sequences: Batch,
        upto: Numbers<names::Upto>,
    ) -> Result<usize> {
        let upto = &upto.0;
        self.on_batch(&sequences, |core, batch| {
            run(py, batch.len(), || core.drop_unneeded(batch, upto))
        })
    }

    /// Pin what the sequences' anchors need, as their retention says; how many pins are new.
    fn pin_anchors(&self, py: Python<'_>, sequences: Batch) -> Result<usize> {
        self.on_batch(&sequences, |core, batch| {
            let work = batch.iter().map(|sequence| sequence.num_slots()).sum();
            run_on_tokens(py, work, || core.pin_anchors(batch))
        })
    }

    /// Swap a published block of a sequence for the one that hits for its content, and give its own one up.
    fn replace_block(
        &self,
        sequence: &Sequence,
        group: Group,
        index: Number<names::Index>,
    ) -> Result<()> {
        let (group, index) = (group.0, index.0);
        let mut sequence = sequence.use_as("sequence")?;
        let core = &mut *self.0.write()?;
        Ok(core.replace_block(&mut sequence, group, index)?)
    }

    /// Give all blocks of each sequence back, the tail first, so that it is evicted before the head.
    ///
    /// The sequence can be committed again.
    fn release(&self, py: Python<'_>, sequences: Batch) -> Result<()> {
        sequences.use_together(|batch| {
            let work = batch.iter().map(|sequence| sequence.num_slots()).sum();
            Ok(self.0.write_hinted(|core| run_on_tokens(py, work, || core.release(batch)))??)
        })
    }

    /// Give content whose TTL has ended the priority that it has without; how many blocks.
    ///
    /// Of `max_blocks` at most, those that ended first.
    #[pyo3(signature = (max_blocks=None), text_signature = "($self, max_blocks=256)")]
    fn demote_expired(&self, max_blocks: Option<Number<names::MaxBlocks>>) -> Result<usize> {
        self.0.write_hinted(|core| core.demote_expired(or(max_blocks, EXPIRED_AT_ONCE)))
    }

    /// Set the time that TTLs, evictions and the eviction policy go by, in seconds, and end the use of the clock.
    fn set_time(&self, seconds: One<names::Seconds, Duration>) -> Result<()> {
        let now = seconds.0;
        self.0.write_hinted(|core| core.set_time(now))
    }

    /// Let the eviction policy go by the names that a `BlockPseudonyms` with this key gives blocks, not by hashes.
    ///
    /// For sequences made from now on; once in a cache's life. A recording of the names can then be replayed.
    fn name_blocks(&self, key: One<names::Key, [u8; 32]>) -> Result<()> {
        let core = &mut *self.0.write()?;
        Ok(core.name_blocks(Arc::new(Pseudonyms::new(key.0, core.block_size())?))?)
    }

    /// Forget everything cached, in constant time. Sequences keep their blocks and publish no more.
    fn clear_cache_index(&self) -> Result<()> {
        self.0.write_hinted(|core| core.clear_cache_index())
    }

    /// Forget everything cached, and hash under other weights from now on, by their name if they have one.
    ///
    /// With `keep` nothing is forgotten: `Sequence.at_version` finds what was cached under older weights.
    #[pyo3(signature = (weights=None, *, keep=false))]
    fn new_weight_version(
        &self,
        weights: Option<One<names::Weights, WeightsName>>,
        keep: bool,
    ) -> Result<u64> {
        let name = weights.map(|name| name.0);
        self.0.write_hinted(|core| match keep {
            true => core.next_weight_version(name),
            false => core.new_weight_version(name),
        })
    }

    /// End what `owner`'s hints asked for the sequence's full blocks from number `first` on.
    ///
    /// Returns how many moved to another priority. Counts take longer until the cache is cleared where the owner has
    /// raised more behind them.
    fn end_hints(
        &self,
        owner: &str,
        sequence: &Sequence,
        first: Number<names::FirstBlock>,
    ) -> Result<usize> {
        let sequence = &*sequence.use_as("sequence")?;
        let owner = Owner::named(owner);
        Ok(self.0.write_hinted(|core| core.end_hints(owner, sequence, first.0))??)
    }

    /// Counts the changes of the weights; 0 at first.
    #[getter]
    fn weight_version(&self) -> Result<u64> {
        Ok(self.0.reader()?.weight_version())
    }

    /// What every hash calls the weights of now: their name, or the version's digits.
    #[getter]
    fn weights_name(&self) -> Result<String> {
        Ok(self.0.reader()?.weights_name())
    }

    /// Pin the blocks that the longest hit within the first `num_tokens` tokens needs.
    ///
    /// They are evicted last. Returns how many pins are new. The sequence need not hold anything.
    fn pin(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        num_tokens: Number<names::NumTokens>,
    ) -> Result<usize> {
        let num_tokens = num_tokens.0;
        let sequence = &mut *sequence.use_as("sequence")?;
        let core = &mut *self.0.write()?;
        Ok(run(py, sequence.hashes().len(), || core.pin(sequence, num_tokens))?)
    }

    /// Take the pins off the sequence's cached blocks. Returns how many were pinned.
    fn unpin(&self, py: Python<'_>, sequence: &Sequence) -> Result<usize> {
        let sequence = &mut *sequence.use_as("sequence")?;
        let core = &mut *self.0.write()?;
        Ok(run(py, sequence.hashes().len(), || core.unpin(sequence))?)
    }

    /// Move the oldest `count` free pinned blocks to the regular tier. Returns how many there were.
    fn demote(&self, py: Python<'_>, count: Number<names::Count>) -> Result<usize> {
        let count = count.0;
        let core = &mut *self.0.write()?;
        Ok(run(py, count, || core.demote(count)))
    }

    /// Set the number of blocks, the null block counted. Returns how many above it are still held.
    fn resize(&self, py: Python<'_>, num_blocks: Number<names::NumBlocks>) -> Result<usize> {
        let num_blocks = num_blocks.0;
        Ok(self.0.write_hinted(|core| {
            let work = core.store().num_blocks().max(num_blocks);
            run(py, work, || core.resize(num_blocks))
        })??)
    }

    /// Begin one slice of a shrink to `num_blocks` that keeps what is worth most.
    ///
    /// Returns (from, to), int32 arrays of up to `max_moves` blocks: the caller copies the KV of each
    /// `from` to its `to`, then calls `finish_moves`, or `abort_moves` where it could not. From the first
    /// slice on no block from `num_blocks` on is handed out. When there is nothing to move any more,
    /// `resize` ends the shrink; `resize` to another size takes it back.
    fn begin_moves<'py>(
        &self,
        py: Python<'py>,
        num_blocks: Number<names::NumBlocks>,
        max_moves: Number<names::MaxMoves>,
    ) -> Result<(BlockArray<'py>, BlockArray<'py>)> {
        let (num_blocks, most) = (num_blocks.0, max_moves.0);
        let core = &mut *self.0.write()?;
        let moves = &mut *self.moves()?;
        let work = core.store().num_blocks();
        run(py, work, || core.begin_moves(num_blocks, most, moves))?;
        let array = |side: fn(&Move) -> BlockId| {
            let ids = moves.in_flight.iter().map(|one| side(one).get() as i32);
            PyArray1::from_iter(py, ids)
        };
        Ok((array(|one| one.from), array(|one| one.to)))
    }

    /// End the slice whose KV was copied: its content is found where it was copied to. How many moved.
    fn finish_moves(&self, py: Python<'_>) -> Result<usize> {
        let core = &mut *self.0.write()?;
        let moves = &mut *self.moves()?;
        Ok(run(py, moves.in_flight.len(), || core.finish_moves(moves))?)
    }

    /// Take the slice back: content stays where it is.
    fn abort_moves(&self, py: Python<'_>) -> Result<()> {
        let core = &mut *self.0.write()?;
        let moves = &mut *self.moves()?;
        let aborted = run(py, moves.in_flight.len(), || core.abort_moves(moves));
        Ok(aborted.map_err(CacheError::from)?)
    }

    /// Give up the content of the `count` free blocks that would lose it first. How many there were.
    fn release_cached(&self, py: Python<'_>, count: Number<names::Count>) -> Result<usize> {
        let count = count.0;
        self.0.write_hinted(|core| {
            let work = count.min(core.store().num_blocks());
            run(py, work, || core.release_cached(count))
        })
    }

    /// Bound the free blocks that keep their content; what is above goes now and at each release.
    #[pyo3(signature = (max_cached_blocks))]
    fn set_max_cached_blocks(
        &self,
        py: Python<'_>,
        max_cached_blocks: Option<Number<names::MaxCachedBlocks>>,
    ) -> Result<()> {
        let bound = max_cached_blocks.map(|most| most.0);
        let core = &mut *self.0.write()?;
        run(py, core.store().num_blocks(), || {
            core.set_max_cached(bound);
        });
        Ok(())
    }

    /// Write the block tables of a batch into the caller's arrays.
    ///
    /// For each sequence: the pages up to position `starts[i] + counts[i]` (`indptr` and `indices`, and
    /// the tokens on the last page), of a group with a window those that the tokens from `starts[i]` on
    /// need (`first_pages` tells how many are left out before), and block * block_size + offset for
    /// each of the `counts[i]` computed tokens. Returns the number of pages written.
    #[pyo3(signature = (
        sequences, starts, counts, group, indptr, indices, last_page_len, slot_mapping,
        first_pages=None,
    ))]
    fn fill_block_tables(
        &self,
        sequences: Batch,
        starts: Numbers<names::Starts>,
        counts: Numbers<names::Counts>,
        group: Group,
        indptr: Array<'_, names::Indptr, i32>,
        indices: Array<'_, names::Indices, i32>,
        last_page_len: Array<'_, names::LastPageLen, i32>,
        slot_mapping: Array<'_, names::SlotMapping, i64>,
        first_pages: Option<Array<'_, names::FirstPages, i32>>,
    ) -> Result<usize> {
        let batch = sequences.use_all()?;
        let batch: Vec<&core::Sequence> = batch.iter().map(|sequence| &**sequence).collect();
        let core = self.0.reader()?;
        // Last, and attached to the interpreter until they are written: nobody's code runs that could
        // resize the arrays.
        let (mut indptr, mut indices) = (indptr.write()?, indices.write()?);
        let (mut last_page_len, mut slot_mapping) = (last_page_len.write()?, slot_mapping.write()?);
        let mut first_pages = first_pages.as_ref().map(Array::write).transpose()?;
        let mut buffers = TableBuffers {
            indptr: indptr.slice()?,
            indices: indices.slice()?,
            last_page_len: last_page_len.slice()?,
            slot_mapping: slot_mapping.slice()?,
            first_pages: first_pages.as_mut().map(|pages| pages.slice()).transpose()?,
        };
        Ok(core.fill_block_tables(&batch, &starts.0, &counts.0, group.0, &mut buffers)?)
    }

    /// Tokens in a block.
    #[getter]
    fn block_size(&self) -> Result<usize> {
        Ok(self.0.reader()?.block_size())
    }

    /// Blocks, the null block counted, as `num_blocks` is wherever it is given or returned.
    #[getter]
    fn num_blocks(&self) -> Result<usize> {
        Ok(self.0.reader()?.store().num_blocks())
    }

    /// Blocks that nobody holds.
    ///
    /// Those of collected sequences count at once for the writer's thread, for others from the writer's next call on.
    #[getter]
    fn num_free_blocks(&self) -> Result<usize> {
        Ok(self.0.counted()?.store().num_free())
    }

    /// The free blocks, the one to be handed out next first. For debugging.
    fn free_order(&self, py: Python<'_>) -> Result<Vec<u32>> {
        let core = &*self.0.pause()?;
        Ok(run(py, core.store().num_blocks(), || ids_of(&core.store().free_order())))
    }

    /// The blocks that hold a hash, lowest id first. For debugging.
    fn cached_blocks(&self, py: Python<'_>) -> Result<Vec<u32>> {
        let core = &*self.0.pause()?;
        Ok(run(py, core.store().num_blocks(), || ids_of(&core.store().cached_blocks())))
    }

    /// Lifetime counts (queries and hits in tokens), and blocks by state.
    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let core = self.0.counted()?;
        let dict = store_stats(py, core.store())?;
        let stats = core.stats();
        dict.set_item("queries", stats.queries)?;
        dict.set_item("hits", stats.hits)?;
        let [hinted, demoted, expired] = self.0.hints.get();
        dict.set_item("hinted_blocks", hinted)?;
        dict.set_item("hints_demoted", demoted)?;
        dict.set_item("hints_expired", expired)?;
        Ok(dict)
    }

    /// Where in the pool blocks are free, cached, pinned or held, and how long ago they were used. Any thread.
    #[pyo3(signature = (cells, age_bounds=None), text_signature = "($self, cells, age_bounds=())")]
    fn block_map<'py>(
        &self,
        py: Python<'py>,
        cells: Number<names::Cells>,
        age_bounds: Option<List<names::AgeBounds, Duration>>,
    ) -> Result<(CountTable<'py>, CountTable<'py>)> {
        let bounds = or_empty(age_bounds);
        let core = self.0.counted()?;
        let map = run(py, core.store().num_blocks(), || core.store().map(cells.0, &bounds))?;
        let rows = map.states.len();
        let states = map.states.into_flattened().into_pyarray(py);
        let ages = map.ages.into_pyarray(py);
        let ages_per_cell = bounds.len() + 1;
        Ok((states.reshape([rows, BlockState::COUNT])?, ages.reshape([rows, ages_per_cell])?))
    }

    /// Keep a log of content that is lost from now on, of up to `capacity` blocks (rounded up to a power of two).
    ///
    /// Gaps between uses of content are counted by `gap_bounds`, in seconds that rise. Once; any thread.
    #[pyo3(signature = (capacity, gap_bounds=None), text_signature = "($self, capacity, gap_bounds=())")]
    fn listen(
        &self,
        capacity: Number<names::Capacity>,
        gap_bounds: Option<List<names::GapBounds, Duration>>,
    ) -> Result<()> {
        Ok(self.0.reader()?.store().listen(capacity.0, &or_empty(gap_bounds))?)
    }

    /// Take up to `max_losses` evictions out of the log, the oldest first, as arrays. Any thread.
    fn take_losses<'py>(
        &self,
        py: Python<'py>,
        max_losses: Number<names::MaxEvictions>,
    ) -> Result<Bound<'py, PyDict>> {
        let (core, most) = (self.0.reader()?, max_losses.0);
        let evictions = py.detach(|| {
            let mut evictions = Vec::new();
            core.store().take_evictions(most, &mut evictions);
            evictions
        });
        evictions::arrays(py, &evictions)
    }

    /// How many evictions the log had no room for. Any thread.
    #[getter]
    fn missed_losses(&self) -> Result<u64> {
        Ok(self.0.reader()?.store().missed_evictions())
    }

    /// How many gaps between uses lie up to each bound and above the one before, and the sum of all in
    /// seconds. Any thread.
    fn reuse_gaps(&self) -> Result<(Vec<u64>, f64)> {
        let gaps = self.0.reader()?.store().reuse_gaps();
        Ok((gaps.counts, gaps.sum.as_secs_f64()))
    }

    /// Restore what `file` has kept, and keep there what is published from now on. The writer's thread.
    ///
    /// Once, before the cache's first use; the pool's KV lies in the file. Returns how many blocks were restored, and
    /// how many of the file's were not.
    fn keep_in(&self, py: Python<'_>, file: &KVFile) -> Result<(usize, u64)> {
        let core = &mut *self.0.write()?;
        run(py, core.store().num_blocks(), || {
            let num_blocks = core.store().num_blocks();
            let kept = file.0.take_kept(num_blocks, core.num_groups());
            let restored = core.keep_in(file.0.store(), &kept.blocks)?;
            let lost = kept.blocks.len() - restored;
            Ok((restored, kept.dropped + lost as u64))
        })
    }

    /// Whether a hit of `hit_tokens` needs more than `most` blocks of a file that are still to be compared with their
    /// checksums. They are read on another thread then. The writer's thread.
    fn reads_first(
        &self,
        sequence: &Sequence,
        hit_tokens: Number<names::HitTokens>,
        most: Number<names::Most>,
    ) -> Result<bool> {
        let sequence = &mut *sequence.use_as("sequence")?;
        Ok(self.0.write()?.reads_first(sequence, hit_tokens.0, most.0)?)
    }

    /// Copy what is evicted from now on into `staging`. The writer's thread, once, before the cache's first use.
    fn stage_evicted(&self, staging: &BlockStaging) -> Result<()> {
        let core = &mut *self.0.write()?;
        core.keep_in(staging.0.store(), &[])?;
        Ok(())
    }

    /// Keep a record of what can be found and cannot any more, for `take_events`. The writer's thread.
    fn keep_events(&self) -> Result<()> {
        let core = &mut *self.0.write()?;
        let block_size = core.block_size();
        let AnyWriter::One(pool) = core.store_mut() else {
            let reason = "must be \"single_writer\": what several writers change has no one order";
            return Err(out_of_range("threads", reason));
        };
        let reader = pool.keep_events(block_size)?;
        // The pool refuses a second event_log, so nothing stands here.
        let _ = self.0.events.set(Exclusive::new(reader));
        Ok(())
    }

    /// Take the oldest changes of what can be found, about `max_blocks` blocks of them. Any thread.
    ///
    /// Empty also where another call receives changes at the moment.
    fn take_events(
        &self,
        py: Python<'_>,
        max_blocks: Number<names::MaxBlocks>,
    ) -> Result<Vec<Event>> {
        let events = self.0.events()?;
        let taken = py.detach(|| events.try_use().map(|mut events| events.take(max_blocks.0)));
        Ok(taken.unwrap_or_default().into_iter().map(event).collect())
    }

    /// What all changes taken have led to; None while there are others to take. Any thread.
    fn snapshot_events(&self, py: Python<'_>) -> Result<Option<EventSnapshot>> {
        let events = self.0.events()?;
        let snapshot = py.detach(|| events.try_use().and_then(|events| events.snapshot()));
        Ok(snapshot.map(EventSnapshot::new))
    }

    /// Check every invariant of the cache; raises RuntimeError that names the broken one.
    ///
    /// With `sequences`, all that hold blocks, also that each block counts its holders and no more.
    #[pyo3(signature = (sequences=None))]
    fn validate(&self, py: Python<'_>, sequences: Option<Batch>) -> Result<()> {
        let batch = sequences.as_ref().map(Batch::use_all).transpose()?;
        let batch: Option<Vec<&core::Sequence>> =
            batch.as_ref().map(|batch| batch.iter().map(|sequence| &**sequence).collect());
        let core = &*self.0.pause()?;
        core.check_made_here(batch.as_deref().unwrap_or_default())?;
        let moves = &*self.moves()?;
        Ok(run(py, core.store().num_blocks(), || {
            core.validate()?;
            batch.map_or(Ok(()), |batch| core.validate_holds(&batch, moves))
        })?)
    }

    /// Make the calling thread the one that may write; for a shared cache that changes nothing.
    fn adopt_writer(&self) -> Result<()> {
        self.0.adopt_writer()
    }

    /// End the cache: every later call raises RuntimeError.
    fn close(&self) {
        self.0.close();
    }
}

impl PrefixCache {
    /// The slice of a shrink that is in flight.
    fn moves(&self) -> Result<Using<'_, Moves>> {
        let moves = self.0.moves.try_use();
        Ok(moves.ok_or(ResizeError::Busy)?)
    }

    /// Calls `work`, which changes the cache, with all sequences of the argument `sequences`.
    fn on_batch<T>(
        &self,
        sequences: &Batch,
        work: impl FnOnce(&mut Core, &mut [&mut core::Sequence]) -> Result<T, CacheError>,
    ) -> Result<T> {
        sequences.use_together(|batch| Ok(work(&mut *self.0.write()?, batch)?))
    }

    /// Calls `count` with the cache, a sequence, and the most tokens that may hit.
    fn count(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        most: Option<Number<names::MaxTokens>>,
        count: fn(&Reader, &mut core::Sequence, usize) -> Result<usize, CacheError>,
    ) -> Result<usize> {
        let sequence = &mut *sequence.use_as("sequence")?;
        let core = self.0.reader()?;
        // The blocks that it looks at, or hashes first.
        let work = match core.hashes_are_current(sequence) {
            true => blocks_looked_at(core, sequence.hashes().len()),
            false => sequence.hashes().len(),
        };
        Ok(run(py, work, || count(core, sequence, or(most, usize::MAX)))?)
    }
}

fn saturating_sum(counts: &[usize]) -> usize {
    counts.iter().copied().fold(0, usize::saturating_add)
}

/// What a pool tells of itself.
pub fn store_stats<'py>(py: Python<'py>, store: &impl Lookup) -> Result<Bound<'py, PyDict>> {
    let stats = store.stats();
    let dict = PyDict::new(py);
    dict.set_item("evictions", stats.evictions)?;
    dict.set_item("allocations", stats.allocations)?;
    dict.set_item("touches", stats.touches)?;
    dict.set_item("pins", stats.pins)?;
    dict.set_item("demotions", stats.demotions)?;
    dict.set_item("pinned_evictions", stats.pinned_evictions)?;
    dict.set_item("pinned_hits", stats.pinned_hits)?;
    dict.set_item("cached_blocks", stats.cached)?;
    dict.set_item("blocks_in_use", stats.in_use)?;
    dict.set_item("held_above_blocks", stats.held_above)?;
    dict.set_item("moved_blocks", stats.moved)?;
    dict.set_item("lost_to_resize_blocks", stats.lost_to_resize)?;
    dict.set_item("free_blocks", stats.free)?;
    dict.set_item("pinned_blocks", stats.pinned)?;
    dict.set_item("pinned_free_blocks", stats.pinned_free)?;
    Ok(dict)
}
