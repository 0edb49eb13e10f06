//! The Python class `BlockPool`: the pool alone, for a caller that keeps its own hashes and tables.

use prefixcache_core::id::{BlockHash, BlockId, Epoch, GroupId};
use prefixcache_core::pool::{self, Shared, SingleWriter};
use prefixcache_core::store::{BlockKey, BlockStore, FreeOrder, PoolConfig, Registration};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{Blocks, Group, List, Number, One, OneOf, ids_of, or_first};
use crate::detach::run;
use crate::errors::{IntoPyErr, bad_blocks, out_of_range};
use crate::names;
use crate::prefix_cache::{pool_config, store_stats};
use crate::shared_cache::{Either, on};
use crate::writer::{Threads, Writer, Writing};

/// Either form of the pool.
type Pool = Either<pool::BlockPool<SingleWriter>, pool::BlockPool<Shared>>;

/// A pool of blocks that are handed out, counted, given back, and found again by their hashes.
#[pyclass(frozen, module = "prefixcache.core")]
pub struct BlockPool {
    pool: Pool,
    writer: Writer,
}

impl BlockPool {
    /// The pool, to change while the second value lives.
    fn pool_to_write(&self) -> PyResult<(&Pool, Writing<'_>)> {
        Ok((&self.pool, self.writer.write()?))
    }
}

impl Pool {
    fn new(config: PoolConfig, threads: Threads) -> PyResult<Self> {
        let pool = match threads {
            Threads::SingleWriter => pool::BlockPool::new(config).map(Self::SingleWriter),
            Threads::Shared => pool::BlockPool::new(config).map(Self::Shared),
        };
        pool.map_err(IntoPyErr::into_py_err)
    }

    /// The null block counted.
    fn num_blocks(&self) -> usize {
        on!(self, |pool| pool.num_blocks())
    }

    /// Fails for more blocks than the pool has at all.
    fn check_count(&self, name: &'static str, count: usize) -> PyResult<()> {
        let most = self.num_blocks() - 1;
        if count <= most {
            return Ok(());
        }
        let reason = format!("must be at most {most}, the blocks of the pool, not {count}");
        Err(out_of_range(name, reason))
    }
}

fn keys(hashes: &[BlockHash], group: GroupId) -> impl ExactSizeIterator<Item = BlockKey> + Clone {
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
    ) -> PyResult<Self> {
        let config = pool_config(num_blocks, max_blocks, free_order.0);
        Ok(Self {
            pool: Pool::new(config, threads.0)?,
            writer: Writer::new(threads.0, ()),
        })
    }

    /// Take `count` blocks from the front of the free order, all or none; None when they are lacking.
    fn allocate(&self, py: Python<'_>, count: Number<names::Count>) -> PyResult<Option<Vec<u32>>> {
        let count = count.0;
        let (pool, _writing) = self.pool_to_write()?;
        pool.check_count("count", count)?;
        Ok(run(py, count, || {
            let mut blocks = Vec::with_capacity(count);
            let taken = on!(pool, |pool| pool.allocate(count, &mut blocks));
            taken.is_ok().then(|| ids_of(&blocks))
        }))
    }

    /// Take the blocks of the leading `hashes` that hit, then `num_new` new ones, all or none.
    ///
    /// Returns how many hits there are and all blocks, hits first; None when blocks are lacking.
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
    ) -> PyResult<Option<(usize, Vec<u32>)>> {
        let num_new = num_new.map_or(0, |count| count.0);
        let keys = keys(&hashes.0, or_first(group));
        let (pool, _writing) = self.pool_to_write()?;
        pool.check_count("num_new", num_new)?;
        let count = keys.len() + num_new;
        Ok(run(py, count, || {
            let mut blocks = Vec::with_capacity(count);
            let hits = on!(pool, |pool| pool.commit(keys, num_new, &mut blocks)).ok()?;
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
        let key = BlockKey::new(block_hash.0, or_first(group));
        on!(&self.pool, |pool| pool.lookup(&key)).map(BlockId::get)
    }

    /// Let held blocks be found under `hashes`, one for each.
    ///
    /// `epoch` is the value of `epoch` from before the blocks were allocated: nothing is registered if
    /// the index was cleared since. Returns, for each block, the block that already holds the same
    /// content and hits, or None.
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
    ) -> PyResult<Vec<Option<u32>>> {
        let most = Epoch::new(u64::MAX).get();
        if epoch.0 > most {
            return Err(out_of_range(
                "epoch",
                format!("must be at most {most}, not {}", epoch.0),
            ));
        }
        let (blocks, epoch) = (blocks.0, Epoch::new(epoch.0));
        let keys = keys(&hashes.0, or_first(group));
        if blocks.len() != keys.len() {
            let reason = format!(
                "must be one for each of {} blocks, not {}",
                blocks.len(),
                keys.len()
            );
            return Err(out_of_range("hashes", reason));
        }
        let (pool, _writing) = self.pool_to_write()?;
        let register = |(&block, key)| match on!(pool, |pool| pool.register(block, key, epoch)) {
            Ok(Registration::Twin(holder)) => Ok(Some(holder.get())),
            Ok(Registration::New | Registration::Already | Registration::Stale) => Ok(None),
            Err(misuse) => Err(misuse),
        };
        let all = blocks.iter().zip(keys);
        run(py, blocks.len(), || {
            all.map(register).collect::<Result<_, _>>()
        })
        .map_err(bad_blocks)
    }

    /// Give up one hold of each block; those without a holder join the free blocks in this order.
    ///
    /// At a block that cannot be released it raises: those before it are released, the rest is not.
    fn release(&self, py: Python<'_>, blocks: Blocks) -> PyResult<()> {
        let (pool, _writing) = self.pool_to_write()?;
        run(py, blocks.0.len(), || {
            on!(pool, |pool| pool.release(&blocks.0))
        })
        .map_err(bad_blocks)
    }

    /// Counts the clears of the index.
    #[getter]
    fn epoch(&self) -> u64 {
        on!(&self.pool, |pool| pool.epoch()).get()
    }

    /// Forget every hash, in constant time.
    fn clear_index(&self) -> PyResult<()> {
        let (pool, _writing) = self.pool_to_write()?;
        on!(pool, |pool| pool.clear_index());
        Ok(())
    }

    /// Pin held blocks that have a hash; they are evicted last. Returns how many were not pinned.
    fn pin(&self, py: Python<'_>, blocks: Blocks) -> PyResult<usize> {
        let (pool, _writing) = self.pool_to_write()?;
        run(py, blocks.0.len(), || on!(pool, |pool| pool.pin(&blocks.0))).map_err(bad_blocks)
    }

    /// Take the pins off held blocks. Returns how many were pinned.
    fn unpin(&self, py: Python<'_>, blocks: Blocks) -> PyResult<usize> {
        let (pool, _writing) = self.pool_to_write()?;
        run(py, blocks.0.len(), || {
            on!(pool, |pool| pool.unpin(&blocks.0))
        })
        .map_err(bad_blocks)
    }

    /// Move the oldest `count` free pinned blocks to the regular tier. Returns how many there were.
    fn demote(&self, py: Python<'_>, count: Number<names::Count>) -> PyResult<usize> {
        let count = count.0;
        let (pool, _writing) = self.pool_to_write()?;
        Ok(run(py, count, || on!(pool, |pool| pool.demote(count))))
    }

    /// Set the number of blocks, the null block counted. Returns how many above it are still held.
    fn resize(&self, py: Python<'_>, num_blocks: Number<names::NumBlocks>) -> PyResult<usize> {
        let num_blocks = num_blocks.0;
        let (pool, _writing) = self.pool_to_write()?;
        let work = pool.num_blocks().max(num_blocks);
        let busy = run(py, work, || on!(pool, |pool| pool.resize(num_blocks)));
        busy.map_err(IntoPyErr::into_py_err)
    }

    /// Blocks, the null block counted, as `num_blocks` is wherever it is given or told.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.pool.num_blocks()
    }

    /// Blocks that nobody holds.
    #[getter]
    fn num_free_blocks(&self) -> usize {
        on!(&self.pool, |pool| pool.num_free())
    }

    /// The free blocks, the one to be handed out next first. For debugging.
    fn free_order(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let (pool, _paused) = (&self.pool, self.writer.pause()?);
        Ok(run(py, pool.num_blocks(), || {
            ids_of(&on!(pool, |pool| pool.free_order()))
        }))
    }

    /// The blocks that hold a hash, lowest id first. For debugging.
    fn cached_blocks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let (pool, _paused) = (&self.pool, self.writer.pause()?);
        Ok(run(py, pool.num_blocks(), || {
            ids_of(&on!(pool, |pool| pool.cached_blocks()))
        }))
    }

    /// Lifetime counts, and blocks by state.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        on!(&self.pool, |pool| store_stats(py, pool))
    }

    /// Check every invariant of the pool; raises RuntimeError that names the broken one.
    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        let (pool, _paused) = (&self.pool, self.writer.pause()?);
        let sound = run(py, pool.num_blocks(), || on!(pool, |pool| pool.validate()));
        sound.map_err(IntoPyErr::into_py_err)
    }

    /// Make the calling thread the one that may write; for a shared pool that changes nothing.
    fn adopt_writer(&self) -> PyResult<()> {
        self.writer.adopt()
    }
}
