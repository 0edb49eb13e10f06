//! The retention table: what hints have raised, for whom, and until when.
//!
//! The pool knows of bands alone: each block's content has one, and that of a block is decided at its release. Who
//! asked for it and for how long stands here, by the block that hits for the content. The pool reports whatever
//! content leaves a block or moves to another. The table belongs to the one thread that changes a cache; it takes
//! `&mut self` and there is no lock.
//!
//! **A content's band** is the highest that anybody asks for. An owner whose content would be more than its share
//! of the pool loses what it used longest ago, never what others asked for. A hit starts all TTLs of what it hits
//! again, whoever hits. Lowered content is nobody's, counts against no share, and the first hit makes it as
//! dear as any other.
//!
//! **Order.** All of an owner's content is a set of prefixes, each block asked for at least as dearly and for as
//! long as the next; that holds after a raise, a hit, the end of a TTL and a demotion, each of which takes what
//! follows first. So content goes in order still (see `PrefixCache::keeps_prefixes`): a block that moves to
//! another line moves to its end, before the blocks that precede it in its prompt. Where a raised content has
//! further copies, wherever something is lowered, and where an owner's hints end before those of what follows, the
//! pool learns that the order has ended.
//!
//! **Cost.** A few nanoseconds a block: what was asked for is kept by ranges of blocks (`spans.rs`),
//! and a block that is the only copy of its content, as most are, is looked up nowhere. Times at which TTLs end
//! are rounded up to an eighth of a second and stand in a tree, one for each range. What the pool has evicted since the
//! last call is forgotten first, so there are at most [`MAX_OWNERS`] entries for each content that the pool holds,
//! and one for whoever lowered it.

mod spans;

use std::collections::{BTreeMap, HashMap};
use std::iter;

use crate::backing::{KeptBlock, KeptHint};
use crate::band::Band;
use crate::error::{InvalidArgument, require};
use crate::hints::{Hints, Owner, Raising};
use crate::id::{BlockId, BlockKey, Epoch, GroupId};
use crate::sequence::{Holding, Sequence};
use crate::store::{BlockStore, HintedChange};
use spans::{Entry, Levels, NEVER, NOBODY, NONE, OwnerSpans, Slab, Spans, Time, millis};

/// Owners that may raise one content. What a further one asks for does not count, from there on.
pub const MAX_OWNERS: usize = 4;

/// Lifetime counts, and what there is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HintStats {
    /// Content that was raised or lowered and is there, as of the table's last call.
    pub hinted: usize,
    /// Blocks that lost their priority to younger ones of the same owner.
    pub demoted: u64,
    /// Blocks whose TTL ended.
    pub expired: u64,
}

/// What retention hints have raised: see the [module](self).
#[derive(Debug)]
pub struct RetentionTable {
    /// Of the pool's blocks, for each owner.
    share: f64,
    epoch: Epoch,
    /// The first entry of each block.
    blocks: Vec<u32>,
    spans: Spans,
    owners: Slab<OwnerSpans>,
    names: HashMap<Owner, u32>,
    /// Spans by the time at which they end, and of those that end at one time by their number here.
    times: BTreeMap<(Time, u64), u32>,
    num_scheduled: u64,
    stats: HintStats,
    /// What the last call raised: its memory is used again.
    raised: Vec<Raise>,
    /// Whether the pool has a backing store, which keeps who asked for what.
    is_kept: bool,
}

/// Ends priorities of an earlier process that nobody asks for any more, given what an owner may raise now: None where
/// hints are not looked at.
pub(crate) fn end_kept(kept: &mut [KeptBlock], most: Option<usize>) {
    if kept.iter().all(|block| block.band == Band::DEFAULT) {
        return;
    }
    let mut raised = HashMap::<Owner, usize>::new();
    let mut hits = HashMap::<BlockKey, usize>::new();
    for at in (0..kept.len()).rev() {
        let band = std::mem::take(&mut kept[at].band);
        let hint = kept[at].hint.take().filter(|hint| hint.left > 0);
        // Of copies the one that was used last hits, and has the priority.
        let hit = *hits.entry(kept[at].key).or_insert(at);
        if let Some(most) = most
            && let Some(hint) = hint
            && kept[hit].hint.is_none()
            && hint.owner.is_none_or(|owner| {
                let count = raised.entry(owner).or_default();
                *count += 1;
                *count <= most
            })
        {
            (kept[hit].band, kept[hit].hint) = (band, Some(hint));
        }
    }
}

/// What a sequence gives back.
struct Released<'a> {
    sequence: &'a Sequence,
    holding: &'a Holding,
    hints: &'a Hints,
    now: Time,
    /// Blocks that an owner may raise.
    most: usize,
}

impl Released<'_> {
    /// The key of a block, and the block; the null block where it needs none.
    #[inline]
    fn block(&self, group: GroupId, index: usize) -> (BlockKey, BlockId) {
        let key = BlockKey::new(self.sequence.hashes()[index], group);
        (key, self.holding.tables[group.index()].blocks[index])
    }
}

/// A block that is to be raised.
#[derive(Debug)]
struct Raise {
    /// The one that hits.
    hit: BlockId,
    /// Which block of the sequence.
    index: u32,
    group: GroupId,
    /// The band that it has.
    band: Band,
}

/// What one call uses. One owner's entries count as used after those of the owner before.
#[derive(Default)]
struct Uses(Vec<OwnerUses>);

struct OwnerUses {
    owner: u32,
    /// Of the last entry: the span that it was in, and a number that stands for what was asked for it.
    from: (u32, usize),
    /// New ones, in no line yet. The last takes entries.
    spans: Vec<u32>,
}

impl RetentionTable {
    /// A table that gives each owner this share of the pool, from 0 to 1.
    pub fn new(share: f64) -> Result<Self, InvalidArgument> {
        require((0.0..=1.0).contains(&share), "retention_budget", || {
            format!("must be from 0 to 1, not {share}")
        })?;
        Ok(Self::empty(share))
    }

    fn empty(share: f64) -> Self {
        Self {
            share,
            epoch: Epoch::default(),
            blocks: Vec::new(),
            spans: Spans::default(),
            owners: Slab::default(),
            names: HashMap::new(),
            times: BTreeMap::new(),
            num_scheduled: 0,
            stats: HintStats::default(),
            raised: Vec::new(),
            is_kept: false,
        }
    }

    /// Takes over what [`end_kept`] has left of an earlier process's hints, once the pool has restored the blocks.
    pub(crate) fn adopt(&mut self, store: &mut impl BlockStore, kept: &[KeptBlock]) {
        self.is_kept = true;
        self.forget_evicted(store);
        self.grow_to(store.num_blocks());
        let now = millis(store.clock().now());
        let mut uses = Uses::default();
        for (index, kept) in kept.iter().enumerate() {
            let Some(KeptHint { owner, ttl, left }) = kept.hint else {
                continue;
            };
            if store.lookup(&kept.key) == Some(kept.block) {
                let owner = owner.map_or(NOBODY, |name| self.owner_of(name));
                let entry = self.entry(kept.block, owner);
                let restore = |levels: &mut Levels| levels.restore(kept.band, ttl, left, now);
                self.note_use(&mut uses, entry, owner, index, restore);
                self.keep_hint(store, kept.block);
            }
        }
        self.link_all(uses);
    }

    /// Lets the backing store keep what the block's band comes from.
    fn keep_hint(&self, store: &mut impl BlockStore, block: BlockId) {
        if !self.is_kept {
            return;
        }
        let levels = self.entries_of(block).filter_map(|entry| {
            let span = self.spans.of(entry);
            let (band, ttl) = span.levels.highest()?;
            Some((band, span.due, ttl, span.owner))
        });
        if let Some((band, due, ttl, owner)) = levels.max_by_key(|&(band, due, ..)| (band, due)) {
            let left = match due {
                NEVER => NEVER,
                _ => due.saturating_sub(millis(store.clock().now())),
            };
            let owner = self.owners[owner].name;
            store.keep_hint(block, band, KeptHint { owner, ttl, left });
        }
    }

    /// Blocks that an owner may raise in a pool of this size.
    pub(crate) fn budget(&self, num_blocks: usize) -> usize {
        (self.share * num_blocks.saturating_sub(1) as f64) as usize
    }

    /// Lifetime counts, and what there is now.
    #[must_use]
    pub fn stats(&self) -> HintStats {
        self.stats
    }

    /// How many entries there are, one for each owner of each content.
    #[must_use]
    pub fn len(&self) -> usize {
        self.spans.entries.len()
    }

    /// How many ranges of blocks the entries are of. For debugging and tests.
    #[must_use]
    pub fn num_ranges(&self) -> usize {
        self.spans.count()
    }

    /// Whether nothing is raised or lowered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets what was asked for content that has left the pool since the last call, be it back or not: it came
    /// back without a band.
    pub fn forget_evicted(&mut self, store: &mut impl BlockStore) {
        if self.epoch != store.epoch() {
            // Content of ended epochs can be hit no more.
            *self = Self {
                epoch: store.epoch(),
                stats: HintStats { hinted: 0, ..self.stats },
                is_kept: self.is_kept,
                ..Self::empty(self.share)
            };
        }
        while let Some(change) = store.take_hinted_change() {
            match change {
                HintedChange::Evicted(block) => self.forget(block),
                HintedChange::Moved { from, to } => self.follow_move(from, to),
            }
        }
    }

    fn forget(&mut self, block: BlockId) {
        while let entry @ 1.. = self.first_of(block) {
            self.remove(entry);
        }
    }

    fn follow_move(&mut self, from: BlockId, to: BlockId) {
        let first = self.first_of(from);
        if first == NONE {
            return;
        }
        self.grow_to(to.index() + 1);
        self.blocks[from.index()] = NONE;
        self.blocks[to.index()] = first;
        let mut entry = first;
        while entry != NONE {
            self.spans.entries[entry].block = to;
            entry = self.spans.entries[entry].next;
        }
    }

    // Use.

    /// Starts the TTLs of what a committed sequence hit again. To be called after the commit.
    pub fn note_hits(&mut self, store: &mut impl BlockStore, sequence: &Sequence) {
        let Some(holding) = &sequence.holding else {
            return;
        };
        self.forget_evicted(store);
        if self.is_empty() {
            return;
        }
        let now = millis(store.clock().now());
        let mut uses = Uses::default();
        for index in (0..holding.num_hits).rev() {
            for table in &holding.tables {
                if index >= table.first {
                    self.refresh(store, table.blocks[index], now, &mut uses);
                }
            }
        }
        self.link_all(uses);
    }

    fn refresh(&mut self, store: &mut impl BlockStore, block: BlockId, now: Time, uses: &mut Uses) {
        let mut next = self.first_of(block);
        while next != NONE {
            let entry = next;
            next = self.spans.entries[entry].next;
            match self.spans.of(entry).owner {
                NOBODY => drop(self.end(store, entry)),
                owner => self.note_use(uses, entry, owner, 0, |levels| levels.refresh(now)),
            }
        }
        self.keep_hint(store, block);
    }

    /// Puts an entry behind what was used before, with other levels: `change` makes them of its own, and the same
    /// of the same levels for the same `reason`.
    #[inline]
    fn note_use(
        &mut self,
        uses: &mut Uses,
        entry: u32,
        owner: u32,
        reason: usize,
        change: impl FnOnce(&mut Levels),
    ) {
        let span = self.spans.entries[entry].span;
        let own = uses.of(owner);
        if own.from != (span, reason) || own.spans.is_empty() {
            own.from = (span, reason);
            let mut levels = self.spans[span].levels;
            change(&mut levels);
            let last = own.spans.last();
            if last.is_none_or(|&last| self.spans[last].levels != levels) {
                own.spans.push(self.spans.add(owner, levels));
            }
        }
        let to = own.spans[own.spans.len() - 1];
        if span != NONE {
            self.pull(entry);
        }
        self.spans.push(to, entry);
    }

    /// Puts the spans that a call has made into their lines.
    fn link_all(&mut self, uses: Uses) {
        for own in uses.0 {
            for span in own.spans {
                let ends = &mut self.owners[own.owner].ends;
                self.spans.link(ends, span, NONE);
                self.schedule(span);
            }
        }
    }

    // Raising and lowering.

    /// Does what a sequence's hints ask for, with what it has published. To be called before its release,
    /// while it holds its blocks.
    pub fn keep(&mut self, store: &mut impl BlockStore, sequence: &Sequence) {
        let (Some(hints), Some(holding)) = (&sequence.hints, &sequence.holding) else {
            return;
        };
        self.forget_evicted(store);
        // What it holds may be of an epoch that has ended.
        if holding.epoch != self.epoch {
            return;
        }
        self.grow_to(store.num_blocks());
        let released = Released {
            sequence,
            holding,
            hints,
            now: millis(store.clock().now()),
            most: self.budget(store.num_blocks()),
        };
        let mut ranges = Raising::of_groups(hints, sequence.config(), holding.num_published);
        let mut raised = std::mem::take(&mut self.raised);
        raised.clear();
        self.find_raised(store, &released, &mut ranges, &mut raised);
        self.lower(store, &released);
        if !raised.is_empty() {
            self.raise(store, &released, &mut ranges, &raised);
        }
        self.raised = raised;
        self.keep_to(store, hints.owner(), released.most);
    }

    /// Lists what the hints raise, first block first: of a group that needs all before a block only as far as that
    /// is raised too.
    fn find_raised(
        &self,
        store: &mut impl BlockStore,
        released: &Released,
        ranges: &mut [Raising],
        raised: &mut Vec<Raise>,
    ) {
        let owner = self.names.get(&released.hints.owner()).copied();
        let groups = &released.sequence.config().groups;
        let mut ended = vec![false; groups.count()];
        let last = ranges.iter().map(Raising::end).max().unwrap_or(0);
        for index in 0..last {
            for (group, spec) in groups.each() {
                let at = group.index();
                if ended[at] || ranges[at].at(index).0.is_empty() {
                    continue;
                }
                if raised.len() == released.most {
                    return;
                }
                let (key, held) = released.block(group, index);
                match store.lookup_held(&key, held) {
                    Some(hit) if self.has_room(hit, owner) => raised.push(Raise {
                        hit,
                        index: index as u32,
                        group,
                        band: store.held_band(hit),
                    }),
                    _ => ended[at] = spec.needs_whole_prefix(),
                }
            }
        }
    }

    #[inline]
    fn has_room(&self, block: BlockId, owner: Option<u32>) -> bool {
        let owners = self.entries_of(block).map(|entry| self.spans.of(entry).owner);
        let others = owners.filter(|&other| other != NOBODY && Some(other) != owner);
        others.count() < MAX_OWNERS
    }

    fn raise(
        &mut self,
        store: &mut impl BlockStore,
        released: &Released,
        ranges: &mut [Raising],
        raised: &[Raise],
    ) {
        let owner = self.owner_of(released.hints.owner());
        let specs = released.sequence.config().groups.specs();
        let mut uses = Uses::default();
        // The entry of the block behind, in each group.
        let mut behind = vec![NONE; specs.len()];
        for raise in raised.iter().rev() {
            let (group, index) = (raise.group, raise.index as usize);
            let (wishes, reason) = ranges[group.index()].at(index);
            let entry = self.entry(raise.hit, owner);
            let child = std::mem::replace(&mut behind[group.index()], entry);
            if child != NONE && specs[group.index()].needs_whole_prefix() {
                self.spans.set_parent(child, entry);
            }
            self.note_use(&mut uses, entry, owner, reason, |levels| {
                wishes.iter().for_each(|&wish| levels.ask(wish, released.now));
            });
            self.keep_hint(store, raise.hit);
            let band = self.band(raise.hit);
            if band != raise.band {
                let (key, held) = released.block(group, index);
                store.set_band(&key, held, band);
            }
        }
        self.link_all(uses);
    }

    /// Lowers what the sequence itself has computed, and nobody asked for.
    fn lower(&mut self, store: &mut impl BlockStore, released: &Released) {
        let Released { sequence, holding, hints, now, .. } = *released;
        let size = sequence.config().block_size;
        let mut uses = Uses::default();
        let mut end = holding.num_published;
        while end > holding.num_hits
            && let Some((first, wish)) = hints.lowering(end - 1, size)
        {
            let first = first.max(holding.num_hits);
            for index in (first..end).rev() {
                for (group, _) in sequence.config().groups.each() {
                    let (key, held) = released.block(group, index);
                    let is_own = !held.is_null() && store.lookup_held(&key, held) == Some(held);
                    if !is_own || self.first_of(held) != NONE {
                        continue;
                    }
                    let entry = self.entry(held, NOBODY);
                    let ask = |levels: &mut Levels| levels.ask(wish, now);
                    self.note_use(&mut uses, entry, NOBODY, first, ask);
                    self.keep_hint(store, held);
                    if store.held_band(held) != wish.band {
                        store.set_band(&key, held, wish.band);
                    }
                }
            }
            end = first;
        }
        self.link_all(uses);
    }

    fn owner_of(&mut self, name: Owner) -> u32 {
        *self.names.entry(name).or_insert_with(|| {
            self.owners.add(OwnerSpans { name: Some(name), ..OwnerSpans::default() })
        })
    }

    /// An owner's entry for a block, which is made, of no span, if there is none.
    #[inline]
    fn entry(&mut self, block: BlockId, owner: u32) -> u32 {
        let found = self.entry_of(block, owner);
        if found != NONE {
            return found;
        }
        let first = self.first_of(block);
        self.stats.hinted += usize::from(first == NONE);
        self.owners[owner].len += 1;
        let entry = self.spans.entries.add(Entry::new(block, first));
        self.blocks[block.index()] = entry;
        entry
    }

    /// An owner's entry for a block, if there is one.
    #[inline]
    fn entry_of(&self, block: BlockId, owner: u32) -> u32 {
        let mut entries = self.entries_of(block);
        entries.find(|&entry| self.spans.of(entry).owner == owner).unwrap_or(NONE)
    }

    /// The entries of a block, one for each owner.
    #[inline]
    fn entries_of(&self, block: BlockId) -> impl Iterator<Item = u32> {
        let mut next = self.first_of(block);
        iter::from_fn(move || {
            let entry = next;
            next = self.spans.entries[entry].next;
            (entry != NONE).then_some(entry)
        })
    }

    #[inline]
    fn first_of(&self, block: BlockId) -> u32 {
        self.blocks.get(block.index()).copied().unwrap_or(NONE)
    }

    /// Makes room for the first `count` blocks, on pages that nobody has touched.
    fn grow_to(&mut self, count: usize) {
        if self.blocks.len() < count {
            let mut grown = vec![NONE; count];
            grown[..self.blocks.len()].copy_from_slice(&self.blocks);
            self.blocks = grown;
        }
    }

    /// The band that the block's content should have: the highest that anybody asks for.
    #[inline]
    fn band(&self, block: BlockId) -> Band {
        let bands = self.entries_of(block).filter_map(|entry| self.spans.of(entry).band);
        bands.max().unwrap_or_default()
    }

    // Ending.

    /// Ends what an owner used longest ago, down to `most`.
    fn keep_to(&mut self, store: &mut impl BlockStore, owner: Owner, most: usize) {
        while let Some(&at) = self.names.get(&owner)
            && self.owners[at].len > most
        {
            let entry = self.spans.first_of(self.owners[at].ends.front);
            self.stats.demoted += u64::from(self.end(store, entry));
        }
    }

    /// Ends what an owner asked for the blocks of these hashes, from the last one back. Returns how many blocks
    /// moved to another band.
    ///
    /// An owner's content is a set of prefixes. Where it asks for more behind one of them, that is worth more than the
    /// block from now on, and content may be evicted out of order.
    pub fn end_of_owner(
        &mut self,
        store: &mut impl BlockStore,
        owner: Owner,
        keys: impl Iterator<Item = BlockKey>,
    ) -> usize {
        self.forget_evicted(store);
        let mut moved = 0;
        for key in keys {
            let Some(&owner) = self.names.get(&owner) else {
                break;
            };
            let block = store.lookup(&key);
            let entry = block.map_or(NONE, |block| self.entry_of(block, owner));
            if entry != NONE {
                if self.spans.has_children(entry) {
                    store.end_order();
                }
                moved += usize::from(self.end(store, entry));
            }
        }
        moved
    }

    /// Gives content whose TTL has ended the band that it has without, of `most` entries at most, those
    /// that ended first. Returns how many blocks moved to another band. To be called now and then, such as
    /// before each step of a scheduler.
    pub fn demote_expired(&mut self, store: &mut impl BlockStore, most: usize) -> usize {
        self.forget_evicted(store);
        let now = millis(store.clock().now());
        let mut moved = 0;
        for _ in 0..most {
            let first = self.times.first_key_value().filter(|((due, _), _)| *due <= now);
            let Some((&(due, _), &span)) = first else {
                break;
            };
            let entry = self.spans.first_of(span);
            moved += usize::from(self.expire(store, entry, due));
        }
        moved
    }

    /// Drops what has ended of an entry by the time `due`; whether its content moved to another band.
    ///
    /// What ended later is dropped in its own turn, even where that is over too: content goes from line to line
    /// in the order in which its levels ended, so that a prompt's last blocks are always before its first ones.
    fn expire(&mut self, store: &mut impl BlockStore, entry: u32, due: Time) -> bool {
        let block = self.spans.entries[entry].block;
        let before = self.band(block);
        let mut levels = self.spans.of(entry).levels;
        levels.drop_ended(due);
        if levels.band().is_some() {
            let to = self.span_before(self.spans.entries[entry].span, levels);
            self.pull(entry);
            self.spans.push(to, entry);
        } else {
            self.remove(entry);
        }
        let moved = self.move_from(store, block, before);
        self.stats.expired += u64::from(moved && self.band(block) == Band::DEFAULT);
        moved
    }

    /// A span with these levels that stands before another in their owner's line, and last of those that end when
    /// it does.
    fn span_before(&mut self, span: u32, levels: Levels) -> u32 {
        let before = self.spans.before(span);
        let due = levels.end();
        let last = self.times.range((due, 0)..=(due, u64::MAX)).next_back();
        let is_last = due == NEVER || last.is_some_and(|(_, &last)| last == before);
        if before != NONE && is_last && self.spans[before].levels == levels {
            return before;
        }
        let owner = self.spans[span].owner;
        let new = self.spans.add(owner, levels);
        let ends = &mut self.owners[owner].ends;
        self.spans.link(ends, new, span);
        self.schedule(new);
        new
    }

    /// Ends an entry; whether its content moved to another band.
    fn end(&mut self, store: &mut impl BlockStore, entry: u32) -> bool {
        let block = self.spans.entries[entry].block;
        let before = self.band(block);
        self.remove(entry);
        self.move_from(store, block, before)
    }

    /// Gives a block's content the band that it should have now, if it is still of the band `before`.
    fn move_from(&self, store: &mut impl BlockStore, block: BlockId, before: Band) -> bool {
        self.keep_hint(store, block);
        let after = self.band(block);
        after != before
            && store.held_band(block) == before
            && store.set_band(&store.key_of(block), BlockId::NULL, after)
    }

    /// Takes an entry out of its span, which ends with its last one.
    #[inline]
    fn pull(&mut self, entry: u32) {
        let span = self.spans.entries[entry].span;
        if self.spans.pull(entry) {
            self.end_span(span);
        }
    }

    #[cold]
    fn end_span(&mut self, span: u32) {
        let owner = self.spans[span].owner;
        let ends = &mut self.owners[owner].ends;
        self.spans.unlink(ends, span);
        self.times.remove(&(self.spans[span].due, self.spans[span].number));
        self.spans.remove(span);
    }

    fn remove(&mut self, entry: u32) {
        let owner = self.spans.of(entry).owner;
        self.pull(entry);
        let Entry { block, next, .. } = self.spans.take(entry);
        let mut before = self.first_of(block);
        if before == entry {
            self.blocks[block.index()] = next;
            self.stats.hinted -= usize::from(next == NONE);
        } else {
            while self.spans.entries[before].next != entry {
                before = self.spans.entries[before].next;
            }
            self.spans.entries[before].next = next;
        }
        self.owners[owner].len -= 1;
        if self.owners[owner].len == 0
            && let Some(name) = self.owners[owner].name
        {
            self.names.remove(&name);
            self.owners.take(owner);
        }
    }

    /// Lets a span end in its time, after those that end then already.
    fn schedule(&mut self, span: u32) {
        let due = self.spans[span].due;
        if due != NEVER {
            self.num_scheduled += 1;
            self.spans.set_number(span, self.num_scheduled);
            self.times.insert((due, self.num_scheduled), span);
        }
    }
}

impl Uses {
    fn of(&mut self, owner: u32) -> &mut OwnerUses {
        let at = self.0.iter().position(|own| own.owner == owner);
        let at = at.unwrap_or_else(|| {
            self.0.push(OwnerUses { owner, from: (NONE, 0), spans: Vec::new() });
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}
