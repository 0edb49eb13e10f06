//! The Python class `Sequence`.

use std::sync::Weak;

use prefixcache_core::error::Argument;
use prefixcache_core::hints::{Hint, Hints, Owner};
use prefixcache_core::sequence as core;
use prefixcache_core::sequence::retention::{Pins, Retention};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{List, Number, ids_of, or};
use crate::detach;
use crate::errors::{Result, ensure, out_of_range};
use crate::exclusive::{Exclusive, Using};
use crate::names;
use crate::shared_cache::Cache;
use crate::tokens::Tokens;

/// A request's tokens, block hashes and block tables. Made by `PrefixCache.new_sequence`.
#[pyclass(frozen, module = "prefixcache.core")]
pub struct Sequence {
    sequence: Exclusive<core::Sequence>,
    cache: Weak<Cache>,
}

impl Sequence {
    pub fn new(sequence: core::Sequence, cache: Weak<Cache>) -> Self {
        let sequence = Exclusive::new(sequence);
        Self { sequence, cache }
    }

    /// The sequence, unless another call is using it.
    pub fn use_as(&self, argument: impl Into<Argument>) -> Result<Using<'_, core::Sequence>> {
        self.sequence.use_as(argument)
    }
}

impl Drop for Sequence {
    /// A sequence that was not released gives its blocks back when it is collected.
    fn drop(&mut self) {
        let Some(mut sequence) = self.sequence.try_use() else {
            return;
        };
        if sequence.is_committed() {
            sequence.abandon();
            drop(sequence);
            if let Some(cache) = self.cache.upgrade() {
                cache.reclaim();
            }
        }
    }
}

#[pymethods]
impl Sequence {
    /// Tokens known: the prompt and what was generated.
    #[getter]
    fn num_tokens(&self) -> Result<usize> {
        Ok(self.use_as("sequence")?.num_tokens())
    }

    /// Tokens that have a KV slot: hits and allocated ones; 0 while nothing is held.
    #[getter]
    fn num_slots(&self) -> Result<usize> {
        Ok(self.use_as("sequence")?.num_slots())
    }

    /// Tokens that have a KV slot in every group; 0 while nothing is held.
    #[getter]
    fn num_ready_slots(&self) -> Result<usize> {
        Ok(self.use_as("sequence")?.num_ready_slots())
    }

    /// The version of the weights that its hashes stand for.
    #[getter]
    fn weight_version(&self) -> Result<u64> {
        Ok(self.use_as("sequence")?.weight_version())
    }

    /// The same tokens under the weights of another version, with which the new sequence stays.
    fn at_version(
        &self,
        py: Python<'_>,
        version: Number<names::Version, u64>,
    ) -> Result<Option<Self>> {
        let sequence = &*self.use_as("sequence")?;
        let at = || sequence.at_version(version.0);
        let other = detach::run_on_tokens(py, sequence.num_tokens(), at);
        Ok(other.map(|other| Self::new(other, self.cache.clone())))
    }

    /// Say which of the blocks that it drops keep their content.
    #[pyo3(
        signature = (interval, *, pin=false, min_pin_blocks=None, pin_prefix=true),
        text_signature = "($self, interval, *, pin=False, min_pin_blocks=0, pin_prefix=True)"
    )]
    fn set_retention(
        &self,
        interval: Option<Number<names::Interval>>,
        pin: bool,
        min_pin_blocks: Option<Number<names::MinPinBlocks>>,
        pin_prefix: bool,
    ) -> Result<()> {
        let pins = pin.then(|| Pins::new(or(min_pin_blocks, 0), pin_prefix));
        let retention = match interval {
            None if pin => return Err(out_of_range("interval", "must not be None with pin")),
            None => Retention::Everything,
            Some(interval) => Retention::Anchors { interval: interval.0, pins },
        };
        self.use_as("sequence")?.set_retention(retention);
        Ok(())
    }

    /// Make `position` (tokens) an anchor: a later request can stand at the last full block before it.
    fn add_anchor(&self, position: Number<names::Position>) -> Result<()> {
        self.use_as("sequence")?.add_anchor(position.0);
        Ok(())
    }

    /// Make `position` (tokens) an anchor, since the prompt ends there.
    fn add_prompt_end(&self, position: Number<names::Position>) -> Result<()> {
        self.use_as("sequence")?.add_prompt_end(position.0);
        Ok(())
    }

    /// Say how dear ranges of the tokens are: (start, end or None, priority, TTL in seconds or None).
    fn set_hints(&self, owner: &str, hints: List<names::Hints, Hint>) -> Result<()> {
        let hints = Hints::new(Owner::named(owner), hints.0)?;
        if self.cache.upgrade().is_some_and(|cache| cache.writer.is_shared()) {
            let reason = "hints need a cache that one thread writes to: threads=\"single_writer\"";
            return Err(PyRuntimeError::new_err(reason).into());
        }
        self.use_as("sequence")?.set_hints(hints);
        Ok(())
    }

    /// Tokens whose KV is there; 0 while nothing is held.
    #[getter]
    fn num_filled(&self) -> Result<usize> {
        Ok(self.use_as("sequence")?.num_filled())
    }

    /// Whether the sequence holds blocks: from a commit until its release.
    #[getter]
    fn is_committed(&self) -> Result<bool> {
        Ok(self.use_as("sequence")?.is_committed())
    }

    /// Add tokens, and hash the blocks that they fill.
    fn extend(&self, py: Python<'_>, tokens: Tokens) -> Result<()> {
        let (sequence, tokens) = (&mut *self.use_as("sequence")?, tokens.0);
        detach::run_on_tokens(py, tokens.len(), || sequence.extend(&tokens));
        Ok(())
    }

    /// The blocks of a group, in the order of the positions; empty while nothing is held.
    #[pyo3(signature = (group=None), text_signature = "($self, group=0)")]
    fn block_table(&self, group: Option<Number<names::GroupIndex>>) -> Result<Vec<u32>> {
        let group = or(group, 0);
        let sequence = self.use_as("sequence")?;
        let groups = sequence.num_groups();
        ensure!(group < groups, "group", "must be below {groups}, not {group}");
        Ok(ids_of(sequence.block_table(group)))
    }

    /// The hashes of full blocks `start` to `stop`, 32 bytes each.
    #[pyo3(signature = (start=None, stop=None), text_signature = "($self, start=0, stop=None)")]
    fn block_hashes<'py>(
        &self,
        py: Python<'py>,
        start: Option<Number<names::Start>>,
        stop: Option<Number<names::Stop>>,
    ) -> Result<Vec<Bound<'py, PyBytes>>> {
        let sequence = self.use_as("sequence")?;
        let hashes = sequence.hashes();
        let stop = stop.map_or(hashes.len(), |stop| stop.0.min(hashes.len()));
        let start = start.map_or(0, |start| start.0.min(stop));
        let wanted = &hashes[start..stop];
        Ok(wanted.iter().map(|hash| PyBytes::new(py, hash.as_bytes())).collect())
    }
}

/// The argument `sequences` of a batch call, kept alive and each used by this call alone.
pub type Batch = List<names::Sequences, Py<Sequence>>;

impl Batch {
    /// Uses all sequences; fails at one that another call uses, or that stands in the list twice.
    pub fn use_all(&self) -> Result<Vec<Using<'_, core::Sequence>>> {
        let sequences = self.0.iter().enumerate();
        sequences
            .map(|(index, sequence)| sequence.get().use_as(Argument::element("sequences", index)))
            .collect()
    }

    /// Calls `work` with all sequences at once; fails as [`Self::use_all`] does.
    pub fn use_together<T>(
        &self,
        work: impl FnOnce(&mut [&mut core::Sequence]) -> Result<T>,
    ) -> Result<T> {
        let mut batch = self.use_all()?;
        let mut batch: Vec<_> = batch.iter_mut().map(|sequence| &mut **sequence).collect();
        work(&mut batch)
    }
}
