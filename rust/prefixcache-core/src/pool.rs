//! The lock-free block pool.
//!
//! Free blocks stand in one line: the stack of blank ones (`free_stack.rs`), those that were never used,
//! then a ring (`ring.rs`) for each class, emptied one after the other. Pinned blocks are one
//! class; what was pinned before a clear goes first of all. The index (`index.rs`) finds blocks by
//! content, the block's own state word (`block.rs`) decides every race about it, and credits
//! (`credits.rs`) are taken before blocks are.
//!
//! # What each call promises
//!
//! * Lookups only load, in a bounded number of steps: wait-free, in parallel with any number of writers. The bound
//!   is argued in `index.rs`. The model checker looks for wrong results, not for steps.
//! * `commit`, `register`, `release`, `pin`, `unpin` and `clear_index` are lock-free: a thread that is
//!   stalled anywhere but in a resize keeps no other from finishing. `commit` is all or nothing, as its credits are
//!   taken first. It is not one atomic point: two threads that allocate at once may interleave their
//!   blocks.
//! * A call is served when what it needs is free, counting as needed by others what their calls ask for
//!   while they run, and one block for each `demote`.
//! * `resize`, `begin_moves` and `finish_moves` are refused while another thread is inside a call that takes
//!   blocks, gives them back or moves them. Such calls that begin in the meantime wait for their end; lookups and
//!   registrations do not, and find content that moves all the time. Where several threads write, a resize in
//!   turn waits for registrations that have begun.
//! * Evicting a block takes amortised constant time; a single one may look at up to 256 slots of its line.
//! * From one thread the line is exactly that of the oracle, `prefixcache-oracle`. From several, each
//!   block's history follows the same rules; the line as a whole is only nearly in LRU order.
//! * A thread killed in the middle of a call can take the blocks of that call with it.
//!
//! # What being lock-free buys, and what it costs
//!
//! It buys readers that wait for nobody: next to a thread that commits batches of 2,048 blocks, a probe of 8
//! blocks takes 0.2 us, and 0.3 us at the 99.9th percentile, where behind a mutex around a plain pool
//! it waits for a batch, or for many when the writer gets the lock back first. And nobody holds a lock
//! while attached to the Python interpreter.
//!
//! It does not buy throughput. One thread with a plain pool of 16,000 blocks looks up in less, and two
//! threads that share [`Shared`] pay an atomic exchange for each block where a mutex is taken once a batch.
//! [`SingleWriter`] takes back most of that where one thread does all the changing. A plain pool that knew
//! LRU order alone evicted in half the time too; today's follows bands and moves in the most obvious way, and
//! takes several times as long as this one. Large pools are the exception: the ids of the blocks to come stand
//! in the ring and can be fetched ahead, so out of a million blocks an eviction costs a fraction of what a
//! linked list's does.
//!
//! The numbers, with their commands, stand in benches/results/cache.md.
//!
//! # Memory
//!
//! 112 bytes a block: 64 for the record, 16 for the index at a load of 4/7, 32 for a ring of four slots. Index and ring are
//! powers of two, so that is of as many blocks as a power of two has, and one block more takes 160 each; a ring has 2 MiB
//! at least. 32 more for each further class that is in use, 24 more once somebody listens to evictions. With queues ([`EvictionPolicy::ReuseQueue`]) that is six more
//! classes, and up to 70 bytes a block for what the policy remembers. All of it starts as untouched zero pages (huge ones,
//! where the system gives them), so a pool is built in microseconds and grows into its memory as it is
//! used. Of a pool that may grow, the records above its size are not touched; index and rings are used all over
//! in time, 48 bytes for each block of the most that it may have.

mod backing;
mod bound;
mod content;
pub(crate) mod counters;
mod credits;
mod evictions;
mod free_stack;
mod give;
mod index;
#[allow(dead_code)]
pub mod many_writers;
pub(crate) mod map;
mod moves;
mod multi_writer;
mod ring;
mod size;
mod take;
mod validate;
mod writer;

use crossbeam_queue::SegQueue;

use crate::backing::BackingStore;
use crate::band::Band;
use crate::block::{Block, ByClass, Class, ClassSet, Content, Place};
use crate::clock::Clock;
use crate::error::{Broken, Misuse, PoolError, require};
use crate::events::EventLog;
use crate::evictions::{Cause, EvictionLog};
use crate::id::{BlockId, Epoch};
use crate::policy::{EvictionPolicy, Queue, ReuseQueue, Tick};
use crate::store::sealed::Sealed;
use crate::store::{BlockKey, HintedChange, Lookup, Marks, PoolConfig, StoreStats};
use crate::sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, OnceLock, Ordering, OwnLine};
use crate::zeroed::Zeroed;
use counters::{Counter, Counters};
use credits::Credits;
use free_stack::{FreeStack, FreshRun};
use index::Index;
use ring::{Ring, VacatedSlots};

pub use crate::sync::{Mode, Shared, SingleWriter};
pub use map::{BlockMap, BlockState};
pub use multi_writer::{AnyReader, AnyWriter, MultiWriter};
pub use writer::{Reader, Writer};

use Ordering::{Acquire, Relaxed};

/// The shortest ring: with less, a releasing thread that loses its core costs cached content.
const MIN_RING: usize = 1 << 18;

/// Ring slots for each block: the rest is room for vacant slots.
const SLOTS_PER_BLOCK: usize = 4;

/// A pool of blocks as any number of threads may look at it: see the [module](self).
///
/// A [`Writer`] makes it and alone can change it; a [`Reader`] keeps it for others.
pub struct BlockPool<M: Mode> {
    config: PoolConfig,
    blocks: Zeroed<Block>,
    index: Index,
    stack: FreeStack,
    fresh: FreshRun,
    rings: Box<ByClass<Ring<M>>>,
    classes: Classes,
    credits: Credits,
    contents: content::Contents,
    size: size::Size,
    /// The most blocks that may stand in the rings.
    max_cached: AtomicUsize,
    /// Whether releases may leave more.
    defers_bound: AtomicBool,
    counters: Counters,
    /// What chooses among the default class's queues; without it there is one.
    reuse: Option<ReuseQueue>,
    clock: Clock,
    /// What a listener learns of evicted content.
    eviction_log: OnceLock<EvictionLog>,
    /// Where the changes of what can be found are reported.
    event_log: OnceLock<EventLog>,
    /// The memory behind the blocks, where it outlives the process.
    backing: OnceLock<Arc<dyn BackingStore>>,
    /// Whether any content was ever given a band.
    gives_bands: AtomicBool,
    /// What became of content with another band than the default, until a retention table takes note of it.
    hinted: SegQueue<HintedChange>,
}

/// The slots that a call's blocks have vacated. Neighbours mostly are of one class.
struct Vacated<'a, M: Mode> {
    rings: &'a ByClass<Ring<M>>,
    class: Class,
    slots: VacatedSlots<'a, M>,
}

impl<M: Mode> Vacated<'_, M> {
    #[inline]
    fn add(&mut self, place: Place) {
        if place.class != self.class {
            self.go_to(place.class);
        }
        self.slots.add(place.ticket);
    }

    #[cold]
    fn go_to(&mut self, class: Class) {
        self.class = class;
        self.slots = self.rings[class.index()].vacated_slots();
    }
}

/// What is known of all rings, so that those of classes that nobody uses are not looked at.
#[derive(Debug, Default)]
struct Classes {
    /// `stale:16 | used:16`, a bit for each class: whether its ring may begin with blocks whose content is
    /// of an ended epoch, and whether it was ever used.
    word: OwnLine<AtomicU64>,
}

impl Classes {
    const STALE_SHIFT: u32 = 16;

    #[inline]
    fn word(&self) -> u64 {
        // Acquire: a ring is marked before a block stands in it, and a credit that is taken for such a
        // block acquires the mark as well.
        self.word.0.load(Acquire)
    }

    /// The classes whose rings were ever used.
    #[inline]
    fn used(&self) -> ClassSet {
        ClassSet::from_bits(self.word() as u16)
    }

    /// The classes whose rings may begin with blocks of an ended epoch.
    #[inline]
    fn stale(&self) -> ClassSet {
        ClassSet::from_bits((self.word() >> Self::STALE_SHIFT) as u16)
    }

    #[inline]
    fn mark_used<M: Mode>(&self, class: Class) {
        if !self.used().contains(class) {
            self.update::<M>(|word| word | u64::from(ClassSet::EMPTY.with(class).bits()));
        }
    }

    /// Says that all content in line has ended. Blocks of the default class and those below keep their
    /// places: they go soon in any case.
    fn mark_stale<M: Mode>(&self) {
        self.update::<M>(|word| {
            let above = ClassSet::from_bits(word as u16).above_default();
            word | u64::from(above.bits()) << Self::STALE_SHIFT
        });
    }

    fn unmark_stale<M: Mode>(&self, class: Class) {
        let bits = u64::from(ClassSet::EMPTY.with(class).bits()) << Self::STALE_SHIFT;
        self.update::<M>(|word| word & !bits);
    }

    #[cold]
    fn update<M: Mode>(&self, change: impl Fn(u64) -> u64) {
        loop {
            let word = self.word();
            if M::exchange(&self.word.0, word, change(word)).is_ok() {
                return;
            }
        }
    }
}

/// Adds to a count, in the way of the mode.
fn add_to<M: Mode>(counter: &Counter, amount: u64) {
    if M::SHARED { counter.add(amount) } else { counter.add_alone(amount) }
}

impl<M: Mode> std::fmt::Debug for BlockPool<M> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = formatter.debug_struct("BlockPool");
        out.field("config", &self.config).field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl<M: Mode> BlockPool<M> {
    /// A pool whose blocks are all free and without content.
    ///
    /// Fails when a size is out of range or there is no memory for `max_blocks` blocks.
    fn new(config: PoolConfig) -> Result<Self, PoolError> {
        config.check()?;
        let slots = config.max_blocks.saturating_mul(SLOTS_PER_BLOCK).next_power_of_two();
        Self::with_ring_capacity(config, slots.max(MIN_RING))
    }

    /// A pool whose rings have `ring_capacity` slots each, a power of two.
    ///
    /// For tests and measurements: a ring of fewer than four slots a block can fill up, and then
    /// releases drop content ([`Self::content_drops`]).
    fn with_ring_capacity(config: PoolConfig, ring_capacity: usize) -> Result<Self, PoolError> {
        config.check()?;
        let is_possible = ring_capacity.is_power_of_two() && ring_capacity <= 1 << 32;
        require(is_possible, "ring_capacity", || {
            format!("must be a power of two up to 2^32, not {ring_capacity}")
        })?;
        let max_blocks = config.max_blocks;
        Self::allocate_memory(config, ring_capacity).ok_or(PoolError::OutOfMemory { max_blocks })
    }

    fn allocate_memory(config: PoolConfig, ring_capacity: usize) -> Option<Self> {
        let clock = Clock::default();
        let reuse = match config.eviction_policy {
            EvictionPolicy::Lru => None,
            EvictionPolicy::ReuseQueue => Some(ReuseQueue::new(config.max_blocks, clock.clone())?),
        };
        let rings: Option<Vec<_>> = Class::all()
            .map(|class| {
                let first = class.queue().is_none_or(|queue| queue == Queue::default());
                let is_used = first || reuse.is_some();
                Ring::new(class, if is_used { ring_capacity } else { 1 })
            })
            .collect();
        let rings = rings?;
        let pool = Self {
            config,
            blocks: Zeroed::new(config.max_blocks)?,
            index: Index::new(config.max_blocks)?,
            stack: FreeStack::default(),
            fresh: FreshRun::new(1, config.num_blocks),
            rings: rings.into_boxed_slice().try_into().ok()?,
            classes: Classes::default(),
            credits: Credits::default(),
            contents: content::Contents::default(),
            size: size::Size::new(config.num_blocks),
            max_cached: AtomicUsize::new(usize::MAX),
            defers_bound: AtomicBool::new(false),
            counters: Counters::default(),
            reuse,
            clock,
            eviction_log: OnceLock::new(),
            event_log: OnceLock::new(),
            backing: OnceLock::new(),
            gives_bands: AtomicBool::new(false),
            hinted: SegQueue::new(),
        };
        pool.credits.give::<M>(config.num_blocks - 1);
        Some(pool)
    }

    /// How many blocks lost valid content at their release because the ring was full, or got none at
    /// their registration because the index had no room for the key.
    ///
    /// With the usual ring the first takes a thread that stalls in the middle of a release
    /// while others release some hundred thousand blocks.
    #[must_use]
    pub fn content_drops(&self) -> u64 {
        self.counters.drops.get()
    }

    fn num_pinned(&self) -> usize {
        self.counters.pinned()
    }

    /// Counts pinned blocks that were taken from their line, `evicted` of them with content of this epoch.
    fn count_recycled_pins(&self, blocks: u64, evicted: u64) {
        add_to::<M>(&self.counters.ended_pins, blocks);
        add_to::<M>(&self.counters.pinned_evictions, evicted);
    }

    /// The policy's time; of no meaning without one that asks for it.
    #[inline]
    fn tick(&self) -> Tick {
        self.reuse.as_ref().map_or_else(Tick::default, ReuseQueue::now)
    }

    #[inline]
    fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }

    #[inline]
    fn ring(&self, class: Class) -> &Ring<M> {
        &self.rings[class.index()]
    }

    /// A count of slots that blocks vacate, to be reported when it is dropped.
    #[inline]
    fn vacated_slots(&self) -> Vacated<'_, M> {
        Vacated {
            rings: &self.rings,
            class: Class::DEFAULT,
            slots: self.ring(Class::DEFAULT).vacated_slots(),
        }
    }

    /// Notes more of the content of a block that the caller holds.
    fn mark(&self, id: BlockId, marks: Marks) {
        self.block(id).mark(marks);
    }

    /// Forgets every hash.
    fn clear_index(&self) {
        self.contents.clear::<M>();
        self.note_cleared();
        self.classes.mark_stale::<M>();
    }

    /// Takes the pins off the oldest `count` free blocks of the pinned line; how many there were.
    fn demote(&self, count: usize) -> usize {
        let demoted = self.unpin_oldest(count);
        add_to::<M>(&self.counters.ended_pins, demoted as u64);
        add_to::<M>(&self.counters.demotions, demoted as u64);
        demoted
    }

    /// Gives up the content of the `count` free blocks that would lose it first; how many there were.
    fn release_cached(&self, count: usize) -> usize {
        self.give_up(count, Cause::Evicted)
    }

    /// Bounds the blocks that stand in line with content.
    fn set_max_cached(&self, blocks: Option<usize>) {
        // Relaxed: each release compares on its own.
        self.max_cached.store(blocks.unwrap_or(usize::MAX), Relaxed);
        self.keep_bound();
    }

    /// The next content that was lost with another band than the default one.
    fn take_hinted_change(&self) -> Option<HintedChange> {
        self.hinted.pop()
    }

    /// Fetches the place of `key` in the index.
    fn prefetch(&self, key: &BlockKey) {
        let spot = self.index.spot(&Content::from(key), self.epoch());
        self.index.prefetch(spot);
    }

    /// Says that a batch of registrations begins.
    fn begin_registrations(&self) {
        self.note_time_of_batch();
    }

    /// Takes `count` blocks from the front of the line, all or none.
    #[cfg(test)]
    fn allocate(
        &self,
        count: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<(), crate::error::Exhausted> {
        self.commit(std::iter::empty(), count, out).map(|_| ())
    }

    /// Fails unless somebody holds the block.
    fn check_held(&self, id: BlockId) -> Result<(), Misuse> {
        if id.is_null() {
            return Err(Misuse::Null);
        }
        match self.blocks.get(id.index()) {
            None => Err(Misuse::Foreign(id)),
            Some(block) if block.state().is_held() => Ok(()),
            Some(_) if self.is_retired(id) => Err(Misuse::Retired(id)),
            Some(_) => Err(Misuse::NotInUse(id)),
        }
    }
}

impl<M: Mode> Sealed for BlockPool<M> {}

impl<M: Mode> Lookup for BlockPool<M> {
    fn clock(&self) -> &Clock {
        &self.clock
    }

    fn lookup(&self, key: &BlockKey) -> Option<BlockId> {
        self.find(key)
    }

    #[inline]
    fn lookup_held(&self, key: &BlockKey, held: BlockId) -> Option<BlockId> {
        if self.is_only_copy(held) {
            debug_assert_eq!(self.find(key), Some(held));
            return Some(held);
        }
        self.find(key)
    }

    fn key_of(&self, block: BlockId) -> BlockKey {
        self.block(block).key()
    }

    fn count_leading(&self, keys: impl Iterator<Item = BlockKey> + Clone) -> usize {
        let mut count = 0;
        self.find_leading(keys, |_| {
            count += 1;
            true
        });
        count
    }

    fn evicts_in_order(&self) -> bool {
        !M::SHARED
            && self.reuse.is_none()
            && self.content_drops() == 0
            && self.contents.is_in_order()
    }

    fn epoch(&self) -> Epoch {
        self.contents.epoch()
    }

    fn num_blocks(&self) -> usize {
        self.size.num_blocks()
    }

    fn num_free(&self) -> usize {
        self.credits.available()
    }

    fn band(&self, key: &BlockKey) -> Option<Band> {
        let hit = self.find(key)?;
        Some(self.block(hit).state().own_class().band())
    }

    fn held_band(&self, block: BlockId) -> Band {
        self.block(block).state().own_class().band()
    }

    fn marks(&self, block: BlockId) -> Marks {
        self.block(block).marks()
    }

    fn reuse_queue(&self) -> Option<&ReuseQueue> {
        self.reuse.as_ref()
    }

    fn event_log(&self) -> Option<&EventLog> {
        self.event_log.get()
    }

    fn free_order(&self) -> Vec<BlockId> {
        let line = |class| self.ring(class).walk(&self.blocks).map(|(_, block)| block);
        let is_stale = |id: &BlockId| !self.is_current(self.block(*id));
        let above = Class::is_above_default;
        let stale = Class::all().filter(|&class| above(class));
        let stale = stale.flat_map(|class| line(class).take_while(is_stale));
        let blank = self.stack.walk(&self.blocks).chain(self.fresh.walk());
        let queued = Class::all()
            .flat_map(|class| line(class).skip_while(move |id| above(class) && is_stale(id)));
        stale.chain(blank).chain(queued).collect()
    }

    fn cached_blocks(&self) -> Vec<BlockId> {
        let ids = (1..self.num_blocks() as u32).map(BlockId::new);
        ids.filter(|&id| self.is_cached(id)).collect()
    }

    fn stats(&self) -> StoreStats {
        let free = self.num_free();
        StoreStats {
            cached: self.contents.cached(),
            in_use: (self.size.end() - 1).saturating_sub(free) + self.size.held_above(),
            held_above: self.size.held_above(),
            free,
            pinned_free: self.ring(Class::PINNED).len(),
            ..self.counters.stats()
        }
    }

    fn num_holders(&self, block: BlockId) -> usize {
        self.block(block).state().holders() as usize
    }

    fn validate(&self) -> Result<(), Broken> {
        validate::validate(self)
    }
}
