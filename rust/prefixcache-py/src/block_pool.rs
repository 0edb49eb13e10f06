//! The Python class `BlockPool`: the pool alone, for a caller that keeps its own hashes and tables.

use prefixcache_core::id::{BlockHash, BlockId, BlockKey, Epoch, GroupId};
use prefixcache_core::pool::{self, AnyReader, AnyWriter, MultiWriter};
use prefixcache_core::store::{BlockStore, FreeOrder, Lookup, Registration, WithReaders};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{Blocks, Group, List, Number, One, OneOf, ids_of, or};
use crate::detach::run;
use crate::errors::{Result, bad_blocks, ensure};
use crate::names;
use crate::prefix_cache::{pool_config, store_stats};
use crate::writer::{Threads, Writer};

/// A pool of blocks that are handed out, counted, given back, and found again by their hashes.
#[pyclass(frozen, module = "prefixcache.core")]
pub struct BlockPool {
    pool: AnyReader,
    writer: Writer<AnyWriter>,
}

/// Fails for more blocks than the pool has at all.
fn check_count(pool: &impl Lookup, name: &'static str, count: usize) -> Result<()> {
    let most = pool.num_blocks() - 1;
    ensure!(count <= most, name, "must be at most {most}, the blocks of the pool, not {count}");
    Ok(())
}

fn keys(
    hashes: &[BlockHash],
    group: Option<Group>,
) -> impl ExactSizeIterator<Item = BlockKey> + Clone {
    let group = or(group, GroupId::new(0));
    hashes.iter().map(move |&hash| BlockKey::new(hash, group))
}

#[pymethods]
impl BlockPool {
    /// A pool of `num_blocks` blocks, block 0, the null block, counted.
    #[new]
    #[pyo3(
        signature = (
            num_blocks, *, free_order=OneOf(FreeOrder::UnhashedFirst),
            threads=OneOf(Threads::SingleWriter),
            max_blocks=None
        ),
        text_signature = "(num_blocks, *, free_order='unhashed_first', threads='single_writer', \
max_blocks=None)"
    )]
    fn new(
        num_blocks: Number<names::NumBlocks>,
        free_order: OneOf<FreeOrder>,
        threads: OneOf<Threads>,
        max_blocks: Option<Number<names::MaxBlocks>>,
    ) -> Result<Self> {
        let config = pool_config(num_blocks, max_blocks, free_order.0);
        let (pool, writer) = match threads.0 {
            Threads::SingleWriter => {
                let pool = AnyWriter::One(pool::Writer::new(config)?);
                (pool.reader(), Writer::one("the pool", pool))
            }
            Threads::Shared => {
                let pool = MultiWriter::shared(config)?;
                let make = move || AnyWriter::Many(pool.clone());
                (make().reader(), Writer::many("the pool", make))
            }
        };
        Ok(Self { pool, writer })
    }

    /// Take `count` blocks from the front of the free order, all or none; None when they are lacking.
    fn allocate(&self, py: Python<'_>, count: Number<names::Count>) -> Result<Option<Vec<u32>>> {
        let count = count.0;
        let pool = &mut *self.writer.write()?;
        check_count(pool, "count", count)?;
        Ok(run(py, count, || {
            let mut blocks = Vec::with_capacity(count);
            let taken = pool.allocate(count, &mut blocks);
            taken.is_ok().then(|| ids_of(&blocks))
        }))
    }

    /// Take the blocks of the leading `hashes` that hit, then `num_new` new ones, all or none.
    #[pyo3(
        signature = (hashes, num_new=None, group=None),
        text_signature = "($self, hashes, num_new=0, group=0)"
    )]
    fn commit(
        &self,
        py: Python<'_>,
        hashes: List<names::Hashes, BlockHash>,
        num_new: Option<Number<names::NumNew>>,
        group: Option<Group>,
    ) -> Result<Option<(usize, Vec<u32>)>> {
        let num_new = or(num_new, 0);
        let keys = keys(&hashes.0, group);
        let pool = &mut *self.writer.write()?;
        check_count(pool, "num_new", num_new)?;
        let count = keys.len() + num_new;
        Ok(run(py, count, || {
            let mut blocks = Vec::with_capacity(count);
            let hits = pool.commit(keys, num_new, &mut blocks).ok()?;
            Some((hits, ids_of(&blocks)))
        }))
    }

    /// The block that hits for `block_hash`, or None.
    #[pyo3(signature = (block_hash, group=None), text_signature = "($self, block_hash, group=0)")]
    fn lookup(
        &self,
        block_hash: One<names::BlockHash, BlockHash>,
        group: Option<Group>,
    ) -> Option<u32> {
        let key = BlockKey::new(block_hash.0, or(group, GroupId::new(0)));
        self.pool.lookup(&key).map(BlockId::get)
    }

    /// Let held blocks be found under `hashes`, one for each.
    #[pyo3(
        signature = (blocks, hashes, epoch, group=None),
        text_signature = "($self, blocks, hashes, epoch, group=0)"
    )]
    fn register(
        &self,
        py: Python<'_>,
        blocks: Blocks,
        hashes: List<names::Hashes, BlockHash>,
        epoch: Number<names::EpochBefore, u64>,
        group: Option<Group>,
    ) -> Result<Vec<Option<u32>>> {
        let most = Epoch::new(u64::MAX).get();
        ensure!(epoch.0 <= most, "epoch", "must be at most {most}, not {}", epoch.0);
        let (blocks, epoch) = (blocks.0, Epoch::new(epoch.0));
        let keys = keys(&hashes.0, group);
        let (count, given) = (blocks.len(), keys.len());
        ensure!(count == given, "hashes", "must be one for each of {count} blocks, not {given}");
        let pool = &mut *self.writer.write()?;
        let register = |(&block, key)| match pool.register(block, key, epoch) {
            Ok(Registration::Duplicate(holder)) => Ok(Some(holder.get())),
            Ok(_) => Ok(None),
            Err(misuse) => Err(misuse),
        };
        let all = blocks.iter().zip(keys);
        run(py, blocks.len(), || all.map(register).collect::<Result<_, _>>()).map_err(bad_blocks)
    }

    /// Give up one hold of each block; those without a holder join the free blocks in this order.
    fn release(&self, py: Python<'_>, blocks: Blocks) -> Result<()> {
        let pool = &mut *self.writer.write()?;
        run(py, blocks.0.len(), || pool.release(&blocks.0)).map_err(bad_blocks)
    }

    /// Counts the clears of the index.
    #[getter]
    fn epoch(&self) -> u64 {
        self.pool.epoch().get()
    }

    /// Forget every hash, in constant time.
    fn clear_index(&self) -> Result<()> {
        let pool = &mut *self.writer.write()?;
        pool.clear_index();
        Ok(())
    }

    /// Pin held blocks that have a hash; they are evicted last. Returns how many were not pinned.
    fn pin(&self, py: Python<'_>, blocks: Blocks) -> Result<usize> {
        let pool = &mut *self.writer.write()?;
        run(py, blocks.0.len(), || pool.pin(&blocks.0)).map_err(bad_blocks)
    }

    /// Take the pins off held blocks. Returns how many were pinned.
    fn unpin(&self, py: Python<'_>, blocks: Blocks) -> Result<usize> {
        let pool = &mut *self.writer.write()?;
        run(py, blocks.0.len(), || pool.unpin(&blocks.0)).map_err(bad_blocks)
    }

    /// Move the oldest `count` free pinned blocks to the regular tier. Returns how many there were.
    fn demote(&self, py: Python<'_>, count: Number<names::Count>) -> Result<usize> {
        let count = count.0;
        let pool = &mut *self.writer.write()?;
        Ok(run(py, count, || pool.demote(count)))
    }

    /// Set the number of blocks, the null block counted. Returns how many above it are still held.
    fn resize(&self, py: Python<'_>, num_blocks: Number<names::NumBlocks>) -> Result<usize> {
        let num_blocks = num_blocks.0;
        let pool = &mut *self.writer.write()?;
        let work = pool.num_blocks().max(num_blocks);
        Ok(run(py, work, || pool.resize(num_blocks))?)
    }

    /// Blocks, the null block counted, as `num_blocks` is wherever it is given or returned.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.pool.num_blocks()
    }

    /// Blocks that nobody holds.
    #[getter]
    fn num_free_blocks(&self) -> usize {
        self.pool.num_free()
    }

    /// The free blocks, the one to be handed out next first. For debugging.
    fn free_order(&self, py: Python<'_>) -> Result<Vec<u32>> {
        let pool = &*self.writer.pause()?;
        Ok(run(py, pool.num_blocks(), || ids_of(&pool.free_order())))
    }

    /// The blocks that hold a hash, lowest id first. For debugging.
    fn cached_blocks(&self, py: Python<'_>) -> Result<Vec<u32>> {
        let pool = &*self.writer.pause()?;
        Ok(run(py, pool.num_blocks(), || ids_of(&pool.cached_blocks())))
    }

    /// Lifetime counts, and blocks by state.
    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        store_stats(py, &self.pool)
    }

    /// Check every invariant of the pool; raises RuntimeError that names the broken one.
    fn validate(&self, py: Python<'_>) -> Result<()> {
        let pool = &*self.writer.pause()?;
        Ok(run(py, pool.num_blocks(), || pool.validate())?)
    }

    /// Make the calling thread the one that may write; for a shared pool that changes nothing.
    fn adopt_writer(&self) -> Result<()> {
        self.writer.adopt()
    }
}
