//! What the pool consists of.

use std::time::Duration;

use super::block::Block;
use super::credits::Credits;
use super::free_stack::FreeStack;
use super::register::Census;
use super::ring::Ring;
use super::size::Size;
use crate::class::{ByClass, Class, ClassSet};
use crate::clock::Clock;
use crate::error::{InvalidArgument, Misuse, PoolError, require};
use crate::evictions::Evictions;
use crate::id::BlockId;
use crate::policy::{EvictionPolicy, Queue, ReuseQueue};
use crate::pool::counters::Counters;
use crate::pool::map::{BlockMap, BlockState};
use crate::records::Records;
use crate::store::{PoolConfig, StoreStats};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering, OwnLine};

use Ordering::{AcqRel, Acquire};

/// The shortest ring: with less, a releasing thread that loses its core costs cached content.
const MIN_RING: usize = 1 << 18;

/// Ring slots for each block: the rest is room for vacant slots.
const SLOTS_PER_BLOCK: usize = 4;

/// A pool of blocks that several threads change, as any thread may look at it.
pub struct MultiPool {
    pub(super) config: PoolConfig,
    pub(super) records: Records<Block>,
    pub(super) stack: FreeStack,
    pub(super) rings: Box<ByClass<Ring>>,
    pub(super) classes: Classes,
    pub(super) credits: Credits,
    pub(super) census: Census,
    pub(super) size: Size,
    /// The most blocks that may stand in the rings.
    pub(super) max_cached: AtomicUsize,
    /// Whether releases may leave more.
    pub(super) defers_bound: AtomicBool,
    pub(super) counters: Counters,
    /// What chooses among the default class's queues; without it there is one.
    pub(super) reuse: Option<ReuseQueue>,
    pub(super) clock: Clock,
    pub(super) evictions: Evictions,
}

/// What is known of all rings, so that those of classes that nobody uses are not looked at.
#[derive(Debug, Default)]
pub(super) struct Classes {
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
    pub(super) fn used(&self) -> ClassSet {
        ClassSet::from_bits(self.word() as u16)
    }

    /// The classes whose rings may begin with blocks of an ended epoch.
    #[inline]
    pub(super) fn stale(&self) -> ClassSet {
        let word = self.word();
        ClassSet::from_bits((word & word >> Self::STALE_SHIFT) as u16)
    }

    #[inline]
    pub(super) fn mark_used(&self, class: Class) {
        if !self.used().contains(class) {
            self.word.0.fetch_or(bits(ClassSet::EMPTY.with(class)), AcqRel);
        }
    }

    /// Says that all content in line has ended. Blocks of the default class and those below keep their
    /// places: they go soon in any case.
    pub(super) fn mark_stale(&self) {
        let above = ClassSet::from_bits(u16::MAX).above_default();
        self.word.0.fetch_or(bits(above) << Self::STALE_SHIFT, AcqRel);
    }

    pub(super) fn unmark_stale(&self, class: Class) {
        self.word.0.fetch_and(!(bits(ClassSet::EMPTY.with(class)) << Self::STALE_SHIFT), AcqRel);
    }
}

fn bits(classes: ClassSet) -> u64 {
    classes.bits().into()
}

impl std::fmt::Debug for MultiPool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("MultiPool").field("config", &self.config).finish_non_exhaustive()
    }
}

impl MultiPool {
    /// A pool whose blocks are all free and without content; its rings have `ring` slots, a power of two, or as many
    /// as they need.
    pub(super) fn new(config: PoolConfig, ring: Option<usize>) -> Result<Self, PoolError> {
        config.check()?;
        let slots = config.max_blocks.saturating_mul(SLOTS_PER_BLOCK).next_power_of_two();
        let slots = ring.unwrap_or(slots.max(MIN_RING));
        require(slots.is_power_of_two() && slots <= 1 << 32, "ring_capacity", || {
            format!("must be a power of two up to 2^32, not {slots}")
        })?;
        let max_blocks = config.max_blocks;
        Self::allocate_memory(config, slots).ok_or(PoolError::OutOfMemory { max_blocks })
    }

    fn allocate_memory(config: PoolConfig, slots: usize) -> Option<Self> {
        let clock = Clock::default();
        let reuse = match config.eviction_policy {
            EvictionPolicy::Lru => None,
            EvictionPolicy::ReuseQueue => Some(ReuseQueue::new(config.max_blocks, clock.clone())?),
        };
        let ring = |class: Class| {
            let is_used = match class.queue() {
                Some(queue) => reuse.is_some() || queue == Queue::new(0),
                None => [Class::UNNEEDED, Class::PINNED].contains(&class),
            };
            Ring::new(class, if is_used { slots } else { 1 })
        };
        let rings: Vec<_> = Class::all().map(ring).collect::<Option<_>>()?;
        let pool = Self {
            config,
            records: Records::new(config.num_blocks, config.max_blocks)?,
            stack: FreeStack::new(config.num_blocks),
            rings: rings.into_boxed_slice().try_into().ok()?,
            classes: Classes::default(),
            credits: Credits::default(),
            census: Census::default(),
            size: Size::new(config.num_blocks),
            max_cached: AtomicUsize::new(usize::MAX),
            defers_bound: AtomicBool::new(false),
            counters: Counters::default(),
            reuse,
            evictions: Evictions::new(config.max_blocks, clock.clone()),
            clock,
        };
        pool.credits.give(config.num_blocks - 1);
        Some(pool)
    }

    #[inline]
    pub(super) fn block(&self, id: BlockId) -> &Block {
        self.records.block(id)
    }

    #[inline]
    pub(super) fn ring(&self, class: Class) -> &Ring {
        &self.rings[class.index()]
    }

    pub(super) fn check_held(&self, id: BlockId) -> Result<(), Misuse> {
        if id.is_null() {
            return Err(Misuse::Null);
        }
        match self.records.blocks().get(id.index()) {
            None => Err(Misuse::Foreign(id)),
            Some(block) if block.state().is_held() => Ok(()),
            Some(_) if self.records.is_retired(id) => Err(Misuse::Retired(id)),
            Some(_) => Err(Misuse::NotInUse(id)),
        }
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

    pub(super) fn stats(&self) -> StoreStats {
        let free = self.credits.available();
        let held_above = self.size.held_above();
        StoreStats {
            cached: self.census.cached(),
            in_use: (self.size.end() - 1).saturating_sub(free) + held_above,
            held_above,
            free,
            pinned_free: self.ring(Class::PINNED).len(),
            ..self.counters.stats()
        }
    }

    pub(super) fn free_order(&self) -> Vec<BlockId> {
        let blocks = self.records.blocks();
        let line = |class| self.ring(class).walk(blocks).map(|(_, block)| block);
        let is_stale = |id: &BlockId| !self.records.is_current(self.block(*id));
        let above = Class::is_above_default;
        let stale = Class::all().filter(|&class| above(class));
        let stale = stale.flat_map(|class| line(class).take_while(is_stale));
        let queued = Class::all()
            .flat_map(|class| line(class).skip_while(move |id| above(class) && is_stale(id)));
        stale.chain(self.stack.walk(blocks)).chain(queued).collect()
    }

    pub(super) fn begin_registrations(&self) {
        self.set_time_of_batch();
    }

    /// A call begins that registers, hits, gives back or loses content: the log goes by this time.
    #[inline]
    pub(super) fn set_time_of_batch(&self) {
        let _ = self.evictions.log_now();
    }

    /// Evictions, for whoever listens.
    #[must_use]
    pub fn evictions(&self) -> &Evictions {
        &self.evictions
    }

    /// A map of the pool in up to `cells` cells. From any thread, in parallel with those that change the pool, none of
    /// which waits: each block is counted once, as it was when it was looked at.
    pub fn map(&self, cells: usize, age_bounds: &[Duration]) -> Result<BlockMap, InvalidArgument> {
        BlockMap::of_pool(self.records.num_blocks(), cells, age_bounds, &self.evictions, |id| {
            let block = self.block(id);
            let state = block.state();
            let is_cached = state.is_hashed() && self.records.is_current(block);
            let is_pinned = state.standing().is_pinned();
            (BlockState::of(state.is_held(), is_cached, is_pinned), is_cached)
        })
    }
}
