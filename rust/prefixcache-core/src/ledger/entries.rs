//! What owners asked for, in lines of which an entry leaves any place in constant time.

use crate::band::Band;
use crate::hints::Owner;
use crate::store::BlockKey;

/// No entry.
pub(super) const NONE: u32 = u32::MAX;

/// Milliseconds since the ledger was made.
pub(super) type Time = u64;

/// For ever.
pub(super) const NEVER: Time = Time::MAX;

/// TTLs end at multiples of it, so that many end at one time.
const STEP: Time = 125;

/// How long content is of a band.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Level {
    /// From each use on; 0: the owner did not ask for it. [`NEVER`]: it does not end.
    pub(super) ttl: Time,
    /// When it ends.
    pub(super) end: Time,
}

/// What one owner asked for one content.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: BlockKey,
    /// Who asked; nobody for content that is lowered.
    pub(super) owner: Option<Owner>,
    /// For each band.
    pub(super) levels: [Level; Band::COUNT],
    /// When the highest level ends.
    pub(super) due: Time,
    /// The next owner's entry for the content.
    pub(super) same: u32,
    links: [Link; 2],
}

/// The neighbours in a line.
#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
}

/// The lines that an entry stands in.
#[derive(Clone, Copy, Debug)]
pub(super) enum Line {
    /// Those of its owner, the one used longest ago first.
    Owner,
    /// Those that end at one time.
    Time,
}

/// The ends of a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    front: u32,
    back: u32,
    pub(super) len: usize,
}

impl Default for Ends {
    fn default() -> Self {
        Self {
            front: NONE,
            back: NONE,
            len: 0,
        }
    }
}

impl Ends {
    pub(super) fn front(self) -> Option<u32> {
        (self.front != NONE).then_some(self.front)
    }
}

impl Entry {
    pub(super) fn new(key: BlockKey, owner: Option<Owner>) -> Self {
        Self {
            key,
            owner,
            levels: [Level { ttl: 0, end: 0 }; _],
            due: NEVER,
            same: NONE,
            links: [Link {
                before: NONE,
                after: NONE,
            }; _],
        }
    }

    /// The highest band asked for.
    pub(super) fn band(&self) -> Option<Band> {
        Band::all()
            .rev()
            .find(|band| self.levels[band.index()].ttl > 0)
    }

    /// Asks for a band, for so long from now on, or for longer if that was asked for before.
    pub(super) fn ask(&mut self, band: Band, ttl: Time, now: Time) {
        let level = &mut self.levels[band.index()];
        level.ttl = level.ttl.max(ttl);
        level.end = level.end.max(end_of(ttl, now));
    }

    /// The content is used: all that is asked for begins anew.
    pub(super) fn refresh(&mut self, now: Time) {
        for level in self.levels.iter_mut().filter(|level| level.ttl > 0) {
            level.end = level.end.max(end_of(level.ttl, now));
        }
    }

    /// Drops what has ended.
    pub(super) fn drop_ended(&mut self, now: Time) {
        for level in self.levels.iter_mut().filter(|level| level.end <= now) {
            level.ttl = 0;
        }
    }

    /// When the highest level ends.
    pub(super) fn end(&self) -> Time {
        self.band()
            .map_or(NEVER, |band| self.levels[band.index()].end)
    }
}

fn end_of(ttl: Time, now: Time) -> Time {
    let end = now.saturating_add(ttl);
    end.checked_next_multiple_of(STEP).unwrap_or(NEVER)
}

/// The entries by their numbers, which are given out again.
#[derive(Debug, Default)]
pub(super) struct Entries {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

impl Entries {
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn add(&mut self, entry: Entry) -> u32 {
        if let Some(at) = self.free.pop() {
            self.entries[at as usize] = entry;
            return at;
        }
        self.entries.push(entry);
        self.entries.len() as u32 - 1
    }

    pub(super) fn free(&mut self, at: u32) {
        self.free.push(at);
    }

    pub(super) fn get(&self, at: u32) -> &Entry {
        &self.entries[at as usize]
    }

    pub(super) fn get_mut(&mut self, at: u32) -> &mut Entry {
        &mut self.entries[at as usize]
    }

    /// The entries of a content, from its first on.
    pub(super) fn of_content(&self, first: Option<u32>) -> impl Iterator<Item = u32> {
        std::iter::successors(first, |&at| self.next_of_content(at))
    }

    /// The entry of the same content after this one.
    pub(super) fn next_of_content(&self, at: u32) -> Option<u32> {
        let next = self.get(at).same;
        (next != NONE).then_some(next)
    }

    pub(super) fn push_back(&mut self, line: Line, ends: &mut Ends, at: u32) {
        let before = std::mem::replace(&mut ends.back, at);
        *self.link(line, at) = Link {
            before,
            after: NONE,
        };
        if before == NONE {
            ends.front = at;
        } else {
            self.link(line, before).after = at;
        }
        ends.len += 1;
    }

    pub(super) fn unlink(&mut self, line: Line, ends: &mut Ends, at: u32) {
        let Link { before, after } = *self.link(line, at);
        if before == NONE {
            ends.front = after;
        } else {
            self.link(line, before).after = after;
        }
        if after == NONE {
            ends.back = before;
        } else {
            self.link(line, after).before = before;
        }
        ends.len -= 1;
    }

    fn link(&mut self, line: Line, at: u32) -> &mut Link {
        &mut self.get_mut(at).links[line as usize]
    }
}
