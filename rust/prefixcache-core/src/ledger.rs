//! What retention hints have raised, for whom, and until when.
//!
//! The pool knows of bands alone: each content has one, and that of a block is decided at its release. Who asked
//! for it and for how long stands here, by content rather than by block, since content moves. The ledger belongs
//! to the one thread that changes a cache; it takes `&mut self` and there is no lock.
//!
//! **A content's band** is the highest that anybody asks for. An owner whose content would be more than its share
//! of the pool loses what it used longest ago, never what others asked for. A hit makes all TTLs of what it hits
//! begin anew, whoever hits. Lowered content is nobody's, counts against no share, and the first hit makes it as
//! dear as any other.
//!
//! **Order.** All of an owner's content is a set of prefixes, each block asked for at least as dearly and for as
//! long as the next; that holds after a raise, a hit, the end of a TTL and a demotion, each of which takes what
//! follows first. So content goes in order still (see `PrefixCache::keeps_prefixes`): a block that moves to
//! another line moves to its end, before the blocks that precede it in its prompt. Where a raised content has
//! twins, and wherever something is lowered, the pool is told that the order has ended.
//!
//! **Cost.** O(1) a block, but for a tree of the times at which TTLs end, which are rounded up to an eighth of a
//! second. What the pool has lost since the last call is forgotten first, so there are at most [`MAX_OWNERS`]
//! entries for each content that the pool holds, whatever is asked for and by however many.

mod entries;
mod key_hashing;

use std::collections::HashMap;
use std::collections::btree_map::{BTreeMap, Entry as Slot};
use std::time::{Duration, Instant};

use crate::band::Band;
use crate::error::InvalidArgument;
use crate::hints::{Hints, Owner, Wish};
use crate::id::{BlockId, Epoch};
use crate::sequence::{Holding, Sequence};
use crate::store::{BlockKey, BlockStore, Lookup};

use entries::{Ends, Entries, Entry, Line, NEVER, Time};
use key_hashing::KeyHashing;

/// Owners that may raise one content. What a further one asks for does not count, from there on.
pub const MAX_OWNERS: usize = 4;

/// Lifetime counts, and what there is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerStats {
    /// Content that was raised or lowered and is there, as of the ledger's last call.
    pub hinted: usize,
    /// Blocks that lost their priority to younger ones of the same owner.
    pub demoted: u64,
    /// Blocks whose TTL ended.
    pub expired: u64,
}

/// The time: the system's monotonic clock, until one is given.
#[derive(Debug)]
enum Clock {
    System(Instant),
    Given(Duration),
}

impl Clock {
    fn now(&self) -> Time {
        millis(match self {
            Self::System(start) => start.elapsed(),
            Self::Given(now) => *now,
        })
    }
}

/// What retention hints have raised: see the [module](self).
#[derive(Debug)]
pub struct Ledger {
    /// Of the pool's blocks, for each owner.
    share: f64,
    clock: Clock,
    epoch: Epoch,
    entries: Entries,
    /// The first entry of each content.
    contents: HashMap<BlockKey, u32, KeyHashing>,
    owners: HashMap<Owner, Ends>,
    times: BTreeMap<Time, Ends>,
    demoted: u64,
    expired: u64,
}

/// A block that is to be raised.
struct Raise {
    key: BlockKey,
    /// The band that its content has.
    band: Band,
    held: BlockId,
    /// Which block of the sequence.
    index: usize,
}

impl Ledger {
    /// A ledger that gives each owner this share of the pool, from 0 to 1.
    pub fn new(share: f64) -> Result<Self, InvalidArgument> {
        if !(0.0..=1.0).contains(&share) {
            let reason = format!("must be from 0 to 1, not {share}");
            return Err(InvalidArgument::new("retention_budget", reason));
        }
        Ok(Self {
            share,
            clock: Clock::System(Instant::now()),
            epoch: Epoch::default(),
            entries: Entries::default(),
            contents: HashMap::default(),
            owners: HashMap::new(),
            times: BTreeMap::new(),
            demoted: 0,
            expired: 0,
        })
    }

    /// Sets the time, and ends the use of the system's clock: with times that are given, the same calls have
    /// the same outcome.
    pub fn set_time(&mut self, now: Duration) {
        self.clock = Clock::Given(now);
    }

    /// Lifetime counts, and what there is now.
    #[must_use]
    pub fn stats(&self) -> LedgerStats {
        LedgerStats {
            hinted: self.contents.len(),
            demoted: self.demoted,
            expired: self.expired,
        }
    }

    /// How many entries there are, one for each owner of each content.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is raised or lowered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Content of ended epochs can be hit no more.
    fn follow_epoch(&mut self, store: &impl Lookup) {
        if self.epoch == store.epoch() {
            return;
        }
        self.epoch = store.epoch();
        self.entries = Entries::default();
        self.contents.clear();
        self.owners = HashMap::new();
        self.times = BTreeMap::new();
    }

    /// Forgets what was asked for content that the pool has lost since the last call, be it back or not: it came
    /// back without a band.
    pub fn forget_lost(&mut self, store: &mut impl BlockStore) {
        self.follow_epoch(store);
        while let Some(key) = store.take_hinted_loss() {
            if store.band(&key) != Some(self.band(&key)) {
                self.forget(&key);
            }
        }
    }

    fn forget(&mut self, key: &BlockKey) {
        let mut next = self.contents.get(key).copied();
        while let Some(at) = next {
            next = self.entries.next_of_content(at);
            self.unschedule(at);
            self.remove(at);
        }
    }

    // Use.

    /// Lets the hits of a committed sequence begin their TTLs anew. To be called after the commit.
    pub fn note_hits(&mut self, store: &mut impl BlockStore, sequence: &Sequence) {
        let Some(holding) = &sequence.holding else {
            return;
        };
        self.forget_lost(store);
        if self.is_empty() || holding.num_hits == 0 {
            return;
        }
        let now = self.clock.now();
        for index in (0..holding.num_hits).rev() {
            for (group, _) in sequence.config().groups.each() {
                let table = &holding.tables[group.index()];
                if index >= table.first && store.held_band(table.blocks[index]) != Band::DEFAULT {
                    let key = BlockKey::new(sequence.hashes()[index], group);
                    self.refresh(store, &key, now);
                }
            }
        }
    }

    fn refresh(&mut self, store: &mut impl BlockStore, key: &BlockKey, now: Time) {
        let mut next = self.contents.get(key).copied();
        while let Some(at) = next {
            next = self.entries.next_of_content(at);
            if self.entries.get(at).owner.is_none() {
                self.end(store, at);
            } else {
                self.entries.get_mut(at).refresh(now);
                self.note_use(at);
            }
        }
    }

    /// Puts an entry at the end of its lines, whose TTLs may have changed.
    fn note_use(&mut self, at: u32) {
        self.unschedule(at);
        self.schedule(at);
        if let Some(ends) = self
            .entries
            .get(at)
            .owner
            .and_then(|owner| self.owners.get_mut(&owner))
        {
            self.entries.unlink(Line::Owner, ends, at);
            self.entries.push_back(Line::Owner, ends, at);
        }
    }

    // Raising and lowering.

    /// Does what a sequence's hints ask for, with what it has published. To be called before its release,
    /// while it holds its blocks.
    pub fn keep(&mut self, store: &mut impl BlockStore, sequence: &Sequence) {
        let (Some(hints), Some(holding)) = (&sequence.hints, &sequence.holding) else {
            return;
        };
        self.forget_lost(store);
        // What it holds may be of an epoch that has ended.
        if holding.epoch != self.epoch {
            return;
        }
        let now = self.clock.now();
        let most = (self.share * store.num_blocks().saturating_sub(1) as f64) as usize;
        let mut raised = self.raisable(store, sequence, hints, holding);
        raised.truncate(most);
        self.lower(store, sequence, hints, holding, now);
        for raise in raised.iter().rev() {
            self.raise(store, sequence, hints, raise, now);
        }
        self.keep_to(store, hints.owner(), most);
    }

    /// What the hints raise, first block first: of a group that needs all before a block only as far as that
    /// is raised too.
    fn raisable(
        &self,
        store: &impl Lookup,
        sequence: &Sequence,
        hints: &Hints,
        holding: &Holding,
    ) -> Vec<Raise> {
        let size = sequence.config().block_size;
        let full = holding.num_published;
        let groups = &sequence.config().groups;
        let mut ended = vec![false; groups.count()];
        let mut raised = Vec::new();
        for index in 0..hints.raised_blocks(full, size) {
            for (group, spec) in groups.each() {
                if ended[group.index()] || hints.raising(index, spec, full, size).next().is_none() {
                    continue;
                }
                let key = BlockKey::new(sequence.hashes()[index], group);
                match store.band(&key) {
                    Some(band) if self.has_room(&key, hints.owner()) => {
                        let held = holding.tables[group.index()].blocks[index];
                        raised.push(Raise {
                            key,
                            band,
                            held,
                            index,
                        });
                    }
                    _ => ended[group.index()] = spec.needs_whole_prefix(),
                }
            }
        }
        raised
    }

    fn has_room(&self, key: &BlockKey, owner: Owner) -> bool {
        let entries = self.entries.of_content(self.contents.get(key).copied());
        let mut owners = entries.filter_map(|at| self.entries.get(at).owner);
        let mut others = 0;
        owners.all(|other| {
            others += usize::from(other != owner);
            others < MAX_OWNERS
        })
    }

    fn raise(
        &mut self,
        store: &mut impl BlockStore,
        sequence: &Sequence,
        hints: &Hints,
        raise: &Raise,
        now: Time,
    ) {
        let spec = sequence.config().groups.specs()[raise.key.group.index()];
        let full = sequence
            .holding
            .as_ref()
            .map_or(0, |holding| holding.num_published);
        let size = sequence.config().block_size;
        let at = self.entry(raise.key, Some(hints.owner()));
        for wish in hints.raising(raise.index, spec, full, size) {
            self.entries.get_mut(at).ask(wish.band, ttl(wish), now);
        }
        self.note_use(at);
        let band = self.band(&raise.key);
        if band != raise.band {
            store.set_band(&raise.key, raise.held, band);
        }
    }

    /// Lowers what the sequence itself has computed, and nobody asked for.
    fn lower(
        &mut self,
        store: &mut impl BlockStore,
        sequence: &Sequence,
        hints: &Hints,
        holding: &Holding,
        now: Time,
    ) {
        let size = sequence.config().block_size;
        let full = holding.num_published;
        for index in (holding.num_hits..full).rev() {
            let Some(wish) = hints.lowering(index, size) else {
                return;
            };
            for (group, _) in sequence.config().groups.each() {
                let table = &holding.tables[group.index()];
                if index >= table.first {
                    let key = BlockKey::new(sequence.hashes()[index], group);
                    self.lower_one(store, key, table.blocks[index], wish, now);
                }
            }
        }
    }

    fn lower_one(
        &mut self,
        store: &mut impl BlockStore,
        key: BlockKey,
        held: BlockId,
        wish: Wish,
        now: Time,
    ) {
        if store.lookup(&key) != Some(held) || self.contents.contains_key(&key) {
            return;
        }
        let at = self.entry(key, None);
        self.entries.get_mut(at).ask(wish.band, ttl(wish), now);
        self.note_use(at);
        let band = self.band(&key);
        if store.band(&key).is_some_and(|now| now != band) {
            store.set_band(&key, held, band);
        }
    }

    /// An owner's entry for a content, which is made if there is none.
    fn entry(&mut self, key: BlockKey, owner: Option<Owner>) -> u32 {
        let first = self.contents.get(&key).copied();
        let mut own = self.entries.of_content(first);
        if let Some(at) = own.find(|&at| self.entries.get(at).owner == owner) {
            return at;
        }
        drop(own);
        self.add(Entry::new(key, owner))
    }

    fn add(&mut self, entry: Entry) -> u32 {
        let (key, owner) = (entry.key, entry.owner);
        let at = self.entries.add(entry);
        self.entries.get_mut(at).same = self.contents.insert(key, at).unwrap_or(entries::NONE);
        if let Some(owner) = owner {
            let ends = self.owners.entry(owner).or_default();
            self.entries.push_back(Line::Owner, ends, at);
        }
        at
    }

    /// The band that content should have: the highest that anybody asks for.
    fn band(&self, key: &BlockKey) -> Band {
        let entries = self.entries.of_content(self.contents.get(key).copied());
        let bands = entries.filter_map(|at| self.entries.get(at).band());
        bands.max().unwrap_or_default()
    }

    // Ending.

    /// Ends what an owner used longest ago, down to `most`.
    fn keep_to(&mut self, store: &mut impl BlockStore, owner: Owner, most: usize) {
        while let Some(ends) = self.owners.get(&owner).copied()
            && ends.len > most
            && let Some(at) = ends.front()
        {
            self.demoted += u64::from(self.end(store, at));
        }
    }

    /// Gives content whose TTL has ended the band that it has without, of `most` entries at most, those
    /// that ended first. Returns how many blocks moved to another band. To be called now and then, such as
    /// before each step of a scheduler.
    pub fn demote_expired(&mut self, store: &mut impl BlockStore, most: usize) -> usize {
        self.forget_lost(store);
        let now = self.clock.now();
        let mut moved = 0;
        for _ in 0..most {
            let Some((&due, ends)) = self.times.first_key_value() else {
                break;
            };
            let Some(at) = ends.front().filter(|_| due <= now) else {
                break;
            };
            moved += usize::from(self.expire(store, at, due));
        }
        moved
    }

    /// Drops what has ended of an entry by the time `due`; whether its content moved to another band.
    ///
    /// What ended later is dropped in its own turn, even where that is over too: content goes from line to line
    /// in the order in which its levels ended, so that a prompt's last blocks are always before its first ones.
    fn expire(&mut self, store: &mut impl BlockStore, at: u32, due: Time) -> bool {
        let key = self.entries.get(at).key;
        let before = self.band(&key);
        self.unschedule(at);
        self.entries.get_mut(at).drop_ended(due);
        if self.entries.get(at).band().is_some() {
            self.schedule(at);
        } else {
            self.remove(at);
        }
        let moved = self.move_from(store, &key, before);
        self.expired += u64::from(moved && self.band(&key) == Band::DEFAULT);
        moved
    }

    /// Ends an entry; whether its content moved to another band.
    fn end(&mut self, store: &mut impl BlockStore, at: u32) -> bool {
        let key = self.entries.get(at).key;
        let before = self.band(&key);
        self.unschedule(at);
        self.remove(at);
        self.move_from(store, &key, before)
    }

    /// Gives content the band that it should have now, if it is there and still of the band `before`.
    fn move_from(&self, store: &mut impl BlockStore, key: &BlockKey, before: Band) -> bool {
        let after = self.band(key);
        after != before
            && store.band(key) == Some(before)
            && store.set_band(key, BlockId::NULL, after)
    }

    /// Takes an entry that stands in no line of a time out of the others.
    fn remove(&mut self, at: u32) {
        let (key, owner, next) = {
            let entry = self.entries.get(at);
            (entry.key, entry.owner, entry.same)
        };
        if let Some(owner) = owner
            && let Some(ends) = self.owners.get_mut(&owner)
        {
            self.entries.unlink(Line::Owner, ends, at);
            if ends.len == 0 {
                self.owners.remove(&owner);
            }
        }
        let first = self.contents.get(&key).copied();
        let before = self
            .entries
            .of_content(first)
            .find(|&other| self.entries.get(other).same == at);
        match before {
            Some(before) => self.entries.get_mut(before).same = next,
            None if next == entries::NONE => drop(self.contents.remove(&key)),
            None => drop(self.contents.insert(key, next)),
        }
        self.entries.free(at);
    }

    // Times.

    fn schedule(&mut self, at: u32) {
        let due = self.entries.get(at).end();
        self.entries.get_mut(at).due = due;
        if due != NEVER {
            let ends = self.times.entry(due).or_default();
            self.entries.push_back(Line::Time, ends, at);
        }
    }

    fn unschedule(&mut self, at: u32) {
        let due = std::mem::replace(&mut self.entries.get_mut(at).due, NEVER);
        if due == NEVER {
            return;
        }
        if let Slot::Occupied(mut slot) = self.times.entry(due) {
            self.entries.unlink(Line::Time, slot.get_mut(), at);
            if slot.get().len == 0 {
                slot.remove();
            }
        }
    }
}

/// Of a time that is not for ever.
fn millis(time: Duration) -> Time {
    time.as_millis().min(u128::from(NEVER - 1)) as Time
}

fn ttl(wish: Wish) -> Time {
    wish.ttl.map_or(NEVER, |ttl| millis(ttl).max(1))
}
