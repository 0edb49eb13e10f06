//! The Python classes `TraceReader` and `TraceReplay`.

use std::path::PathBuf;

use numpy::{Element, IntoPyArray};
use prefixcache_core::EvictionPolicy;
use prefixcache_core::hints::Hint;
use prefixcache_replay::cache::{CacheConfig, ConfigError, Outcome, Snapshots};
use prefixcache_replay::disk::DiskConfig;
use prefixcache_replay::history::History;
use prefixcache_replay::marconi::Marconi;
use prefixcache_replay::optimum::Hits;
use prefixcache_replay::replay::{Replay, ReplayError, Simulation};
use prefixcache_replay::server::{Admission, Latency, PrefillTime, Server};
use prefixcache_replay::trace::{Reader, Request, TraceError};
use pyo3::exceptions::{PyIndexError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{List, Number, Numbers, One, OneOf, Word, or_empty};
use crate::errors::{Failure, Result, in_use, out_of_range};
use crate::exclusive::{Exclusive, Using};
use crate::names::{self, Name};

/// The percentiles that are reported of what requests compute and wait.
const PERCENTILES: [u64; 3] = [50, 90, 99];

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Pool(error) => error.into(),
            ConfigError::Argument(error) => error.into(),
            ConfigError::Listen(error) => error.into(),
        }
    }
}

impl From<ReplayError> for Failure {
    fn from(error: ReplayError) -> Self {
        match error {
            ReplayError::Trace(error) => error.into(),
            ReplayError::Cache(error) => error.into(),
        }
    }
}

/// The requests of a trace, read as a stream.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct TraceReader {
    name: String,
    block_size: usize,
    reader: Exclusive<Reader>,
}

#[pymethods]
impl TraceReader {
    /// Open a trace of any form, plain or compressed by gzip or xz.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> Result<Self> {
        let reader = py.detach(|| Reader::open(&path))?;
        Ok(Self {
            name: reader.name().to_owned(),
            block_size: reader.block_size(),
            reader: Exclusive::new(reader),
        })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// The next requests, up to `most`, as arrays.
    fn read<'py>(&self, py: Python<'py>, most: Number<names::Most>) -> Result<Bound<'py, PyDict>> {
        let reader = &mut *self.reader.use_as("reader")?;
        py.detach(|| Columns::read(reader, most.0))?.into_dict(py)
    }
}

/// Requests side by side.
#[derive(Default)]
struct Columns {
    time_ms: Vec<u64>,
    input_tokens: Vec<u32>,
    output_tokens: Vec<u32>,
    session: Vec<i64>,
    indptr: Vec<u64>,
    block_ids: Vec<u64>,
}

impl Columns {
    fn read(reader: &mut Reader, most: usize) -> Result<Self, TraceError> {
        let mut columns = Self { indptr: vec![0], ..Self::default() };
        let mut request = Request::default();
        while columns.time_ms.len() < most && reader.read(&mut request)? {
            columns.push(&request);
        }
        Ok(columns)
    }

    fn push(&mut self, request: &Request) {
        self.time_ms.push(request.time_ms);
        self.input_tokens.push(request.input_tokens as u32);
        self.output_tokens.push(request.output_tokens as u32);
        self.session.push(request.session.map_or(-1, i64::from));
        self.block_ids.extend(request.prompt());
        self.indptr.push(self.block_ids.len() as u64);
    }

    fn into_dict(self, py: Python<'_>) -> Result<Bound<'_, PyDict>> {
        let dict = PyDict::new(py);
        if self.time_ms.is_empty() {
            return Ok(dict);
        }
        set(&dict, "time_ms", self.time_ms)?;
        set(&dict, "input_tokens", self.input_tokens)?;
        set(&dict, "output_tokens", self.output_tokens)?;
        set(&dict, "session", self.session)?;
        set(&dict, "indptr", self.indptr)?;
        set(&dict, "block_ids", self.block_ids)?;
        Ok(dict)
    }
}

fn set<T: Element>(dict: &Bound<'_, PyDict>, name: &str, values: Vec<T>) -> Result<()> {
    Ok(dict.set_item(name, values.into_pyarray(dict.py()))?)
}

/// Where snapshots of states are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SnapshotRule {
    Anchors,
    Ends,
    Every,
    Marconi,
}

impl Word for SnapshotRule {
    const ARGUMENT: &'static str = "snapshots";
    const WORDS: &'static [(&'static str, Self)] = &[
        ("anchors", Self::Anchors),
        ("ends", Self::Ends),
        ("every", Self::Every),
        ("marconi", Self::Marconi),
    ];
}

impl SnapshotRule {
    fn of_core(self) -> Option<Snapshots> {
        match self {
            Self::Anchors => Some(Snapshots::Anchors),
            Self::Ends => Some(Snapshots::Ends),
            Self::Every => Some(Snapshots::Every),
            Self::Marconi => None,
        }
    }
}

/// A replay before its first batch is made of caches; after that they are its.
enum Stage {
    Collecting(Option<Reader>, Vec<Simulation>),
    Running(Box<Replay>),
}

/// A trace through caches side by side.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct TraceReplay {
    block_size: usize,
    name: String,
    threads: usize,
    with_history: bool,
    caches_answers: bool,
    stage: Exclusive<Stage>,
}

#[pymethods]
impl TraceReplay {
    /// Open a trace, to be replayed with up to `threads` threads.
    #[new]
    #[pyo3(signature = (path, *, threads, with_history=true, caches_answers=false))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        threads: Number<names::ThreadCount>,
        with_history: bool,
        caches_answers: bool,
    ) -> Result<Self> {
        let reader = py.detach(|| Reader::open(&path))?;
        Ok(Self {
            block_size: reader.block_size(),
            name: reader.name().to_owned(),
            threads: threads.0,
            with_history,
            caches_answers,
            stage: Exclusive::new(Stage::Collecting(Some(reader), Vec::new())),
        })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// Add a cache of `num_blocks` blocks, the null block not counted, before the first batch.
    #[pyo3(signature = (
        num_blocks, *, eviction_policy=OneOf(EvictionPolicy::Lru), hints=None, ms_per_token=None,
        ms_per_request=None, objective_ms=None, max_delay_ms=None, snapshots=OneOf(SnapshotRule::Anchors),
        snapshot_blocks=None, disk_blocks=None, min_uses=None
    ), text_signature = "($self, num_blocks, *, eviction_policy='lru', hints=None, ms_per_token=None, \
ms_per_request=None, objective_ms=None, max_delay_ms=None, snapshots='anchors', snapshot_blocks=None, \
disk_blocks=None, min_uses=None)")]
    fn add(
        &self,
        num_blocks: Number<names::NumBlocks>,
        eviction_policy: OneOf<EvictionPolicy>,
        hints: Option<List<names::Hints, Hint>>,
        ms_per_token: Option<One<names::MsPerToken, f64>>,
        ms_per_request: Option<One<names::MsPerRequest, f64>>,
        objective_ms: Option<One<names::ObjectiveMs, f64>>,
        max_delay_ms: Option<One<names::MaxDelayMs, f64>>,
        snapshots: OneOf<SnapshotRule>,
        snapshot_blocks: Option<Number<names::SnapshotBlocks>>,
        disk_blocks: Option<Number<names::DiskBlocks>>,
        min_uses: Option<Number<names::MinUses, u32>>,
    ) -> Result<usize> {
        let snapshot_blocks = snapshot_blocks.map(|blocks| blocks.0);
        let config = CacheConfig {
            num_blocks: num_blocks.0,
            eviction_policy: eviction_policy.0,
            hints: or_empty(hints),
            caches_answers: self.caches_answers,
            snapshots: snapshots.0.of_core().zip(snapshot_blocks),
            disk: disk_blocks
                .zip(min_uses)
                .map(|(blocks, uses)| DiskConfig { num_blocks: blocks.0, min_uses: uses.0 }),
        };
        let admission = match max_delay_ms {
            Some(delay) => Admission::CacheAware { max_delay_ms: milliseconds(delay)? },
            None => Admission::Fcfs,
        };
        let prefill = match ms_per_token {
            Some(ms) => Some(PrefillTime {
                ms_per_token: milliseconds(ms)?,
                ms_per_request: ms_per_request.map_or(Ok(0.0), milliseconds)?,
            }),
            None => None,
        };
        let objective = objective_ms.map_or(Ok(f64::INFINITY), milliseconds)?;
        let server = prefill.map(|prefill| Server::new(prefill, admission, objective));
        let mut stage = self.use_stage()?;
        let Stage::Collecting(_, simulations) = &mut *stage else {
            let reason = "caches are added before the first batch";
            return Err(PyRuntimeError::new_err(reason).into());
        };
        let simulation = match snapshot_blocks.filter(|_| snapshots.0 == SnapshotRule::Marconi) {
            Some(blocks) => Simulation::marconi(Marconi::new(
                num_blocks.0,
                blocks,
                self.block_size,
                self.caches_answers,
            )),
            None => Simulation::new(&config, server, self.block_size)?,
        };
        simulations.push(simulation);
        Ok(simulations.len() - 1)
    }

    /// Run the next batch of requests; False after the last one.
    fn advance(&self, py: Python<'_>) -> Result<bool> {
        let mut stage = self.use_stage()?;
        if let Stage::Collecting(reader, simulations) = &mut *stage {
            let reader = reader.take().ok_or_else(|| in_use("replay"))?;
            let history =
                self.with_history.then(|| History::new(self.block_size, self.caches_answers));
            let simulations = std::mem::take(simulations);
            let replay = Replay::new(reader, simulations, history, self.threads);
            *stage = Stage::Running(Box::new(replay));
        }
        match &mut *stage {
            Stage::Running(replay) => Ok(py.detach(|| replay.advance())?),
            Stage::Collecting(..) => Ok(false),
        }
    }

    /// Bytes of the file that were read so far.
    #[getter]
    fn bytes_read(&self) -> Result<u64> {
        Ok(match &*self.use_stage()? {
            Stage::Collecting(reader, _) => reader.as_ref().map_or(0, Reader::bytes_read),
            Stage::Running(replay) => replay.reader().bytes_read(),
        })
    }

    /// What the requests found in the cache of this number, and what they waited.
    fn outcome<'py>(
        &self,
        py: Python<'py>,
        index: Number<names::Index>,
    ) -> Result<Bound<'py, PyDict>> {
        let stage = self.use_stage()?;
        let simulations = match &*stage {
            Stage::Collecting(_, simulations) => simulations,
            Stage::Running(replay) => replay.simulations(),
        };
        let simulation = simulations.get(index.0).ok_or_else(|| {
            let count = simulations.len();
            PyIndexError::new_err(format!("index must be below {count}, not {}", index.0))
        })?;
        let dict = PyDict::new(py);
        set_outcome(&dict, &simulation.outcome())?;
        if let Some(latency) = simulation.latency() {
            set_latency(&dict, latency)?;
        }
        Ok(dict)
    }

    /// What the trace says of itself and of a cache without a bound.
    fn history<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let stage = self.use_stage()?;
        let (replay, history) = self.running(&stage)?;
        let dict = PyDict::new(py);
        dict.set_item("requests", history.num_requests())?;
        dict.set_item("input_tokens", history.input_tokens())?;
        dict.set_item("unique_blocks", history.num_unique_blocks())?;
        dict.set_item("block_references", replay.block_references())?;
        set_hits(&dict, history.infinite())?;
        Ok(dict)
    }

    /// What caches of these sizes find at most, whatever order they evict in.
    fn optimum<'py>(
        &self,
        py: Python<'py>,
        sizes: Numbers<names::Sizes>,
    ) -> Result<Vec<Bound<'py, PyDict>>> {
        let stage = self.use_stage()?;
        let (_, history) = self.running(&stage)?;
        let found = py.detach(|| history.optimum(&sizes.0));
        let each = found.into_iter().map(|hits| {
            let dict = PyDict::new(py);
            set_hits(&dict, hits)?;
            Ok(dict)
        });
        each.collect()
    }
}

impl TraceReplay {
    fn use_stage(&self) -> Result<Using<'_, Stage>> {
        self.stage.use_as("replay")
    }

    fn running<'a>(&self, stage: &'a Stage) -> Result<(&'a Replay, &'a History)> {
        let Stage::Running(replay) = stage else {
            let reason = "nothing is known before the first batch";
            return Err(PyRuntimeError::new_err(reason).into());
        };
        let history = replay.history().ok_or_else(|| {
            PyRuntimeError::new_err("with_history=False: nothing is known of the trace alone")
        })?;
        Ok((replay, history))
    }
}

fn milliseconds<N: Name>(value: One<N, f64>) -> Result<f64> {
    let value = value.0;
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    let reason = format!("must be milliseconds from 0, not {value}");
    Err(out_of_range(N::NAME, reason))
}

fn set_hits(dict: &Bound<'_, PyDict>, hits: Hits) -> Result<()> {
    dict.set_item("hit_requests", hits.requests)?;
    Ok(dict.set_item("hit_tokens", hits.tokens)?)
}

fn set_outcome(dict: &Bound<'_, PyDict>, outcome: &Outcome) -> Result<()> {
    dict.set_item("requests", outcome.requests)?;
    dict.set_item("input_tokens", outcome.input_tokens)?;
    dict.set_item("hit_requests", outcome.hit_requests)?;
    dict.set_item("hit_tokens", outcome.hit_tokens)?;
    dict.set_item("evictions", outcome.evictions)?;
    dict.set_item("disk_tokens", outcome.disk_tokens)?;
    dict.set_item("disk_writes", outcome.disk_writes)?;
    for percentile in PERCENTILES {
        let computed = outcome.computed.at(percentile);
        dict.set_item(format!("computed_p{percentile}"), computed)?;
    }
    Ok(())
}

fn set_latency(dict: &Bound<'_, PyDict>, latency: &Latency) -> Result<()> {
    for percentile in PERCENTILES {
        let ttft = latency.ttft_us.at(percentile) as f64 / 1e3;
        dict.set_item(format!("ttft_ms_p{percentile}"), ttft)?;
    }
    dict.set_item("good_requests", latency.good)?;
    dict.set_item("start_ms", latency.start_ms)?;
    dict.set_item("end_ms", latency.end_ms)?;
    Ok(dict.set_item("most_waiting", latency.most_waiting)?)
}
