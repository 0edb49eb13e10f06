//! Changes of what can be found in a cache, and the Python class `EventSnapshot`.

use prefixcache_core::events::{Change, Run, ShortHash, Snapshot};
use pyo3::prelude::*;

use crate::arguments::Number;
use crate::errors::Result;
use crate::exclusive::Exclusive;
use crate::names;

/// Kind, group, hash before the first block, hashes and tokens.
pub type Event = (&'static str, u16, Option<u64>, Vec<u64>, Vec<u32>);

fn plain(hashes: Vec<ShortHash>) -> Vec<u64> {
    hashes.into_iter().map(|hash| hash.0).collect()
}

pub fn event(change: Change) -> Event {
    match change {
        Change::Stored(run) => stored(run),
        Change::Removed(group, hashes) => ("removed", group.get(), None, plain(hashes), Vec::new()),
        Change::Cleared => ("cleared", 0, None, Vec::new(), Vec::new()),
    }
}

fn stored(run: Run) -> Event {
    let parent = run.parent.map(|parent| parent.0);
    ("stored", run.group.get(), parent, plain(run.hashes), run.tokens)
}

/// What could be found in a cache at one moment.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct EventSnapshot {
    num_blocks: usize,
    rest: Exclusive<Snapshot>,
}

impl EventSnapshot {
    pub fn new(snapshot: Snapshot) -> Self {
        Self { num_blocks: snapshot.num_blocks(), rest: Exclusive::new(snapshot) }
    }
}

#[pymethods]
impl EventSnapshot {
    /// All its blocks, each counted once a group.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The next runs of blocks, up to about `max_blocks` blocks; empty at the end.
    fn take(&self, py: Python<'_>, max_blocks: Number<names::MaxBlocks>) -> Result<Vec<Event>> {
        let mut rest = self.rest.use_as("self")?;
        let rest = &mut *rest;
        let runs = py.detach(|| {
            let (mut runs, mut taken) = (Vec::new(), 0);
            while taken < max_blocks.0
                && let Some(run) = rest.next()
            {
                taken += run.hashes.len();
                runs.push(run);
            }
            runs
        });
        Ok(runs.into_iter().map(stored).collect())
    }
}
