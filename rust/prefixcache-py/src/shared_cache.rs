//! A cache in either form of its pool, shared between the Python object and the sequences it made.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use prefixcache_core::events::{EventLog, EventReader, MAX_UNREAD};
use prefixcache_core::hash::HashConfig;
use prefixcache_core::retention::HintStats;
use prefixcache_core::{CacheBuilder, PrefixCache};

use prefixcache_core::pool::{self, AnyReader, AnyWriter, MultiWriter};
use prefixcache_core::store::{BlockStore, Moves, PoolConfig};
use prefixcache_core::weights::WeightsName;
use pyo3::exceptions::PyRuntimeError;

use crate::errors::Result;
use crate::exclusive::Exclusive;
use crate::writer::{Threads, Writer, Writing};

/// Blocks of events that the writer receives in one call for a reader that is late: about half a millisecond.
const RECEIVED_AT_ONCE: usize = 1 << 10;

/// A cache to look at.
pub type Reader = PrefixCache<AnyReader>;

/// A cache to change.
pub type Core = PrefixCache<AnyWriter>;

/// What a sequence knows of its cache, which may be collected before it.
pub struct Cache {
    reader: Reader,
    pub writer: Writer<Core>,
    pub hints: HintCounts,
    /// The slice of a shrink that is in flight.
    pub moves: Exclusive<Moves>,
    /// The reader of what can be found, where somebody wants to know.
    pub events: OnceLock<Exclusive<EventReader>>,
}

/// What the writer says of hints, for all threads. Relaxed, all of it: the counts are for people.
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

impl Cache {
    /// A cache whose hints may raise this `share` of the pool for each owner.
    pub fn new(
        hashing: HashConfig,
        weights: Option<WeightsName>,
        pool: PoolConfig,
        threads: Threads,
        share: f64,
    ) -> Result<Self> {
        let mut builder = CacheBuilder::new(hashing);
        if let Some(name) = weights {
            builder = builder.weights(name);
        }
        let (reader, writer) = match threads {
            Threads::SingleWriter => {
                let pool = AnyWriter::One(pool::Writer::new(pool)?);
                let cache = builder.hints(share).build(pool)?;
                (cache.reader(), Writer::one("the cache", cache))
            }
            Threads::Shared => {
                let cache = builder.build(MultiWriter::shared(pool)?)?;
                let make = move || cache.clone().map_store(AnyWriter::Many);
                (make().reader(), Writer::many("the cache", make))
            }
        };
        Ok(Self {
            reader,
            writer,
            hints: HintCounts::default(),
            moves: Exclusive::new(Moves::default()),
            events: OnceLock::new(),
        })
    }

    /// The cache, to look at.
    pub fn reader(&self) -> Result<&Reader> {
        self.writer.check_open()?;
        Ok(&self.reader)
    }

    /// The cache, to count in: what collected sequences held is given back, unless another thread is the writer, or a
    /// call is writing.
    pub fn counted(&self) -> Result<&Reader> {
        let reader = self.reader()?;
        self.reclaim();
        Ok(reader)
    }

    /// The cache, to change.
    pub fn write(&self) -> Result<Writing<'_, Core>> {
        let mut writing = self.writer.write()?;
        writing.reclaim();
        self.receive_late_events(&writing);
        Ok(writing)
    }

    /// Receives events in the place of a reader that has not for long, so that what waits is bounded.
    fn receive_late_events(&self, cache: &Core) {
        let Some(events) = self.events.get() else {
            return;
        };
        let pending = cache.store().event_log().map_or(0, EventLog::num_pending);
        if pending > MAX_UNREAD
            && let Some(mut reader) = events.try_use()
        {
            reader.receive(RECEIVED_AT_ONCE);
        }
    }

    /// The cache, which no single writer changes meanwhile.
    pub fn pause(&self) -> Result<Writing<'_, Core>> {
        let mut writing = self.writer.pause()?;
        writing.reclaim();
        Ok(writing)
    }

    /// Calls `work`, which changes the cache, and publishes what has become of hints.
    pub fn write_hinted<T>(&self, work: impl FnOnce(&mut Core) -> T) -> Result<T> {
        let cache = &mut *self.write()?;
        let outcome = work(cache);
        self.hints.publish(cache.hint_stats());
        Ok(outcome)
    }

    /// The reader of what can be found.
    pub fn events(&self) -> Result<&Exclusive<EventReader>> {
        self.reader()?;
        let missing = || PyRuntimeError::new_err("no events are kept: call keep_events() first");
        let events = self.events.get().ok_or_else(missing)?;
        events.check("the reader of events")?;
        Ok(events)
    }

    /// Takes the blocks of collected sequences back, unless another thread is the writer, or a call is writing:
    /// then the next call that writes does.
    pub fn reclaim(&self) {
        if let Some(mut writing) = self.writer.own() {
            writing.reclaim();
        }
    }
}

/// How many of the blocks of a prompt a count of its hits looks at.
pub fn blocks_looked_at(cache: &Reader, num_blocks: usize) -> usize {
    match cache.counts_by_bisection() {
        true => num_blocks.checked_ilog2().unwrap_or(0) as usize,
        false => num_blocks,
    }
}
