//! The Python class `BlockPool`: the pool alone, for a caller that keeps its own hashes and tables.

use prefixcache_core::error::Exhausted;
use prefixcache_core::id::{BlockHash, BlockId, Epoch, GroupId};
use prefixcache_core::plain::PlainPool;
use prefixcache_core::store::{BlockKey, BlockStore, Registration};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{
    block_ids as as_blocks, group as as_group, hash, hashes as as_hashes, ids_of, number,
};
use crate::errors::{IntoPyErr, bad_blocks, in_use, out_of_range};
use crate::exclusive::{Exclusive, Using};
use crate::prefix_cache::{pool_config, store_stats};

type Pool = PlainPool;

/// A pool of blocks that are handed out, counted, given back, and found again by their hashes.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct BlockPool(Exclusive<Pool>);

impl BlockPool {
    fn pool(&self) -> PyResult<Using<'_, Pool>> {
        self.0.try_use().ok_or_else(|| in_use("the pool"))
    }
}

/// Fails for more blocks than the pool has at all.
fn check_count(name: &'static str, count: usize, pool: &impl BlockStore) -> PyResult<()> {
    let most = pool.num_blocks() - 1;
    if count <= most {
        return Ok(());
    }
    let reason = format!("must be at most {most}, the blocks of the pool, not {count}");
    Err(out_of_range(name, reason))
}

fn keys(hashes: &[BlockHash], group: GroupId) -> Vec<BlockKey> {
    let key = |&hash| BlockKey::new(hash, group);
    hashes.iter().map(key).collect()
}

#[pymethods]
impl BlockPool {
    /// A pool of `num_blocks` blocks, block 0, the null block, counted.
    #[new]
    #[pyo3(signature = (num_blocks, *, free_order="unhashed_first", max_blocks=None))]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        free_order: &str,
        max_blocks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let config = pool_config(num_blocks, max_blocks, free_order)?;
        let pool = Pool::new(config).map_err(IntoPyErr::into_py_err)?;
        Ok(Self(Exclusive::new(pool)))
    }

    /// Take `count` blocks from the front of the free order, all or none; None when they are lacking.
    fn allocate(&self, count: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u32>>> {
        let count = number("count", count)?;
        let pool = self.pool()?;
        check_count("count", count, &*pool)?;
        let mut blocks = Vec::with_capacity(count);
        let taken = pool.allocate(count, &mut blocks);
        Ok(taken.is_ok().then(|| ids_of(&blocks)))
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
        #[pyo3(from_py_with = as_hashes)] hashes: Vec<BlockHash>,
        num_new: Option<&Bound<'_, PyAny>>,
        group: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<(usize, Vec<u32>)>> {
        let num_new = num_new.map_or(Ok(0), |count| number("num_new", count))?;
        let keys = keys(&hashes, group_or_first(group)?);
        let pool = self.pool()?;
        check_count("num_new", num_new, &*pool)?;
        let mut blocks = Vec::with_capacity(keys.len() + num_new);
        match pool.commit(&keys, num_new, &mut blocks) {
            Ok(hits) => Ok(Some((hits, ids_of(&blocks)))),
            Err(Exhausted { .. }) => Ok(None),
        }
    }

    /// The block that hits for `block_hash`, or None.
    #[pyo3(signature = (block_hash, group=None), text_signature = "($self, block_hash, group=0)")]
    fn lookup(
        &self,
        block_hash: &Bound<'_, PyAny>,
        group: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<u32>> {
        let key = BlockKey::new(hash("block_hash", block_hash)?, group_or_first(group)?);
        Ok(self.pool()?.lookup(&key).map(BlockId::get))
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
        #[pyo3(from_py_with = as_blocks)] blocks: Vec<BlockId>,
        #[pyo3(from_py_with = as_hashes)] hashes: Vec<BlockHash>,
        epoch: &Bound<'_, PyAny>,
        group: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Option<u32>>> {
        let epoch = Epoch::new(number("epoch", epoch)?);
        let keys = keys(&hashes, group_or_first(group)?);
        if blocks.len() != keys.len() {
            let reason = format!(
                "must be one for each of {} blocks, not {}",
                blocks.len(),
                keys.len()
            );
            return Err(out_of_range("hashes", reason));
        }
        let pool = self.pool()?;
        let register = |(&block, key)| match pool.register(block, key, epoch) {
            Ok(Registration::Twin(holder)) => Ok(Some(holder.get())),
            Ok(Registration::New | Registration::Already | Registration::Stale) => Ok(None),
            Err(misuse) => Err(bad_blocks(misuse)),
        };
        blocks.iter().zip(keys).map(register).collect()
    }

    /// Give up one hold of each block; those without a holder join the free blocks in this order.
    ///
    /// At a block that cannot be released it raises: those before it are released, the rest is not.
    fn release(&self, #[pyo3(from_py_with = as_blocks)] blocks: Vec<BlockId>) -> PyResult<()> {
        self.pool()?.release(&blocks).map_err(bad_blocks)
    }

    /// Counts the clears of the index.
    #[getter]
    fn epoch(&self) -> PyResult<u32> {
        Ok(self.pool()?.epoch().get())
    }

    /// Forget every hash, in constant time.
    fn clear_index(&self) -> PyResult<()> {
        self.pool()?.clear_index();
        Ok(())
    }

    /// Pin held blocks that have a hash; they are evicted last. Returns how many were not pinned.
    fn pin(&self, #[pyo3(from_py_with = as_blocks)] blocks: Vec<BlockId>) -> PyResult<usize> {
        self.pool()?.pin(&blocks).map_err(bad_blocks)
    }

    /// Take the pins off held blocks. Returns how many were pinned.
    fn unpin(&self, #[pyo3(from_py_with = as_blocks)] blocks: Vec<BlockId>) -> PyResult<usize> {
        self.pool()?.unpin(&blocks).map_err(bad_blocks)
    }

    /// Move the oldest `count` free pinned blocks to the regular tier. Returns how many there were.
    fn demote(&self, count: &Bound<'_, PyAny>) -> PyResult<usize> {
        let count = number("count", count)?;
        Ok(self.pool()?.demote(count))
    }

    /// Set the number of blocks, the null block counted. Returns how many above it are still held.
    fn resize(&self, num_blocks: &Bound<'_, PyAny>) -> PyResult<usize> {
        let num_blocks = number("num_blocks", num_blocks)?;
        let busy = self.pool()?.resize(num_blocks);
        busy.map_err(IntoPyErr::into_py_err)
    }

    /// Blocks that can be handed out: the null block is not counted.
    #[getter]
    fn num_blocks(&self) -> PyResult<usize> {
        Ok(self.pool()?.num_blocks() - 1)
    }

    /// Blocks that nobody holds.
    #[getter]
    fn num_free_blocks(&self) -> PyResult<usize> {
        Ok(self.pool()?.num_free())
    }

    /// The free blocks, the one to be handed out next first. For debugging.
    fn free_order(&self) -> PyResult<Vec<u32>> {
        Ok(ids_of(&self.pool()?.free_order()))
    }

    /// The blocks that hold a hash, lowest id first. For debugging.
    fn cached_blocks(&self) -> PyResult<Vec<u32>> {
        Ok(ids_of(&self.pool()?.cached_blocks()))
    }

    /// Lifetime counts, and blocks by state.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        store_stats(py, &*self.pool()?)
    }

    /// Check every invariant of the pool; raises RuntimeError that names the broken one.
    fn validate(&self) -> PyResult<()> {
        self.pool()?.validate().map_err(IntoPyErr::into_py_err)
    }
}

fn group_or_first(group: Option<&Bound<'_, PyAny>>) -> PyResult<GroupId> {
    group.map_or(Ok(GroupId::new(0)), as_group)
}
