//! What the cache tells of itself: counts, the map, its logs of evictions and events, and checks.

use std::time::Duration;

use numpy::{IntoPyArray, PyArray2, PyArrayMethods};
use prefixcache_core::BlockStore;
use prefixcache_core::pool::BlockState;
use prefixcache_core::sequence as core;
use prefixcache_core::store::Lookup;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::PrefixCache;
use crate::arguments::{List, Number, ids_of, or_empty};
use crate::detach::run;
use crate::dicts::set_fields;
use crate::errors::Result;
use crate::events::{Event, EventSnapshot, event};
use crate::evictions;
use crate::exclusive::Exclusive;
use crate::names;
use crate::sequence::Batch;

/// Counts in rows and columns.
type CountTable<'py> = Bound<'py, PyArray2<u32>>;

#[pymethods]
impl PrefixCache {
    /// Blocks that nobody holds.
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
        set_fields!(dict, core.stats(); queries, hits);
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
    #[pyo3(signature = (capacity, gap_bounds=None), text_signature = "($self, capacity, gap_bounds=())")]
    fn listen(
        &self,
        capacity: Number<names::Capacity>,
        gap_bounds: Option<List<names::GapBounds, Duration>>,
    ) -> Result<()> {
        Ok(self.0.reader()?.store().evictions().listen(capacity.0, &or_empty(gap_bounds))?)
    }

    /// Take up to `max_evictions` evictions out of the log, the oldest first, as arrays. Any thread.
    fn take_evictions<'py>(
        &self,
        py: Python<'py>,
        max_evictions: Number<names::MaxEvictions>,
    ) -> Result<Bound<'py, PyDict>> {
        let core = self.0.reader()?;
        let evictions = py.detach(|| {
            let mut evictions = Vec::new();
            core.store().evictions().take(max_evictions.0, &mut evictions);
            evictions
        });
        evictions::arrays(py, &evictions)
    }

    /// How many evictions the log had no room for. Any thread.
    #[getter]
    fn missed_evictions(&self) -> Result<u64> {
        Ok(self.0.reader()?.store().evictions().missed())
    }

    /// `take_evictions`, by its first name.
    fn take_losses<'py>(
        &self,
        py: Python<'py>,
        max_losses: Number<names::OldMaxEvictions>,
    ) -> Result<Bound<'py, PyDict>> {
        self.take_evictions(py, Number::new(max_losses.0))
    }

    /// `missed_evictions`, by its first name.
    #[getter]
    fn missed_losses(&self) -> Result<u64> {
        self.missed_evictions()
    }

    /// How many gaps between uses lie up to each bound, above the last, and their sum in seconds.
    fn reuse_gaps(&self) -> Result<(Vec<u64>, f64)> {
        let gaps = self.0.reader()?.store().evictions().reuse_gaps();
        Ok((gaps.counts, gaps.sum.as_secs_f64()))
    }

    /// Keep a record of what can be found and cannot any more, for `take_events`. The writer's thread.
    fn keep_events(&self) -> Result<()> {
        let core = &mut *self.0.write()?;
        let reader = core.keep_events()?;
        // The pool refuses a second event_log, so nothing stands here.
        let _ = self.0.events.set(Exclusive::new(reader));
        Ok(())
    }

    /// Take the oldest changes of what can be found, about `max_blocks` blocks of them. Any thread.
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
}

/// What a pool tells of itself.
pub fn store_stats<'py>(py: Python<'py>, store: &impl Lookup) -> Result<Bound<'py, PyDict>> {
    let stats = store.stats();
    let dict = PyDict::new(py);
    set_fields!(
        dict, stats;
        evictions, allocations, touches, pins, demotions, pinned_evictions, pinned_hits,
        cached as "cached_blocks", in_use as "blocks_in_use", held_above as "held_above_blocks",
        moved as "moved_blocks", lost_to_resize as "lost_to_resize_blocks", free as "free_blocks",
        pinned as "pinned_blocks", pinned_free as "pinned_free_blocks",
    );
    Ok(dict)
}
