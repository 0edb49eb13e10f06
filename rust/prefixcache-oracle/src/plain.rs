//! The obvious single-owner pool: arrays and links that are array indices.
//!
//! It is the oracle of both pools of `prefixcache-core`, so it favours being read over being fast.

use std::time::Duration;

use prefixcache_core::band::Band;
use prefixcache_core::clock::Clock;
use prefixcache_core::error::{Broken, Exhausted, InvalidArgument, Misuse, ResizeError};
use prefixcache_core::evictions::{Cause, EvictedBlock, Eviction};
use prefixcache_core::id::{BlockId, BlockKey, Epoch};
use prefixcache_core::policy::{EvictionPolicy, Queue, Rank, ReuseQueue};
use prefixcache_core::pool::{BlockMap, BlockState};
use prefixcache_core::store::sealed::{Inner, Sealed};
use prefixcache_core::store::{
    BlockStore, FreeOrder, Lookup, MAX_COPIES, Marks, Move, Moves, PoolConfig, Registration,
    StoreStats,
};

/// A free block's place: the end of a line of free blocks that it stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tier {
    /// Without content, or never used.
    Blank,
    /// Needed by its last holder no more.
    Unneeded,
    /// With the eviction policy's queue, of which LRU has the first alone.
    Regular(Queue),
    /// Of another band than the default one.
    Banded(Band),
    Pinned,
}

impl Tier {
    const COUNT: usize = 3 + Queue::COUNT + Band::COUNT;

    const fn index(self) -> usize {
        match self {
            Self::Blank => 0,
            Self::Unneeded => 1,
            Self::Pinned => 2,
            Self::Regular(queue) => 3 + queue.index(),
            Self::Banded(band) => 3 + Queue::COUNT + band.index(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Block {
    holders: u32,
    /// What the block holds, and the epoch in which that was registered.
    content: Option<(BlockKey, Epoch)>,
    marks: Marks,
    pinned: bool,
    band: Band,
    /// The queue that it stood in last, and stands in again unless another is asked for.
    queue: Queue,
    unneeded: bool,
    /// The tier that a free block stands in, with its neighbours there (null at the ends).
    tier: Option<Tier>,
    before: BlockId,
    after: BlockId,
    /// The next block in the same bucket of the index (null at the end).
    next_in_bucket: BlockId,
    life: Life,
}

/// When a block's content came, when a holder had it last, and how often it was hit.
#[derive(Clone, Copy, Debug)]
struct Life {
    born: Duration,
    used: Duration,
    hits: u32,
}

impl Block {
    const NEW: Self = Self {
        holders: 0,
        content: None,
        marks: Marks::NONE,
        pinned: false,
        band: Band::DEFAULT,
        queue: Queue::new(0),
        unneeded: false,
        tier: None,
        before: BlockId::NULL,
        after: BlockId::NULL,
        next_in_bucket: BlockId::NULL,
        life: Life { born: Duration::ZERO, used: Duration::ZERO, hits: 0 },
    };

    /// The tier that the block stands in, or joins at its release, while it has content.
    fn own_tier(&self) -> Tier {
        let priority_of_pins = Band::of(80);
        if self.pinned && self.band <= priority_of_pins {
            Tier::Pinned
        } else if self.band != Band::DEFAULT {
            Tier::Banded(self.band)
        } else if self.unneeded {
            Tier::Unneeded
        } else {
            Tier::Regular(self.queue)
        }
    }

    /// Whether a pin keeps it, not a higher priority.
    fn is_pinned(&self) -> bool {
        self.own_tier() == Tier::Pinned
    }

    /// Makes it one of the first queue, of those of its band.
    fn lose_queue(&mut self) {
        self.queue = Queue::default();
        self.unneeded = false;
    }
}

/// The ends and the length of a doubly linked line of free blocks.
#[derive(Clone, Copy, Debug)]
struct Line {
    front: BlockId,
    back: BlockId,
    len: usize,
}

impl Line {
    const EMPTY: Self = Self { front: BlockId::NULL, back: BlockId::NULL, len: 0 };
}

/// A pool for one owner.
#[derive(Debug)]
pub struct PlainPool {
    config: PoolConfig,
    num_blocks: usize,
    /// The first block that is not handed out: below `num_blocks` while the pool shrinks.
    end: usize,
    /// Blocks from the end on that stand in line.
    leaving_in_line: usize,
    /// The most blocks that may stand in the tiers of those with content.
    max_cached: usize,
    defers_bound: bool,
    /// One entry for every block that the pool may ever have.
    blocks: Vec<Block>,
    /// First block of each bucket; within a bucket the one registered first stands first.
    buckets: Vec<BlockId>,
    /// By the tiers' indices. That of the default band stays empty.
    lines: [Line; Tier::COUNT],
    epoch: Epoch,
    stats: StoreStats,
    /// For [`EvictionPolicy::ReuseQueue`].
    reuse: Option<ReuseQueue>,
    clock: Clock,
    /// What was lost since it was last asked for, if somebody listens.
    evictions: Option<Vec<Eviction>>,
}

impl PlainPool {
    /// A pool whose blocks are all free and without content.
    pub fn new(config: PoolConfig) -> Result<Self, InvalidArgument> {
        config.check()?;
        let clock = Clock::default();
        clock.set(Duration::ZERO);
        let has_queues = config.eviction_policy == EvictionPolicy::ReuseQueue;
        let reuse = has_queues.then(|| ReuseQueue::new(config.max_blocks, clock.clone()));
        let mut pool = Self {
            config,
            num_blocks: config.num_blocks,
            end: 1,
            leaving_in_line: 0,
            max_cached: usize::MAX,
            defers_bound: false,
            blocks: vec![Block::NEW; config.max_blocks],
            buckets: vec![BlockId::NULL; (2 * config.max_blocks).next_power_of_two()],
            lines: [Line::EMPTY; _],
            epoch: Epoch::default(),
            stats: StoreStats::default(),
            reuse: reuse.flatten(),
            clock,
            evictions: None,
        };
        pool.move_end(config.num_blocks);
        Ok(pool)
    }

    /// Remembers what is lost from now on.
    pub fn listen(&mut self) {
        self.evictions = Some(Vec::new());
    }

    /// What was lost since the last call, in this order.
    pub fn take_evictions(&mut self) -> Vec<Eviction> {
        self.evictions.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// What `BlockPool::map` tells, found by looking for each cell's blocks among all.
    pub fn map(&self, cells: usize, age_bounds: &[Duration]) -> BlockMap {
        let num_blocks = self.num_blocks - 1;
        let cells = cells.min(num_blocks);
        let mut map = BlockMap::default();
        for cell in 0..cells {
            let in_cell = |id: &BlockId| (id.index() - 1) * cells / num_blocks == cell;
            let blocks: Vec<BlockId> = self.ids().filter(in_cell).collect();
            let count = |what| blocks.iter().filter(|&&id| self.what_is(id) == what).count();
            let states =
                [BlockState::Free, BlockState::Cached, BlockState::Pinned, BlockState::Held];
            map.states.push(states.map(|what| count(what) as u32));
            let mut lower = None;
            for upper in age_bounds.iter().copied().map(Some).chain([None]) {
                let is_between = |age: Duration| {
                    lower.is_none_or(|lower| lower < age) && upper.is_none_or(|upper| age <= upper)
                };
                let ages = blocks.iter().filter_map(|&id| self.age(id));
                map.ages.push(ages.filter(|&age| is_between(age)).count() as u32);
                lower = upper;
            }
        }
        map
    }
}

impl Sealed for PlainPool {}

impl Lookup for PlainPool {
    fn lookup(&self, key: &BlockKey) -> Option<BlockId> {
        self.walk_bucket(self.bucket(key))
            .find(|&id| self.blocks[id.index()].content == Some((*key, self.epoch)))
    }

    fn epoch(&self) -> Epoch {
        self.epoch
    }

    fn clock(&self) -> &Clock {
        &self.clock
    }

    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    fn num_free(&self) -> usize {
        self.line(Tier::Blank).len + self.num_in_tiers() - self.leaving_in_line
    }

    fn stats(&self) -> StoreStats {
        let mut stats = self.stats;
        stats.cached = self.ids().filter(|&id| self.is_cached(id)).count();
        stats.in_use = self.blocks.iter().filter(|block| block.holders > 0).count();
        stats.held_above = self.num_held_above();
        stats.free = self.num_free();
        stats.pinned = self.blocks.iter().filter(|block| block.is_pinned()).count();
        stats.pinned_free = self.line(Tier::Pinned).len;
        stats
    }
}

impl BlockStore for PlainPool {
    fn reuse_queue(&self) -> Option<&ReuseQueue> {
        self.reuse.as_ref()
    }

    fn band(&self, key: &BlockKey) -> Option<Band> {
        self.lookup(key).map(|id| self.blocks[id.index()].band)
    }

    fn key_of(&self, block: BlockId) -> BlockKey {
        let content = self.blocks[block.index()].content;
        content.expect("the block has content").0
    }

    fn held_band(&self, block: BlockId) -> Band {
        self.blocks[block.index()].band
    }

    fn marks(&self, block: BlockId) -> Marks {
        self.blocks[block.index()].marks
    }

    fn free_order(&self) -> Vec<BlockId> {
        let ended = self.ended();
        let line = ended.iter().copied().chain(self.walk(Tier::Blank));
        let tiers = Band::all().flat_map(|band| self.tiers_of(band));
        let rest = tiers.flat_map(|tier| self.walk(tier));
        line.chain(rest.filter(|id| !ended.contains(id))).collect()
    }

    fn cached_blocks(&self) -> Vec<BlockId> {
        self.ids().filter(|&id| self.is_cached(id)).collect()
    }

    fn num_holders(&self, block: BlockId) -> usize {
        self.blocks[block.index()].holders as usize
    }

    fn validate(&self) -> Result<(), Broken> {
        self.validate_line(Tier::Blank)?;
        let mut tiers = Band::all().flat_map(|band| self.tiers_of(band));
        tiers.try_for_each(|tier| self.validate_line(tier))?;
        self.validate_index()?;
        self.ids().try_for_each(|id| self.validate_block(id))?;
        let in_tiers = self.blocks.iter().filter(|block| block.tier.is_some()).count();
        let in_line = self.num_free() + self.leaving_in_line;
        ensure(in_tiers == in_line, || {
            format!("{in_tiers} blocks say that they are free, {in_line} stand in line")
        })
    }

    fn commit(
        &mut self,
        keys: impl ExactSizeIterator<Item = BlockKey> + Clone,
        num_new: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize, Exhausted> {
        let first = out.len();
        out.extend(keys.map_while(|key| self.lookup(&key)));
        let hits = out.len() - first;
        let is_counted = |id: &&BlockId| self.is_free(**id) && !self.is_above(**id);
        let free_hits = out[first..].iter().filter(is_counted).count();
        let needed = num_new.saturating_add(free_hits);
        let free = self.num_free();
        if needed > free {
            out.truncate(first);
            return Err(Exhausted { needed, free });
        }
        for &hit in &out[first..] {
            self.touch(hit);
        }
        out.extend((0..num_new).map(|_| self.hand_out_next(Cause::Evicted)));
        self.stats.allocations += num_new as u64;
        Ok(hits)
    }

    fn register(
        &mut self,
        id: BlockId,
        key: BlockKey,
        epoch: Epoch,
    ) -> Result<Registration, Misuse> {
        self.check_held(id)?;
        if epoch != self.epoch || self.is_retired(id) {
            return Ok(Registration::Stale);
        }
        match self.blocks[id.index()].content {
            Some((held, then)) if then == epoch && held == key => return Ok(Registration::Already),
            Some((_, then)) if then == epoch => return Err(Misuse::OtherHash(id)),
            _ => self.forget(id),
        }
        let hitting = self.lookup(&key);
        self.take_out_surplus(key);
        self.enter(id, key);
        Ok(hitting.map_or(Registration::New, Registration::Duplicate))
    }

    fn release(&mut self, blocks: &[BlockId]) -> Result<(), Misuse> {
        let (freed, outcome) = self.let_go_needed(blocks);
        self.join_line(&freed);
        outcome
    }

    fn release_to(&mut self, blocks: &[BlockId], queue: Queue) -> Result<(), Misuse> {
        let (freed, outcome) = self.let_go_needed(blocks);
        for &id in &freed {
            let is_regular = matches!(self.blocks[id.index()].own_tier(), Tier::Regular(_));
            if self.reuse.is_some() && self.is_cached(id) && is_regular {
                self.blocks[id.index()].queue = queue;
            }
        }
        self.join_line(&freed);
        outcome
    }

    fn release_unneeded(&mut self, blocks: &[BlockId]) -> Result<(), Misuse> {
        let (freed, outcome) = self.let_go(blocks);
        for &id in &freed {
            let is_regular =
                matches!(self.blocks[id.index()].own_tier(), Tier::Regular(_) | Tier::Unneeded);
            let unneeded = self.is_cached(id) && is_regular;
            if unneeded {
                self.blocks[id.index()].lose_queue();
            }
            self.blocks[id.index()].unneeded = unneeded;
        }
        self.join_line(&freed);
        outcome
    }

    fn mark(&mut self, block: BlockId, marks: Marks) {
        let block = &mut self.blocks[block.index()];
        block.marks = block.marks.and(marks);
    }

    fn clear_index(&mut self) {
        self.epoch = self.epoch.next();
        if let Some(evictions) = &mut self.evictions {
            evictions.push(Eviction::Everything);
        }
    }

    fn pin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse> {
        self.set_pins(blocks, true)
    }

    fn unpin(&mut self, blocks: &[BlockId]) -> Result<usize, Misuse> {
        self.set_pins(blocks, false)
    }

    fn demote(&mut self, count: usize) -> usize {
        let possible = if self.num_free() > 0 { count } else { 0 };
        let moved = possible.min(self.line(Tier::Pinned).len);
        self.stats.demotions += moved as u64;
        for _ in 0..moved {
            let id = self.line(Tier::Pinned).front;
            self.unlink(id);
            self.blocks[id.index()].pinned = false;
            if !self.is_cached(id) {
                self.forget(id);
            }
            if self.is_cached(id) || !self.is_above(id) {
                self.push_back_all(&[id]);
            }
        }
        moved
    }

    fn set_band(&mut self, key: &BlockKey, _held: BlockId, band: Band) -> bool {
        let Some(id) = self.lookup(key) else {
            return false;
        };
        self.reclass(id, |block| block.band = band);
        true
    }

    fn resize(&mut self, num_blocks: usize) -> Result<usize, ResizeError> {
        self.config.check_num_blocks(num_blocks)?;
        self.num_blocks = self.num_blocks.max(num_blocks);
        self.move_end(num_blocks);
        self.retire_from(num_blocks);
        self.keep_bound();
        Ok(self.num_held_above())
    }

    fn begin_moves(
        &mut self,
        num_blocks: usize,
        most: usize,
        moves: &mut Moves,
    ) -> Result<(), ResizeError> {
        self.config.check_num_blocks(num_blocks)?;
        if !moves.in_flight().is_empty() {
            return Err(ResizeError::Moving);
        }
        if num_blocks > self.num_blocks {
            let reason = format!(
                "must be at most {}, the blocks that there are, not {num_blocks}",
                self.num_blocks
            );
            return Err(InvalidArgument::new("num_blocks", reason).into());
        }
        self.move_end(num_blocks);
        let before = self.stats.evictions;
        while moves.in_flight().len() < most
            && let Some(one) = self.next_move(moves.in_flight())
        {
            moves.inner_mut().push(one);
        }
        self.stats.lost_to_resize += self.stats.evictions - before;
        self.keep_bound();
        Ok(())
    }

    fn finish_moves(&mut self, moves: &mut Moves) -> Result<usize, ResizeError> {
        let can_finish = |pool: &Self, one: &Move| {
            let block = &pool.blocks[one.from.index()];
            let same = block.content == Some((one.key, one.epoch)) && pool.is_cached(one.from);
            same && block.tier.is_some() && pool.is_above(one.from) && !pool.is_above(one.to)
        };
        let mut failed = vec![];
        let mut moved = 0;
        for one in moves.inner_mut().drain(..) {
            if can_finish(self, &one) {
                self.carry(one.from, one.to);
                moved += 1;
            } else {
                failed.push(one.to);
            }
        }
        self.stats.moved += moved as u64;
        let outcome = self.release(&failed);
        assert_eq!(outcome, Ok(()), "moves hold their blocks");
        Ok(moved)
    }

    fn release_cached(&mut self, count: usize) -> usize {
        self.give_up(count, Cause::Evicted)
    }

    fn set_max_cached(&mut self, blocks: Option<usize>) {
        self.max_cached = blocks.unwrap_or(usize::MAX);
        self.keep_bound();
    }

    fn defer_bound(&mut self, defers: bool) {
        self.defers_bound = defers;
    }

    fn keep_bound(&mut self) {
        if !self.defers_bound {
            let excess = self.num_in_tiers().saturating_sub(self.max_cached);
            self.give_up(excess, Cause::Bounded);
        }
    }
}

impl PlainPool {
    /// How many blocks stand in the tiers of those with content.
    fn num_in_tiers(&self) -> usize {
        let all: usize = self.lines.iter().map(|line| line.len).sum();
        all - self.line(Tier::Blank).len
    }

    /// Every block that the pool may ever have, but the null block.
    fn ids(&self) -> impl Iterator<Item = BlockId> + use<> {
        (1..self.blocks.len() as u32).map(BlockId::new)
    }

    fn is_cached(&self, id: BlockId) -> bool {
        matches!(self.blocks[id.index()].content, Some((_, epoch)) if epoch == self.epoch)
    }

    fn what_is(&self, id: BlockId) -> BlockState {
        let block = &self.blocks[id.index()];
        if block.holders > 0 {
            BlockState::Held
        } else if !self.is_cached(id) {
            BlockState::Free
        } else if block.is_pinned() {
            BlockState::Pinned
        } else {
            BlockState::Cached
        }
    }

    /// The time since the last use of content that can be hit, if somebody listens.
    fn age(&self, id: BlockId) -> Option<Duration> {
        let is_known = self.evictions.is_some() && self.is_cached(id);
        is_known.then(|| self.clock.now() - self.blocks[id.index()].life.used)
    }

    fn is_retired(&self, id: BlockId) -> bool {
        id.index() >= self.num_blocks
    }

    /// Whether the block is not to be handed out any more.
    fn is_above(&self, id: BlockId) -> bool {
        id.index() >= self.end
    }

    // Handing out and giving back.

    fn is_free(&self, id: BlockId) -> bool {
        self.blocks[id.index()].holders == 0
    }

    fn touch(&mut self, id: BlockId) {
        if self.is_free(id) {
            self.unlink(id);
        }
        let block = &mut self.blocks[id.index()];
        block.holders += 1;
        block.life.hits += 1;
        block.life.used = self.clock.now();
        self.stats.touches += 1;
        self.stats.pinned_hits += u64::from(self.blocks[id.index()].is_pinned());
    }

    /// The tiers of a band, in the order in which they are emptied.
    fn tiers_of(&self, band: Band) -> Vec<Tier> {
        match band {
            Band::LOWEST => vec![Tier::Unneeded, Tier::Banded(band)],
            Band::DEFAULT => Queue::all().map(Tier::Regular).collect(),
            band if band == Band::of(80) => vec![Tier::Banded(band), Tier::Pinned],
            band => vec![Tier::Banded(band)],
        }
    }

    /// Blocks of tiers above the regular one that stand in line since before the epoch. They are of no use,
    /// and go first.
    fn ended(&self) -> Vec<BlockId> {
        let above = Band::all().filter(|&band| band > Band::DEFAULT);
        let tiers = above.flat_map(|band| self.tiers_of(band));
        let ended = |tier| {
            let line = self.walk(tier);
            line.take_while(|&id| !self.is_cached(id))
        };
        tiers.flat_map(ended).collect()
    }

    /// The next block of a band.
    fn next_of(&self, band: Band) -> Option<BlockId> {
        if band == Band::DEFAULT {
            return self.next_regular();
        }
        let fronts = self.tiers_of(band).into_iter();
        let mut fronts = fronts.map(|tier| self.line(tier).front);
        fronts.find(|front| !front.is_null())
    }

    /// The block of the lowest rank in the regular tier: without a policy the oldest one.
    fn next_regular(&self) -> Option<BlockId> {
        let Some(reuse) = &self.reuse else {
            return self.walk(Tier::Regular(Queue::default())).next();
        };
        let ranked = Queue::all().flat_map(|queue| {
            let line = self.walk(Tier::Regular(queue));
            line.map(move |id| (reuse.rank(queue, id, reuse.now()), id))
        });
        // Of several with the lowest rank the first.
        ranked.min_by_key(|&(rank, _)| rank).map(|(_, id)| id)
    }

    /// The block at the front of the tiers.
    fn next_in_tiers(&self) -> Option<BlockId> {
        let ended = self.ended().first().copied();
        ended.or_else(|| Band::all().find_map(|band| self.next_of(band)))
    }

    /// The block at the front of the free line.
    fn next_free(&self) -> Option<BlockId> {
        let ended = self.ended().first().copied();
        let blank = || self.walk(Tier::Blank).next();
        ended.or_else(blank).or_else(|| self.next_in_tiers())
    }

    /// Takes the block at the front of the free line, which must not be empty. Leaving ones are dropped.
    fn hand_out_next(&mut self, cause: Cause) -> BlockId {
        loop {
            let id = self.next_free().expect("a block is free");
            self.evict(id, cause);
            if !self.is_above(id) {
                self.blocks[id.index()].holders = 1;
                return id;
            }
        }
    }

    /// Takes a free block out of its line, and its content from it.
    fn evict(&mut self, id: BlockId, cause: Cause) {
        self.unlink(id);
        self.count_eviction(id);
        self.lose(id, cause);
    }

    fn count_eviction(&mut self, id: BlockId) {
        let evicts = self.is_cached(id);
        self.stats.evictions += u64::from(evicts);
        self.stats.pinned_evictions += u64::from(evicts && self.blocks[id.index()].is_pinned());
    }

    /// Gives up the content of the first `count` blocks of the tiers.
    fn give_up(&mut self, count: usize, cause: Cause) -> usize {
        let mut given_up = 0;
        while given_up < count
            && self.num_free() > 0
            && let Some(id) = self.next_in_tiers()
        {
            self.evict(id, cause);
            given_up += 1;
            if !self.is_above(id) {
                self.push_front(id);
            }
        }
        given_up
    }

    fn let_go_needed(&mut self, blocks: &[BlockId]) -> (Vec<BlockId>, Result<(), Misuse>) {
        let (freed, outcome) = self.let_go(blocks);
        for &id in &freed {
            self.blocks[id.index()].unneeded = false;
        }
        (freed, outcome)
    }

    /// Gives up a hold of each block; those that have none any more.
    fn let_go(&mut self, blocks: &[BlockId]) -> (Vec<BlockId>, Result<(), Misuse>) {
        let mut freed = Vec::with_capacity(blocks.len());
        let outcome = blocks.iter().try_for_each(|&id| {
            self.check_held(id)?;
            let block = &mut self.blocks[id.index()];
            block.holders -= 1;
            block.life.used = self.clock.now();
            if block.holders == 0 {
                freed.push(id);
            }
            Ok(())
        });
        (freed, outcome)
    }

    /// Puts blocks that lost their last holder where [`FreeOrder`] says.
    fn join_line(&mut self, freed: &[BlockId]) {
        let (cached, rest): (Vec<BlockId>, Vec<BlockId>) =
            freed.iter().partition(|&&id| self.is_cached(id));
        for &id in &rest {
            self.forget(id);
        }
        // Leaving blocks without content stand nowhere.
        if self.config.free_order == FreeOrder::Append {
            let stays = |id: &&BlockId| self.is_cached(**id) || !self.is_above(**id);
            let kept: Vec<BlockId> = freed.iter().filter(stays).copied().collect();
            self.push_back_all(&kept);
        } else {
            for &id in rest.iter().rev() {
                if !self.is_above(id) {
                    self.push_front(id);
                }
            }
            self.push_back_all(&cached);
        }
        self.keep_bound();
    }

    fn push_back_all(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            self.push_back(id, self.blocks[id.index()].own_tier());
        }
    }

    fn check_held(&self, id: BlockId) -> Result<(), Misuse> {
        if id.is_null() {
            return Err(Misuse::Null);
        }
        match self.blocks.get(id.index()) {
            None => Err(Misuse::Foreign(id)),
            Some(block) if block.holders > 0 => Ok(()),
            Some(_) if self.is_retired(id) => Err(Misuse::Retired(id)),
            Some(_) => Err(Misuse::NotInUse(id)),
        }
    }

    // Pins.

    fn set_pins(&mut self, blocks: &[BlockId], pinned: bool) -> Result<usize, Misuse> {
        let mut changed = 0;
        for &id in blocks {
            self.check_held(id)?;
            let copies = match self.blocks[id.index()].content {
                Some((key, epoch)) if epoch == self.epoch => self.copies(&key),
                _ => vec![],
            };
            changed += usize::from(if pinned {
                copies
                    .first()
                    .is_some_and(|&first| self.reclass(first, |block| block.pinned = true))
            } else {
                let unpin = |copy: &&BlockId| self.reclass(**copy, |block| block.pinned = false);
                copies.iter().chain([&id]).filter(unpin).count() > 0
            });
        }
        Ok(changed)
    }

    /// Changes pin or band of a block; whether they are others then. A free block whose tier is another now moves to
    /// the end of that.
    fn reclass(&mut self, id: BlockId, change: impl Fn(&mut Block)) -> bool {
        let block = &mut self.blocks[id.index()];
        let before = (block.pinned, block.band);
        let was_pinned = block.is_pinned();
        change(block);
        if (block.pinned, block.band) == before {
            return false;
        }
        block.lose_queue();
        self.stats.pins += u64::from(block.is_pinned() && !was_pinned);
        if block.tier.is_some_and(|tier| tier != block.own_tier()) {
            self.unlink(id);
            self.push_back_all(&[id]);
        }
        true
    }

    // Size.

    fn num_held_above(&self) -> usize {
        let above = self.blocks[self.end..].iter();
        above.filter(|block| block.holders > 0).count()
    }

    /// Blocks from `end` on are handed out no more, those below are.
    fn move_end(&mut self, end: usize) {
        for id in self.ids().filter(|id| id.index() >= end) {
            if self.blocks[id.index()].tier == Some(Tier::Blank) {
                self.unlink(id);
            }
        }
        let comes_back = (self.end..end).rev().map(|index| BlockId::new(index as u32));
        self.end = end;
        for id in comes_back {
            if self.is_free(id) && self.blocks[id.index()].tier.is_none() {
                self.push_front(id);
            }
        }
        let leaving = self.blocks[end..].iter().filter(|block| block.tier.is_some());
        self.leaving_in_line = leaving.count();
    }

    fn retire_from(&mut self, num_blocks: usize) {
        let gone = (num_blocks..self.num_blocks).map(|index| BlockId::new(index as u32));
        let (free, held): (Vec<BlockId>, Vec<BlockId>) = gone.partition(|&id| self.is_free(id));
        let before = self.stats.evictions;
        for id in free {
            if self.blocks[id.index()].tier.is_some() {
                self.evict(id, Cause::Resized);
            }
        }
        for id in held {
            self.count_eviction(id);
            self.blocks[id.index()].life.used = self.clock.now();
            self.lose(id, Cause::Resized);
        }
        self.stats.lost_to_resize += self.stats.evictions - before;
        self.num_blocks = num_blocks;
    }

    // Moves.

    /// The blocks of the tiers, what goes first of all first.
    fn tiers_in_order(&self) -> Vec<BlockId> {
        let mut order = self.ended();
        for band in Band::all() {
            let tiers = self.tiers_of(band);
            let mut blocks: Vec<(Option<Rank>, BlockId)> = vec![];
            for tier in tiers {
                let rank = |id| match (&self.reuse, tier) {
                    (Some(reuse), Tier::Regular(queue)) => Some(reuse.rank(queue, id, reuse.now())),
                    _ => None,
                };
                blocks.extend(self.walk(tier).map(|id| (rank(id), id)));
            }
            blocks.sort_by_key(|&(rank, _)| rank);
            blocks.retain(|(_, id)| !order.contains(id));
            order.extend(blocks.into_iter().map(|(_, id)| id));
        }
        order
    }

    /// Of the leaving blocks with content the last in the order, and the first block below, if that goes
    /// first of the two.
    fn next_move(&mut self, in_flight: &[Move]) -> Option<Move> {
        let order = self.tiers_in_order();
        let is_from = |id: BlockId| in_flight.iter().any(|one| one.from == id);
        let can_move = |id: BlockId| self.is_above(id) && self.is_cached(id) && !is_from(id);
        let last = order.iter().rposition(|&id| can_move(id))?;
        let from = order[last];
        let below = order.iter().position(|&id| !self.is_above(id));
        let is_worse = self.line(Tier::Blank).len > 0 || below.is_some_and(|first| first < last);
        if !is_worse {
            // What stands before it is leaving too, and goes before all that stays.
            if self.num_free() > 0 {
                order[..last].iter().for_each(|&id| self.evict(id, Cause::Resized));
            }
            return None;
        }
        let to = self.hand_out_next(Cause::Resized);
        let (key, epoch) = self.blocks[from.index()].content?;
        Some(Move::new(from, to, key, epoch))
    }

    /// Puts a block in the place of another: in line, in its bucket, and with its content.
    fn carry(&mut self, from: BlockId, to: BlockId) {
        let old = self.blocks[from.index()];
        let (key, _) = old.content.expect("it was looked at");
        let tier = old.tier.expect("it was looked at");
        let bucket = self.bucket(&key);
        let before = self
            .walk_bucket(bucket)
            .find(|&other| self.blocks[other.index()].next_in_bucket == from);
        match before {
            Some(before) => self.blocks[before.index()].next_in_bucket = to,
            None if self.buckets[bucket] == from => self.buckets[bucket] = to,
            // A copy that was one too many.
            None => {}
        }
        self.unlink(from);
        self.blocks[from.index()] = Block::NEW;
        self.blocks[to.index()] = Block { tier: None, ..old };
        if let Some(reuse) = &self.reuse {
            reuse.take_place(from, to);
        }
        self.place(to, tier, old.before, old.after);
    }

    // The index.

    fn bucket(&self, key: &BlockKey) -> usize {
        let [a, b, c, d, ..] = *key.hash.as_bytes();
        let spread = u32::from_le_bytes([a, b, c, d]) ^ u32::from(key.group.get());
        spread as usize & (self.buckets.len() - 1)
    }

    fn walk_bucket(&self, bucket: usize) -> impl Iterator<Item = BlockId> {
        let mut next = self.buckets[bucket];
        std::iter::from_fn(move || {
            let id = next;
            next = self.blocks[id.index()].next_in_bucket;
            (!id.is_null()).then_some(id)
        })
    }

    /// Where many blocks hold the key, takes the last free one of the regular tier out of the index.
    fn take_out_surplus(&mut self, key: BlockKey) {
        let copies = self.copies(&key);
        if copies.len() < MAX_COPIES {
            return;
        }
        let mut later = copies[1..].iter().rev();
        if let Some(&surplus) = later.find(|id| {
            matches!(self.blocks[id.index()].tier, Some(Tier::Regular(_) | Tier::Unneeded))
        }) {
            self.take_out(surplus, &key);
        }
    }

    /// The blocks that hold the key and can be found, the one that hits first.
    fn copies(&self, key: &BlockKey) -> Vec<BlockId> {
        let holds_key = |id: &BlockId| self.blocks[id.index()].content == Some((*key, self.epoch));
        self.walk_bucket(self.bucket(key)).filter(holds_key).collect()
    }

    /// Adds a block without content to the end of its bucket.
    fn enter(&mut self, id: BlockId, key: BlockKey) {
        let bucket = self.bucket(&key);
        match self.walk_bucket(bucket).last() {
            None => self.buckets[bucket] = id,
            Some(last) => self.blocks[last.index()].next_in_bucket = id,
        }
        let (born, used) = (self.clock.now(), self.clock.now());
        let block = &mut self.blocks[id.index()];
        block.content = Some((key, self.epoch));
        block.marks = Marks::NONE;
        block.life = Life { born, used, hits: 0 };
    }

    /// Takes content and pin from a block, and tells of content of this epoch.
    fn lose(&mut self, id: BlockId, cause: Cause) {
        if self.evictions.is_none() {
            return self.forget(id);
        }
        let Block { content, pinned, band, life, .. } = self.blocks[id.index()];
        let found = |key: &BlockKey| self.walk_bucket(self.bucket(key)).any(|other| other == id);
        let cause = match cause == Cause::Evicted && self.blocks[id.index()].unneeded {
            true => Cause::Discarded,
            false => cause,
        };
        let was_found = content.is_some_and(|(key, _)| found(&key));
        self.forget(id);
        if let Some((key, epoch)) = content
            && epoch == self.epoch
        {
            let is_last = was_found && self.lookup(&key).is_none();
            let mut evicted = EvictedBlock::new(key, cause);
            evicted.band = if pinned { band.max(Band::of(80)) } else { band };
            evicted.hits = life.hits;
            evicted.age = self.clock.now() - life.born;
            evicted.idle = self.clock.now() - life.used;
            evicted.is_last = is_last;
            if let Some(evictions) = &mut self.evictions {
                evictions.push(Eviction::Block(evicted));
            }
        }
    }

    /// Takes content and pin from a block.
    fn forget(&mut self, id: BlockId) {
        self.blocks[id.index()].pinned = false;
        self.blocks[id.index()].band = Band::DEFAULT;
        self.blocks[id.index()].lose_queue();
        let Some((key, _)) = self.blocks[id.index()].content.take() else {
            return;
        };
        self.take_out(id, &key);
    }

    /// Takes a block out of its bucket, if it stands there.
    fn take_out(&mut self, id: BlockId, key: &BlockKey) {
        let bucket = self.bucket(key);
        if !self.walk_bucket(bucket).any(|other| other == id) {
            return;
        }
        let next = std::mem::replace(&mut self.blocks[id.index()].next_in_bucket, BlockId::NULL);
        let before =
            self.walk_bucket(bucket).find(|&other| self.blocks[other.index()].next_in_bucket == id);
        match before {
            None => self.buckets[bucket] = next,
            Some(before) => self.blocks[before.index()].next_in_bucket = next,
        }
    }

    // The lines of free blocks.

    fn line(&self, tier: Tier) -> &Line {
        &self.lines[tier.index()]
    }

    fn line_mut(&mut self, tier: Tier) -> &mut Line {
        &mut self.lines[tier.index()]
    }

    fn walk(&self, tier: Tier) -> impl Iterator<Item = BlockId> {
        let mut next = self.line(tier).front;
        std::iter::from_fn(move || {
            let id = next;
            next = self.blocks[id.index()].after;
            (!id.is_null()).then_some(id)
        })
    }

    fn push_front(&mut self, id: BlockId) {
        self.place(id, Tier::Blank, BlockId::NULL, self.line(Tier::Blank).front);
    }

    fn push_back(&mut self, id: BlockId, tier: Tier) {
        if let Some(reuse) = &self.reuse {
            reuse.stamp(id, reuse.now());
        }
        self.place(id, tier, self.line(tier).back, BlockId::NULL);
    }

    fn place(&mut self, id: BlockId, tier: Tier, before: BlockId, after: BlockId) {
        let block = &mut self.blocks[id.index()];
        (block.tier, block.before, block.after) = (Some(tier), before, after);
        self.join(tier, before, id);
        self.join(tier, id, after);
        self.line_mut(tier).len += 1;
        self.leaving_in_line += usize::from(self.is_above(id));
    }

    fn unlink(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        let (before, after) = (block.before, block.after);
        let tier = block.tier.take().expect("a free block stands in a tier");
        self.join(tier, before, after);
        self.line_mut(tier).len -= 1;
        self.leaving_in_line -= usize::from(self.is_above(id));
    }

    /// Makes two blocks neighbours; a null block stands for the end of the line.
    fn join(&mut self, tier: Tier, before: BlockId, after: BlockId) {
        if before.is_null() {
            self.line_mut(tier).front = after;
        } else {
            self.blocks[before.index()].after = after;
        }
        if after.is_null() {
            self.line_mut(tier).back = before;
        } else {
            self.blocks[after.index()].before = before;
        }
    }

    // Validation.

    fn validate_line(&self, tier: Tier) -> Result<(), Broken> {
        let line = *self.line(tier);
        let mut before = BlockId::NULL;
        for id in self.walk(tier).take(line.len + 1) {
            let block = &self.blocks[id.index()];
            ensure(block.tier == Some(tier) && block.before == before, || {
                format!("block {id} is linked wrongly in the {tier:?} tier")
            })?;
            before = id;
        }
        let walked = self.walk(tier).take(line.len + 1).count();
        ensure(walked == line.len && line.back == before, || {
            format!("the {tier:?} tier ends at {before} after {walked} of {} blocks", line.len)
        })
    }

    fn validate_index(&self) -> Result<(), Broken> {
        let mut indexed = 0;
        for bucket in 0..self.buckets.len() {
            for id in self.walk_bucket(bucket) {
                indexed += 1;
                let content = self.blocks[id.index()].content;
                ensure(content.is_some_and(|(key, _)| self.bucket(&key) == bucket), || {
                    format!("block {id} stands in a bucket that is not its own")
                })?;
            }
        }
        let with_content = self.blocks.iter().filter(|block| block.content.is_some()).count();
        ensure(indexed <= with_content, || {
            format!("{with_content} blocks hold content, {indexed} are in the index")
        })
    }

    fn validate_block(&self, id: BlockId) -> Result<(), Broken> {
        let block = &self.blocks[id.index()];
        let in_line = block.tier.is_some();
        let stays = !self.is_above(id) || in_line && !self.is_retired(id);
        let should_be = block.holders == 0 && stays;
        ensure(in_line == should_be, || {
            format!("block {id} has {} holders; in line: {in_line}", block.holders)
        })?;
        ensure(!self.is_retired(id) || block.content.is_none(), || {
            format!("block {id} is retired and holds content")
        })?;
        let is_plain = !block.pinned && block.band == Band::DEFAULT;
        ensure(is_plain || block.content.is_some(), || {
            format!("block {id} has a band or a pin without content")
        })?;
        let stands = |tier| tier == Tier::Blank || tier == block.own_tier();
        ensure(block.tier.is_none_or(stands), || format!("block {id} stands in the wrong tier"))
    }
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(Broken(what())) }
}
