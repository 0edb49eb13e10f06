//! Which turn of its conversation a request is: one more than that of the request whose end it begins with.

use super::{SEVERAL, child_mark, word};
use crate::id::BlockHash;
use crate::sync::{AtomicU64, Ordering::Relaxed};
use crate::zeroed::Zeroed;

/// Ends that are remembered.
const SLOTS: usize = if cfg!(loom) { 2 } else { 1 << 15 };

/// A turn of a conversation, from 1; all from 255 on are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn(u8);

impl Default for Turn {
    fn default() -> Self {
        Self::FIRST
    }
}

impl Turn {
    /// The first turn, and that of a request of no known conversation.
    pub const FIRST: Self = Self(1);

    /// The turn's number.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// The last blocks of earlier requests: a table in which a newer end takes the place of an older one.
pub(super) struct Turns {
    /// `name:24 | turn:8 | child:32`; a turn of 0: none. The child is what followed in the next turn, as for
    /// [`super::ReuseQueue`]'s blocks.
    slots: Zeroed<AtomicU64>,
}

/// One end.
#[derive(Clone, Copy, PartialEq, Eq)]
struct End {
    name: u32,
    turn: Turn,
    child: u32,
}

impl End {
    fn pack(self) -> u64 {
        u64::from(self.name) << 40 | u64::from(self.turn.0) << 32 | u64::from(self.child)
    }

    fn unpack(word: u64) -> Self {
        Self { name: (word >> 40) as u32, turn: Turn((word >> 32) as u8), child: word as u32 }
    }
}

fn name(hash: &BlockHash) -> u32 {
    (word(hash) >> 40) as u32
}

impl Turns {
    pub(super) fn new() -> Option<Self> {
        let slots = Zeroed::new(SLOTS)?;
        Some(Self { slots })
    }

    fn slot(&self, hash: &BlockHash) -> &AtomicU64 {
        &self.slots[word(hash) as usize % SLOTS]
    }

    fn find(&self, hash: &BlockHash) -> Option<End> {
        let end = End::unpack(self.slot(hash).load(Relaxed));
        (end.turn.0 > 0 && end.name == name(hash)).then_some(end)
    }

    /// The turn of a request: the last end on its way counts. One that several requests went on from in
    /// different ways is where conversations begin, such as a short prompt that others begin with.
    pub(super) fn turn_of(&self, hashes: &[BlockHash]) -> Turn {
        let ends = hashes.iter().enumerate().rev();
        let last = ends.filter_map(|(index, hash)| Some((index, self.find(hash)?))).next();
        let Some((index, end)) = last else {
            return Turn::FIRST;
        };
        let Some(next) = hashes.get(index + 1).map(child_mark) else {
            return end.turn.next();
        };
        let child = if end.child == 0 || end.child == next { next } else { SEVERAL };
        self.slot(&hashes[index]).store(End { child, ..end }.pack(), Relaxed);
        if child == SEVERAL { Turn::FIRST } else { end.turn.next() }
    }

    /// A request of this turn has ended after these blocks.
    pub(super) fn ended(&self, hashes: &[BlockHash], turn: Turn) {
        if let Some(hash) = hashes.last()
            && self.find(hash).is_none()
        {
            let end = End { name: name(hash), turn, child: 0 };
            self.slot(hash).store(end.pack(), Relaxed);
        }
    }
}
