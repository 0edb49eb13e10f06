//! A cache in either form of its pool, shared between the Python object and the sequences it made.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use prefixcache_core::cache;
use prefixcache_core::events::{EventReader, Journal, MAX_UNTAKEN};
use prefixcache_core::hash::HashConfig;
use prefixcache_core::hints::{HintStats, RetentionTable};
use prefixcache_core::pool::{BlockPool, Mode, Shared, SingleWriter};
use prefixcache_core::sequence::Sequence;
use prefixcache_core::store::{BlockStore, Moves, PoolConfig};
use prefixcache_core::weights::WeightsName;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::errors::IntoPyErr;
use crate::exclusive::Exclusive;
use crate::writer::{Threads, Writer, Writing};

/// Blocks of events that the writer receives in one call for a reader that is late: about half a millisecond.
const RECEIVED_AT_ONCE: usize = 1 << 10;

/// A sequence that outlives its Python object where its blocks cannot be given back at once.
pub type SharedSequence = Arc<Exclusive<Sequence>>;

/// A pool in either of its forms, or what lies over it.
pub enum Either<A, B> {
    SingleWriter(A),
    Shared(B),
}

/// A cache over either form of the pool.
pub type Core =
    Either<cache::PrefixCache<BlockPool<SingleWriter>>, cache::PrefixCache<BlockPool<Shared>>>;

/// Evaluates an expression about a pool or a cache, whichever form it has.
macro_rules! on {
    ($either:expr, |$one:ident| $work:expr) => {
        match $either {
            $crate::shared_cache::Either::SingleWriter($one) => $work,
            $crate::shared_cache::Either::Shared($one) => $work,
        }
    };
}
pub(crate) use on;

/// What a sequence knows of its cache, which may be collected before it.
pub struct Cache {
    core: Core,
    writer: Writer<RetentionTable>,
    hints: HintCounts,
    closed: AtomicBool,
    abandoned: Abandoned,
    /// The slice of a shrink that is under way.
    pub moves: Exclusive<Moves>,
    /// The reader of what can be found, where somebody wants to know.
    pub events: OnceLock<Exclusive<EventReader>>,
}

/// What the writer's table says of itself, for all threads. Relaxed, all of it: the counts are for people.
#[derive(Default)]
pub struct HintCounts([AtomicU64; 3]);

impl HintCounts {
    fn publish(&self, stats: HintStats) {
        let counts = [stats.hinted as u64, stats.demoted, stats.expired];
        for (count, now) in self.0.iter().zip(counts) {
            count.store(now, Ordering::Relaxed);
        }
    }

    /// Blocks hinted now, and those that were demoted over a budget and by their TTLs.
    pub fn get(&self) -> [u64; 3] {
        self.0.each_ref().map(|count| count.load(Ordering::Relaxed))
    }
}

/// Sequences that were collected with their blocks while their thread could not write.
#[derive(Default)]
struct Abandoned {
    sequences: Mutex<Vec<SharedSequence>>,
    /// Whether there are any: every call that writes asks.
    any: AtomicBool,
}

impl Abandoned {
    fn lock(&self) -> MutexGuard<'_, Vec<SharedSequence>> {
        self.sequences
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, sequence: SharedSequence) {
        let mut sequences = self.lock();
        sequences.push(sequence);
        // Relaxed, as wherever the flag is set: the lock orders it.
        self.any.store(true, Ordering::Relaxed);
    }

    fn take_all(&self) -> Vec<SharedSequence> {
        // Relaxed: what is missed here is found by the next call that writes.
        if !self.any.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let mut sequences = self.lock();
        self.any.store(false, Ordering::Relaxed);
        std::mem::take(&mut sequences)
    }
}

impl Cache {
    pub fn new(
        hashing: HashConfig,
        weights: Option<WeightsName>,
        pool: PoolConfig,
        threads: Threads,
        table: RetentionTable,
    ) -> PyResult<Self> {
        Ok(Self {
            core: Core::new(hashing, weights, pool, threads)?,
            writer: Writer::new(threads, table),
            hints: HintCounts::default(),
            closed: AtomicBool::new(false),
            abandoned: Abandoned::default(),
            moves: Exclusive::new(Moves::default()),
            events: OnceLock::new(),
        })
    }

    /// The cache, to read.
    pub fn core(&self) -> PyResult<&Core> {
        // Relaxed: the flag orders nothing; the pool itself outlives every call.
        if self.closed.load(Ordering::Relaxed) {
            return Err(PyRuntimeError::new_err("the cache is closed"));
        }
        Ok(&self.core)
    }

    /// The cache, to change while the second value lives.
    pub fn core_to_write(&self) -> PyResult<(&Core, Writing<'_, RetentionTable>)> {
        let (core, writing) = (self.core()?, self.writer.write()?);
        for sequence in self.abandoned.take_all() {
            core.release_collected(&sequence);
        }
        self.receive_late_events(core);
        Ok((core, writing))
    }

    /// Receives events in the place of a reader that has not for long, so that what waits is bounded.
    fn receive_late_events(&self, core: &Core) {
        let Some(events) = self.events.get() else {
            return;
        };
        let pending = on!(core, |cache| cache.store().journal()).map_or(0, Journal::num_pending);
        if pending > MAX_UNTAKEN
            && let Some(mut reader) = events.try_use()
        {
            reader.receive(RECEIVED_AT_ONCE);
        }
    }

    /// The cache, which no single writer changes while the second value lives.
    pub fn core_at_rest(&self) -> PyResult<(&Core, Writing<'_, RetentionTable>)> {
        Ok((self.core()?, self.writer.pause()?))
    }

    /// Calls `work`, which changes the cache, with the table of a single writer.
    pub fn write_with_table<T>(
        &self,
        work: impl FnOnce(&Core, Option<&mut RetentionTable>) -> T,
    ) -> PyResult<T> {
        let (core, mut writing) = self.core_to_write()?;
        let outcome = work(core, writing.as_mut().map(|seat| &mut seat.own));
        if let Some(seat) = &mut writing {
            on!(core, |cache| seat.own.forget_evicted(cache.store()));
            self.hints.publish(seat.own.stats());
        }
        Ok(outcome)
    }

    /// Counts about hints. Any thread.
    pub fn hint_counts(&self) -> [u64; 3] {
        self.hints.get()
    }

    /// Whether any thread may write, so that there is no table.
    pub fn is_shared(&self) -> bool {
        self.writer.is_shared()
    }

    /// Makes the calling thread the writer.
    pub fn adopt_writer(&self) -> PyResult<()> {
        self.writer.adopt()
    }

    /// The reader of what can be found.
    pub fn events(&self) -> PyResult<&Exclusive<EventReader>> {
        self.core()?;
        let untold = || PyRuntimeError::new_err("no events are kept: call keep_events() first");
        self.events.get().ok_or_else(untold)
    }

    /// Refuses every later call.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Takes the blocks of a collected sequence back, now or in the next call that writes.
    pub fn collect(&self, sequence: &SharedSequence) {
        match self.writer.write() {
            Ok(_writing) => self.core.release_collected(sequence),
            // Another thread is the writer, or a call is writing.
            Err(_) => self.abandoned.push(Arc::clone(sequence)),
        }
    }
}

impl Core {
    fn new(
        hashing: HashConfig,
        weights: Option<WeightsName>,
        pool: PoolConfig,
        threads: Threads,
    ) -> PyResult<Self> {
        Ok(match threads {
            Threads::SingleWriter => Self::SingleWriter(cache_over(hashing, weights, pool)?),
            Threads::Shared => Self::Shared(cache_over(hashing, weights, pool)?),
        })
    }

    /// Gives back the blocks of a sequence that no call can use any more.
    fn release_collected(&self, sequence: &SharedSequence) {
        let Some(mut sequence) = sequence.try_use() else {
            return;
        };
        // It holds its blocks, so the pool takes them; there is nobody to tell of a broken invariant.
        let _ = on!(self, |cache| cache.release(&mut [&mut *sequence]));
    }

    /// The null block counted.
    pub fn num_blocks(&self) -> usize {
        on!(self, |cache| cache.store().num_blocks())
    }

    /// How many of the blocks of a prompt a count of its hits looks at.
    pub fn blocks_looked_at(&self, num_blocks: usize) -> usize {
        match self {
            Self::SingleWriter(cache) if cache.counts_by_bisection() => {
                num_blocks.checked_ilog2().unwrap_or(0) as usize
            }
            _ => num_blocks,
        }
    }
}

fn cache_over<M: Mode>(
    hashing: HashConfig,
    weights: Option<WeightsName>,
    pool: PoolConfig,
) -> PyResult<cache::PrefixCache<BlockPool<M>>> {
    let pool = BlockPool::new(pool).map_err(IntoPyErr::into_py_err)?;
    let cache = cache::PrefixCache::new(hashing, pool).map_err(IntoPyErr::into_py_err)?;
    Ok(match weights {
        Some(name) => cache.with_weights(name),
        None => cache,
    })
}
