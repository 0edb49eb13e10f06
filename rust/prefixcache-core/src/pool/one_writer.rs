//! The pool that one thread changes and any number look at.
//!
//! A [`Writer`] makes it and alone can change it, through `&mut self`: its lists, counts and links are plain data,
//! and nothing is retried. Readers touch [`Records`] and counts alone, which the writer publishes.
//!
//! Free blocks stand in one order: those that hold nothing (`lists.rs`), then an intrusive LRU list for each class,
//! emptied one after the other. Pinned blocks are one class; what was pinned before a clear goes first of all.
//!
//! # What each call promises
//!
//! * Lookups only load, in a bounded number of steps: wait-free, next to whatever the writer does.
//! * No call of the writer waits for another thread. `commit` is all or nothing.
//! * Push, remove, pop and demote of a block are O(1) in the worst case, whatever the pool holds.
//! * The order is exactly that of the oracle, `prefixcache-oracle`.
//!
//! # Memory
//!
//! At most 96 bytes a block: 64 for the record with its links, and 16 to 32 for the index, which has as many buckets
//! as a power of two. 24 more once somebody listens to evictions, and up to 70 for what [`EvictionPolicy::ReuseQueue`]
//! remembers. All of it starts as untouched zero pages (huge ones, where the system gives them), so a pool is built
//! in microseconds and grows into its memory as it is used.

mod backing;
mod block;
mod content;
mod give;
mod handles;
mod journal;
mod lists;
#[cfg(all(test, loom))]
mod models;
mod moves;
mod pins;
mod size;
mod take;
mod validate;

use crate::class::{ByClass, Class, ClassSet};
use crate::clock::Clock;
use crate::error::{Misuse, PoolError};
use crate::evictions::Evictions;
use crate::id::{BlockId, Epoch};
use crate::policy::{EvictionPolicy, ReuseQueue, Tick};
use crate::pool::counters::Counters;
use crate::records::Records;
use crate::store::{PoolConfig, StoreStats};
use crate::sync::{Arc, AtomicU64, AtomicUsize, Ordering};

use block::Block;
use journal::Journal;
use lists::{Blank, List};

use Ordering::{Acquire, Relaxed, Release};

/// What readers and the writer share.
pub struct BlockPool {
    config: PoolConfig,
    records: Records<Block>,
    counters: Counters,
    counts: Counts,
    /// One more than the epoch in which content was last evicted, or may be yet, out of order; 0: none.
    disordered: AtomicU64,
    /// What chooses among the default class's queues; without it there is one.
    reuse: Option<ReuseQueue>,
    clock: Clock,
    evictions: Evictions,
}

/// What there is now, as of the last call of the writer. Relaxed, all of it: for people, and for a scheduler that is
/// the writer itself.
#[derive(Debug, Default)]
struct Counts {
    free: AtomicUsize,
    cached: AtomicUsize,
    pinned_free: AtomicUsize,
    /// Blocks that are handed out, the null block counted, and those above that are in use.
    end: AtomicUsize,
    in_use_above: AtomicUsize,
    /// The ids that were never handed out.
    fresh: [AtomicUsize; 2],
}

/// The right to change a pool, which makes the pool.
///
/// There is one for each pool, and its methods take `&mut self`: no two threads can change the pool at a time.
/// It can be sent to another thread. A second one is not to be had:
///
/// ```compile_fail,E0277
/// fn another<T: Clone>(writer: &T) -> T {
///     writer.clone()
/// }
/// let writer = prefixcache_core::Writer::new(prefixcache_core::PoolConfig::new(8)).unwrap();
/// let second = another(&writer);
/// ```
///
/// Nor do two threads have it at a time:
///
/// ```compile_fail,E0499
/// use prefixcache_core::{BlockStore, PoolConfig, Writer};
///
/// let mut writer = Writer::new(PoolConfig::new(8)).unwrap();
/// std::thread::scope(|scope| {
///     scope.spawn(|| writer.allocate(1, &mut Vec::new()));
///     scope.spawn(|| writer.allocate(1, &mut Vec::new()));
/// });
/// ```
#[derive(Debug)]
pub struct Writer {
    pool: Arc<BlockPool>,
    lists: Box<ByClass<List>>,
    /// Classes whose lists were ever used, and those whose lists may begin with blocks of an ended epoch.
    used: ClassSet,
    stale: ClassSet,
    /// Blocks in all lists.
    num_listed: usize,
    blank: Blank,
    /// Blocks below the end that nobody has a reference to.
    free: usize,
    /// Blocks with content of this epoch.
    cached: usize,
    registrations: u64,
    size: size::Size,
    /// The most blocks that may stand in lists, and whether releases may leave more.
    max_cached: usize,
    defers_bound: bool,
    journal: Journal,
}

/// A pool for any thread to look at, in parallel with the one that changes it.
#[derive(Clone, Debug)]
pub struct Reader(Arc<BlockPool>);

impl std::fmt::Debug for BlockPool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = formatter.debug_struct("BlockPool");
        out.field("config", &self.config).field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Writer {
    /// A pool whose blocks are all free and without content, and the only right to change it.
    ///
    /// Fails when a size is out of range or there is no memory for `max_blocks` blocks.
    pub fn new(config: PoolConfig) -> Result<Self, PoolError> {
        config.check()?;
        let PoolConfig { num_blocks, max_blocks, .. } = config;
        let pool = BlockPool::new(config).ok_or(PoolError::OutOfMemory { max_blocks })?;
        let writer = Self {
            pool: Arc::new(pool),
            lists: Box::default(),
            used: ClassSet::EMPTY,
            stale: ClassSet::EMPTY,
            num_listed: 0,
            blank: Blank::new(num_blocks),
            free: num_blocks - 1,
            cached: 0,
            registrations: 0,
            size: size::Size::new(num_blocks),
            max_cached: usize::MAX,
            defers_bound: false,
            journal: Journal::default(),
        };
        writer.publish_counts();
        Ok(writer)
    }

    #[inline]
    fn block(&self, id: BlockId) -> &Block {
        self.pool.records.block(id)
    }

    #[inline]
    fn blocks(&self) -> &[Block] {
        self.pool.records.blocks()
    }

    #[inline]
    fn list(&self, class: Class) -> &List {
        &self.lists[class.index()]
    }

    /// Puts a block, whose state says so already, at the end of its list.
    #[inline]
    fn push(&mut self, class: Class, id: BlockId) {
        self.used = self.used.with(class);
        self.num_listed += 1;
        self.lists[class.index()].push(self.pool.records.blocks(), id);
    }

    /// Takes a block out of its list. Its state is the caller's to change.
    #[inline]
    fn unlist(&mut self, class: Class, id: BlockId) {
        self.num_listed -= 1;
        self.lists[class.index()].remove(self.pool.records.blocks(), id);
    }

    /// The policy's time; of no meaning without one that asks for it.
    #[inline]
    fn tick(&self) -> Tick {
        self.pool.reuse.as_ref().map_or_else(Tick::default, ReuseQueue::now)
    }

    /// Lets readers see what there is now.
    #[inline]
    fn publish_counts(&self) {
        let counts = &self.pool.counts;
        counts.free.store(self.free, Relaxed);
        counts.cached.store(self.cached, Relaxed);
        counts.pinned_free.store(self.list(Class::PINNED).len(), Relaxed);
        counts.end.store(self.size.end, Relaxed);
        counts.in_use_above.store(self.size.in_use_above, Relaxed);
        counts.fresh[0].store(self.blank.fresh.start as usize, Relaxed);
        counts.fresh[1].store(self.blank.fresh.end as usize, Relaxed);
    }

    /// Fails unless somebody has a reference to the block.
    #[inline]
    fn check_in_use(&self, id: BlockId) -> Result<(), Misuse> {
        match self.blocks().get(id.index()) {
            _ if id.is_null() => Err(Misuse::Null),
            None => Err(Misuse::Foreign(id)),
            Some(block) if block.state().is_in_use() => Ok(()),
            Some(_) if self.pool.records.is_retired(id) => Err(Misuse::Retired(id)),
            Some(_) => Err(Misuse::NotInUse(id)),
        }
    }

    /// Says that content of this epoch may be evicted out of order.
    fn note_disorder(&self) {
        if !crate::sync::planted(crate::sync::Fault::KeepOrder) {
            // Release: whoever reads it sees the change that it stands for.
            self.pool.disordered.store(self.pool.records.epoch().get() + 1, Release);
        }
    }
}

impl BlockPool {
    fn new(config: PoolConfig) -> Option<Self> {
        let clock = Clock::default();
        let reuse = match config.eviction_policy {
            EvictionPolicy::Lru => None,
            EvictionPolicy::ReuseQueue => Some(ReuseQueue::new(config.max_blocks, clock.clone())?),
        };
        Some(Self {
            config,
            records: Records::new(config.num_blocks, config.max_blocks)?,
            counters: Counters::default(),
            counts: Counts::default(),
            disordered: AtomicU64::new(0),
            reuse,
            evictions: Evictions::new(config.max_blocks, clock.clone()),
            clock,
        })
    }

    /// Whether all content of this epoch is evicted in order.
    fn is_in_order(&self) -> bool {
        // Acquire: pairs with the store.
        self.disordered.load(Acquire) != self.records.epoch().get() + 1
    }

    fn epoch(&self) -> Epoch {
        self.records.epoch()
    }

    fn stats(&self) -> StoreStats {
        let now = |count: &AtomicUsize| count.load(Relaxed);
        let (free, in_use_above) = (now(&self.counts.free), now(&self.counts.in_use_above));
        StoreStats {
            cached: now(&self.counts.cached),
            in_use: (now(&self.counts.end) - 1).saturating_sub(free) + in_use_above,
            held_above: in_use_above,
            free,
            pinned_free: now(&self.counts.pinned_free),
            ..self.counters.stats()
        }
    }
}
