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
use crate::dicts::set_fields;
use crate::errors::{Failure, Result, ensure};
use crate::exclusive::Exclusive;
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

/// Where snapshots of states are kept; none where Marconi's cache keeps them.
impl Word for Option<Snapshots> {
    const ARGUMENT: &'static str = "snapshots";
    const WORDS: &'static [(&'static str, Self)] = &[
        ("anchors", Some(Snapshots::Anchors)),
        ("ends", Some(Snapshots::Ends)),
        ("every", Some(Snapshots::Every)),
        ("marconi", None),
    ];
}

/// A trace through caches side by side.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct TraceReplay {
    block_size: usize,
    name: String,
    caches_answers: bool,
    replay: Exclusive<Replay>,
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
        let (name, block_size) = (reader.name().to_owned(), reader.block_size());
        let history = with_history.then(|| History::new(block_size, caches_answers));
        let replay = Exclusive::new(Replay::new(reader, Vec::new(), history, threads.0));
        Ok(Self { block_size, name, caches_answers, replay })
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
        ms_per_request=None, objective_ms=None, max_delay_ms=None, snapshots=OneOf(Some(Snapshots::Anchors)),
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
        snapshots: OneOf<Option<Snapshots>>,
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
            snapshots: snapshots.0.zip(snapshot_blocks),
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
        let replay = &mut *self.replay.use_as("replay")?;
        if replay.has_begun() {
            let reason = "caches are added before the first batch";
            return Err(PyRuntimeError::new_err(reason).into());
        }
        let simulation = match snapshot_blocks.filter(|_| snapshots.0.is_none()) {
            Some(blocks) => Simulation::Marconi(Marconi::new(
                num_blocks.0,
                blocks,
                self.block_size,
                self.caches_answers,
            )),
            None => Simulation::new(&config, server, self.block_size)?,
        };
        replay.add(simulation);
        Ok(replay.simulations().len() - 1)
    }

    /// Run the next batch of requests; False after the last one.
    fn advance(&self, py: Python<'_>) -> Result<bool> {
        let replay = &mut *self.replay.use_as("replay")?;
        Ok(py.detach(|| replay.advance())?)
    }

    /// Bytes of the file that were read so far.
    #[getter]
    fn bytes_read(&self) -> Result<u64> {
        Ok(self.replay.use_as("replay")?.reader().bytes_read())
    }

    /// What the requests found in the cache of this number, and what they waited.
    fn outcome<'py>(
        &self,
        py: Python<'py>,
        index: Number<names::Index>,
    ) -> Result<Bound<'py, PyDict>> {
        let replay = self.replay.use_as("replay")?;
        let simulations = replay.simulations();
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
        let replay = self.replay.use_as("replay")?;
        let history = history_of(&replay)?;
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
        let replay = self.replay.use_as("replay")?;
        let history = history_of(&replay)?;
        let found = py.detach(|| history.optimum(&sizes.0));
        let each = found.into_iter().map(|hits| {
            let dict = PyDict::new(py);
            set_hits(&dict, hits)?;
            Ok(dict)
        });
        each.collect()
    }
}

fn history_of(replay: &Replay) -> Result<&History> {
    if !replay.has_begun() {
        let reason = "nothing is known before the first batch";
        return Err(PyRuntimeError::new_err(reason).into());
    }
    let missing = "with_history=False: nothing is known of the trace alone";
    Ok(replay.history().ok_or_else(|| PyRuntimeError::new_err(missing))?)
}

fn milliseconds<N: Name>(value: One<N, f64>) -> Result<f64> {
    let value = value.0;
    let fits = value.is_finite() && value >= 0.0;
    ensure!(fits, N::NAME, "must be milliseconds from 0, not {value}");
    Ok(value)
}

fn set_hits(dict: &Bound<'_, PyDict>, hits: Hits) -> Result<()> {
    set_fields!(dict, hits; requests as "hit_requests", tokens as "hit_tokens");
    Ok(())
}

fn set_outcome(dict: &Bound<'_, PyDict>, outcome: &Outcome) -> Result<()> {
    set_fields!(
        dict, outcome;
        requests, input_tokens, hit_requests, hit_tokens, evictions, disk_tokens, disk_writes,
    );
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
    set_fields!(dict, latency; good as "good_requests", start_ms, end_ms, most_waiting);
    Ok(())
}
