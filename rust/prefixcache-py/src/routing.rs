//! The Python classes `ReplicaIndex` and `ReplicaChooser`.

use numpy::{IntoPyArray, PyArray1};
use prefixcache_serving::routing::choice::{Chooser, InvalidWeight, Prompt, Weights, identity};
use prefixcache_serving::routing::in_turn::InTurn;
use prefixcache_serving::routing::index::{IndexError, ReplicaIndex as Index};
use prefixcache_serving::routing::replica::ReplicaId;
use pyo3::prelude::*;

use crate::arguments::{Array, Number, One, or};
use crate::errors::{Failure, Result, ensure, out_of_range, panicked};
use crate::names::{self, Name};

/// Blocks of one call after which another call may come in between.
const BLOCKS_AT_ONCE: usize = 4096;

impl From<IndexError> for Failure {
    fn from(error: IndexError) -> Self {
        out_of_range(names::Replica::NAME, error.to_string())
    }
}

impl From<InvalidWeight> for Failure {
    fn from(InvalidWeight { field, range, value }: InvalidWeight) -> Self {
        out_of_range(field, format!("must be {range}, not {value}"))
    }
}

type Replica = Number<names::Replica, u16>;
type Hashes<'py> = Array<'py, names::Hashes, u64>;

/// What threads use in turn, and its name in errors.
struct Shared<T> {
    value: InTurn<T>,
    name: &'static str,
}

impl<T: Send> Shared<T> {
    fn new(name: &'static str, value: T) -> Self {
        Self { value: InTurn::new(value), name }
    }

    /// Does `work` once no other call uses the value, detached from the interpreter: one that waits attached would
    /// keep all other threads waiting. Fails after a call that panicked.
    fn with<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut T) -> R + Send) -> Result<R> {
        py.detach(|| self.value.with(work)).map_err(|_| panicked(self.name))
    }
}

/// Which blocks each replica has cached.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct ReplicaIndex(Shared<Index>);

impl ReplicaIndex {
    /// Does `work` with some of the blocks after the other, and adds up what it returns.
    fn in_parts(
        &self,
        py: Python<'_>,
        hashes: &Hashes<'_>,
        work: impl Fn(&mut Index, &[u64]) -> Result<usize, IndexError> + Sync,
    ) -> Result<usize> {
        let hashes = hashes.read()?.slice()?.to_vec();
        let (first, rest) = hashes.split_at(hashes.len().min(BLOCKS_AT_ONCE));
        let mut sum = self.0.with(py, |index| work(index, first))??;
        for part in rest.chunks(BLOCKS_AT_ONCE) {
            sum += self.0.with(py, |index| work(index, part))??;
        }
        Ok(sum)
    }
}

#[pymethods]
impl ReplicaIndex {
    #[new]
    fn new(max_blocks: Number<names::MaxBlocks>) -> Self {
        Self(Shared::new("index", Index::new(max_blocks.0)))
    }

    fn add_replica(&self, py: Python<'_>) -> Result<u16> {
        Ok(self.0.with(py, Index::add_replica)??.0)
    }

    fn remove_replica(&self, py: Python<'_>, replica: Replica) -> Result<()> {
        Ok(self.0.with(py, |index| index.remove_replica(ReplicaId(replica.0)))??)
    }

    fn clear(&self, py: Python<'_>, replica: Replica) -> Result<()> {
        Ok(self.0.with(py, |index| index.clear(ReplicaId(replica.0)))??)
    }

    fn stored(&self, py: Python<'_>, replica: Replica, hashes: Hashes<'_>) -> Result<usize> {
        let id = ReplicaId(replica.0);
        self.in_parts(py, &hashes, |index, part| index.stored(id, part))
    }

    fn removed(&self, py: Python<'_>, replica: Replica, hashes: Hashes<'_>) -> Result<()> {
        let id = ReplicaId(replica.0);
        let removed = |index: &mut Index, part: &[u64]| index.removed(id, part).map(|()| 0);
        self.in_parts(py, &hashes, removed).map(drop)
    }

    fn expected(&self, py: Python<'_>, replica: Replica, hashes: Hashes<'_>) -> Result<usize> {
        let id = ReplicaId(replica.0);
        self.in_parts(py, &hashes, |index, part| index.expected(id, part))
    }

    fn settled(&self, py: Python<'_>, replica: Replica, hashes: Hashes<'_>) -> Result<()> {
        let id = ReplicaId(replica.0);
        let settled = |index: &mut Index, part: &[u64]| index.settled(id, part).map(|()| 0);
        self.in_parts(py, &hashes, settled).map(drop)
    }

    fn hits<'py>(&self, py: Python<'py>, hashes: Hashes<'py>) -> Result<Bound<'py, PyArray1<u32>>> {
        let hashes = hashes.read()?.slice()?.to_vec();
        let hits = self.0.with(py, |index| {
            let mut hits = Vec::new();
            index.hits(&hashes, &mut hits);
            hits
        })?;
        Ok(hits.into_pyarray(py))
    }

    #[getter]
    fn num_blocks(&self, py: Python<'_>) -> Result<usize> {
        self.0.with(py, |index| index.num_blocks())
    }
}

/// Chooses replicas by what they have cached and have to do.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct ReplicaChooser(Shared<Chooser>);

#[pymethods]
impl ReplicaChooser {
    #[new]
    #[pyo3(signature = (*, overlap_weight, request_tokens, window_tokens, balance, affinity, seed=None))]
    fn new(
        overlap_weight: One<names::OverlapWeight, f64>,
        request_tokens: One<names::RequestTokens, f64>,
        window_tokens: One<names::WindowTokens, f64>,
        balance: One<names::Balance, f64>,
        affinity: One<names::Affinity, f64>,
        seed: Option<Number<names::Seed>>,
    ) -> Result<Self> {
        let weights = Weights {
            overlap_weight: overlap_weight.0,
            request_tokens: request_tokens.0,
            window_tokens: window_tokens.0,
            balance: balance.0,
            affinity: affinity.0,
        };
        let seed = or(seed, 0) as u64;
        Ok(Self(Shared::new("chooser", Chooser::new(weights, seed)?)))
    }

    fn add_replica(&self, py: Python<'_>, replica: Replica, name: &str) -> Result<()> {
        self.0.with(py, |chooser| chooser.add_replica(ReplicaId(replica.0), name))
    }

    fn remove_replica(&self, py: Python<'_>, replica: Replica) -> Result<()> {
        self.0.with(py, |chooser| chooser.remove_replica(ReplicaId(replica.0)))
    }

    #[pyo3(signature = (hit_tokens, prompt_tokens, loads, *, key=None, most=None))]
    fn choose(
        &self,
        py: Python<'_>,
        hit_tokens: Array<'_, names::HitTokens, u32>,
        prompt_tokens: Number<names::PromptTokens>,
        loads: Array<'_, names::Loads, f64>,
        key: Option<&str>,
        most: Option<Number<names::Most>>,
    ) -> Result<Vec<u16>> {
        let hit_tokens = hit_tokens.read()?.slice()?.to_vec();
        let loads = loads.read()?.slice()?.to_vec();
        let (count, given) = (loads.len(), hit_tokens.len());
        ensure!(count == given, names::HitTokens::NAME, "must have {count} items, not {given}");
        for load in &loads {
            let fits = (0.0..=f64::INFINITY).contains(load);
            ensure!(fits, names::Loads::NAME, "must be numbers from 0, not {load}");
        }
        let prompt = Prompt {
            num_tokens: prompt_tokens.0,
            hit_tokens: &hit_tokens,
            loads: &loads,
            key: key.map(identity),
        };
        let most = or(most, usize::MAX);
        let chosen = self.0.with(py, |chooser| chooser.choose(&prompt, most))?;
        Ok(chosen.iter().map(|id| id.0).collect())
    }

    fn note(
        &self,
        py: Python<'_>,
        replica: Replica,
        num_tokens: Number<names::NumTokens>,
    ) -> Result<()> {
        self.0.with(py, |chooser| chooser.note(ReplicaId(replica.0), num_tokens.0))
    }
}
