//! What owners asked for, kept by ranges of blocks.
//!
//! An [`Entry`] is what one owner asked for one block, 24 bytes of it. What it asked for stands in a [`Span`], which
//! all entries share that have the same levels and were used one after the other: the blocks of a prompt mostly.
//! An entry leaves any place of a span in amortised constant time.

use std::ops::{Index, IndexMut};

use crate::band::Band;
use crate::hints::{Owner, Wish};
use crate::id::BlockId;

/// No entry, no span.
pub(super) const NONE: u32 = 0;

/// The owner of content that is lowered.
pub(super) const NOBODY: u32 = 0;

/// Milliseconds of the pool's clock.
pub(super) type Time = u64;

/// For ever.
pub(super) const NEVER: Time = Time::MAX;

/// TTLs end at multiples of it, so that many end at one time.
const STEP: Time = 125;

/// Things by their numbers, which are given out again. Number 0 is a default that stands for nothing.
#[derive(Debug)]
pub(super) struct Slab<T> {
    items: Vec<T>,
    free: Vec<u32>,
}

impl<T: Default> Default for Slab<T> {
    fn default() -> Self {
        Self { items: vec![T::default()], free: Vec::new() }
    }
}

impl<T: Default> Slab<T> {
    pub(super) fn len(&self) -> usize {
        self.items.len() - 1 - self.free.len()
    }

    pub(super) fn add(&mut self, item: T) -> u32 {
        if let Some(at) = self.free.pop() {
            self[at] = item;
            return at;
        }
        self.items.push(item);
        self.items.len() as u32 - 1
    }

    pub(super) fn take(&mut self, at: u32) -> T {
        self.free.push(at);
        std::mem::take(&mut self[at])
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    #[inline]
    fn index(&self, at: u32) -> &T {
        &self.items[at as usize]
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    #[inline]
    fn index_mut(&mut self, at: u32) -> &mut T {
        &mut self.items[at as usize]
    }
}

/// How long content is of a band.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Level {
    /// From each use on; 0: the owner did not ask for it. [`NEVER`]: it does not end.
    ttl: Time,
    /// When it ends.
    end: Time,
}

/// What an owner asked for, for each band.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Levels([Level; Band::COUNT]);

impl Levels {
    /// The highest band asked for.
    pub(super) fn band(&self) -> Option<Band> {
        Band::all().rev().find(|band| self.0[band.index()].ttl > 0)
    }

    /// When the highest level ends.
    pub(super) fn end(&self) -> Time {
        self.band().map_or(NEVER, |band| self.0[band.index()].end)
    }

    /// The highest band asked for, and its TTL.
    pub(super) fn highest(&self) -> Option<(Band, Time)> {
        self.band().map(|band| (band, self.0[band.index()].ttl))
    }

    /// What was asked for in an earlier process, of which `left` is still to come.
    pub(super) fn restore(&mut self, band: Band, ttl: Time, left: Time, now: Time) {
        self.0[band.index()] = Level { ttl, end: end_of(left, now) };
    }

    /// Asks for a band, for this long from `now` on, or for longer if that was asked for before.
    pub(super) fn ask(&mut self, wish: Wish, now: Time) {
        let ttl = wish.ttl.map_or(NEVER, |ttl| millis(ttl).max(1));
        let level = &mut self.0[wish.band.index()];
        level.ttl = level.ttl.max(ttl);
        level.end = level.end.max(end_of(ttl, now));
    }

    /// The content is used: every TTL starts again.
    pub(super) fn refresh(&mut self, now: Time) {
        for level in self.0.iter_mut().filter(|level| level.ttl > 0) {
            level.end = level.end.max(end_of(level.ttl, now));
        }
    }

    /// Drops what has ended.
    pub(super) fn drop_ended(&mut self, now: Time) {
        for level in self.0.iter_mut().filter(|level| level.end <= now) {
            level.ttl = 0;
        }
    }
}

fn end_of(ttl: Time, now: Time) -> Time {
    let end = now.saturating_add(ttl);
    end.checked_next_multiple_of(STEP).unwrap_or(NEVER)
}

/// Of a time that is not for ever.
pub(super) fn millis(time: std::time::Duration) -> Time {
    time.as_millis().min(u128::from(NEVER - 1)) as Time
}

/// What one owner asked for one block's content.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) block: BlockId,
    pub(super) span: u32,
    /// Which of the span's entries it is.
    place: u32,
    /// The next owner's entry for the block.
    pub(super) next: u32,
    /// The same owner's entry for the block before, and how many entries have this one there: of groups that need the
    /// whole prefix, and right as long as content is evicted in order.
    parent: u32,
    num_children: u32,
}

impl Default for Entry {
    fn default() -> Self {
        Self::new(BlockId::NULL, NONE)
    }
}

impl Entry {
    pub(super) fn new(block: BlockId, next: u32) -> Self {
        Self { block, next, span: NONE, place: 0, parent: NONE, num_children: 0 }
    }
}

/// Entries of one owner with the same levels, the one used longest ago first.
#[derive(Debug, Default)]
pub(super) struct Span {
    pub(super) owner: u32,
    pub(super) levels: Levels,
    /// Of the levels.
    pub(super) band: Option<Band>,
    pub(super) due: Time,
    /// [`NONE`] where one has left.
    entries: Vec<u32>,
    /// None stands before this place.
    first: usize,
    live: usize,
    /// Among those that end at one time.
    pub(super) number: u64,
    link: Link,
}

/// The neighbours in the line of an owner's spans, the one used longest ago first.
#[derive(Clone, Copy, Debug, Default)]
struct Link {
    before: u32,
    after: u32,
}

/// The ends of a line.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ends {
    pub(super) front: u32,
    pub(super) back: u32,
}

/// An owner, and its spans.
#[derive(Debug, Default)]
pub(super) struct OwnerSpans {
    pub(super) name: Option<Owner>,
    pub(super) ends: Ends,
    /// Entries in all spans.
    pub(super) len: usize,
}

/// The entries and the spans that they are of.
#[derive(Debug, Default)]
pub(super) struct Spans {
    pub(super) entries: Slab<Entry>,
    spans: Slab<Span>,
    /// Memory of a span that has ended.
    spare: Vec<u32>,
}

impl Index<u32> for Spans {
    type Output = Span;

    #[inline]
    fn index(&self, at: u32) -> &Span {
        &self.spans[at]
    }
}

impl Spans {
    #[inline]
    pub(super) fn of(&self, entry: u32) -> &Span {
        &self.spans[self.entries[entry].span]
    }

    /// Notes that the block of one entry follows that of another.
    #[inline]
    pub(super) fn set_parent(&mut self, entry: u32, parent: u32) {
        if self.entries[entry].parent != parent {
            self.entries[entry].parent = parent;
            self.entries[parent].num_children += 1;
        }
    }

    /// Whether the owner asks for a block that follows that of the entry.
    pub(super) fn has_children(&self, entry: u32) -> bool {
        self.entries[entry].num_children > 0
    }

    /// Takes an entry of no span away.
    pub(super) fn take(&mut self, entry: u32) -> Entry {
        let taken = self.entries.take(entry);
        if taken.parent != NONE {
            let count = &mut self.entries[taken.parent].num_children;
            *count = count.saturating_sub(1);
        }
        taken
    }

    /// A span without entries, in no line.
    pub(super) fn add(&mut self, owner: u32, levels: Levels) -> u32 {
        self.spans.add(Span {
            owner,
            levels,
            band: levels.band(),
            due: levels.end(),
            entries: std::mem::take(&mut self.spare),
            ..Span::default()
        })
    }

    pub(super) fn count(&self) -> usize {
        self.spans.len()
    }

    /// Ends a span without entries, which is in no line.
    pub(super) fn remove(&mut self, span: u32) {
        let mut ended = self.spans.take(span).entries;
        if ended.capacity() > self.spare.capacity() {
            ended.clear();
            self.spare = ended;
        }
    }

    /// The entry used longest ago.
    pub(super) fn first_of(&mut self, span: u32) -> u32 {
        let span = &mut self.spans[span];
        while span.entries[span.first] == NONE {
            span.first += 1;
        }
        span.entries[span.first]
    }

    /// Adds an entry that is of no span.
    #[inline]
    pub(super) fn push(&mut self, span: u32, entry: u32) {
        let to = &mut self.spans[span];
        let entry_ref = &mut self.entries[entry];
        (entry_ref.span, entry_ref.place) = (span, to.entries.len() as u32);
        to.entries.push(entry);
        to.live += 1;
    }

    /// Takes an entry out of its span; whether that has none left.
    #[inline]
    pub(super) fn pull(&mut self, entry: u32) -> bool {
        let Entry { span, place, .. } = self.entries[entry];
        let from = &mut self.spans[span];
        from.entries[place as usize] = NONE;
        from.first += usize::from(from.first == place as usize);
        from.live -= 1;
        let live = from.live;
        if live > 0 && live * 4 + 64 < from.entries.len() - from.first {
            self.compact(span);
        }
        live == 0
    }

    #[cold]
    fn compact(&mut self, span: u32) {
        let span = &mut self.spans[span];
        span.entries.retain(|&entry| entry != NONE);
        span.entries.shrink_to_fit();
        span.first = 0;
        for (place, &entry) in (0..).zip(&span.entries) {
            self.entries[entry].place = place;
        }
    }

    /// The span before this one in its owner's line.
    pub(super) fn before(&self, span: u32) -> u32 {
        self.spans[span].link.before
    }

    pub(super) fn set_number(&mut self, span: u32, number: u64) {
        self.spans[span].number = number;
    }

    /// Puts a span into a line, before another or at the end.
    pub(super) fn link(&mut self, ends: &mut Ends, span: u32, after: u32) {
        let before = if after == NONE { ends.back } else { self.before(after) };
        self.spans[span].link = Link { before, after };
        self.set_neighbours(ends, before, span, span, after);
    }

    pub(super) fn unlink(&mut self, ends: &mut Ends, span: u32) {
        let Link { before, after } = self.spans[span].link;
        self.set_neighbours(ends, before, after, before, after);
    }

    /// Puts `next` behind `before`, and `last` before `after`; no span stands for the end of the line.
    fn set_neighbours(&mut self, ends: &mut Ends, before: u32, next: u32, last: u32, after: u32) {
        match before {
            NONE => ends.front = next,
            _ => self.spans[before].link.after = next,
        }
        match after {
            NONE => ends.back = last,
            _ => self.spans[after].link.before = last,
        }
    }
}
