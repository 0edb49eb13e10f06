//! A block as its one writer knows it.

use std::ops::Deref;

use crate::class::{Class, Standing};
use crate::id::BlockId;
use crate::records::Record;
use crate::store::Marks;
use crate::sync::{AtomicU32, Ordering::Relaxed};
use crate::zeroed::Zeroable;

/// A word that the writer alone changes. It stands next to what readers load, on the same cache line, so it is an
/// atomic; all accesses are relaxed, plain moves, as it orders nothing.
#[derive(Debug, Default)]
pub(super) struct Word(AtomicU32);

impl Word {
    #[inline]
    pub(super) fn get(&self) -> u32 {
        self.0.load(Relaxed)
    }

    #[inline]
    pub(super) fn set(&self, value: u32) {
        self.0.store(value, Relaxed);
    }
}

/// One block: a cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Block {
    record: Record,
    state: Word,
    /// The neighbours in the block's LRU list; `next` also of the block below on the stack of free ones.
    pub(super) prev: Word,
    pub(super) next: Word,
    /// A block some places behind in the list, or one that stood there: an eviction fetches its record.
    pub(super) ahead: Word,
}

#[cfg(not(any(loom, shuttle)))]
const _: () = assert!(size_of::<Block>() == 64);

// SAFETY: every field is an atomic integer or an array of them: zero is valid, is their default, and none needs to
// be dropped.
unsafe impl Zeroable for Block {}

impl Deref for Block {
    type Target = Record;

    #[inline]
    fn deref(&self) -> &Record {
        &self.record
    }
}

impl Block {
    #[inline]
    pub(super) fn state(&self) -> State {
        State(self.state.get())
    }

    #[inline]
    pub(super) fn set_state(&self, state: State) {
        self.state.set(state.0);
    }

    #[inline]
    pub(super) fn update(&self, change: impl FnOnce(State) -> State) {
        self.set_state(change(self.state()));
    }

    /// Whether the block has content, of this epoch or not.
    #[inline]
    pub(super) fn has_content(&self) -> bool {
        self.seq() != 0
    }
}

/// Who has the block and what is noted of its content: `marks:3 | copied:1 | listed:1 | standing:5 | references:17`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State(u32);

const REFERENCES: u32 = (1 << 17) - 1;
const STANDING_SHIFT: u32 = 17;
const STANDING: u32 = ((1 << Standing::BITS) - 1) << STANDING_SHIFT;
const LISTED: u32 = 1 << 22;
const COPIED: u32 = 1 << 23;
const MARKS_SHIFT: u32 = 24;
const MARKS: u32 = 7 << MARKS_SHIFT;

impl State {
    /// Of a block that nobody has a reference to, in no LRU list and without content.
    pub(super) const BLANK: Self = Self(0);
    /// The same with one reference.
    pub(super) const ALLOCATED: Self = Self(1);
    /// The most references that hits may bring a block to, as in the pool with many writers.
    pub(super) const MOST_REFERENCES: u32 = REFERENCES - 1;

    #[inline]
    pub(super) fn references(self) -> u32 {
        self.0 & REFERENCES
    }

    #[inline]
    pub(super) fn is_in_use(self) -> bool {
        self.references() > 0
    }

    #[inline]
    pub(super) fn with_one_more(self) -> Self {
        Self(self.0 + 1)
    }

    #[inline]
    pub(super) fn with_one_less(self) -> Self {
        Self(self.0 - 1)
    }

    #[inline]
    pub(super) fn standing(self) -> Standing {
        Standing::from_bits((self.0 >> STANDING_SHIFT) as u8)
    }

    #[inline]
    pub(super) fn with_standing(self, standing: Standing) -> Self {
        Self(self.0 & !STANDING | u32::from(standing.bits()) << STANDING_SHIFT)
    }

    #[inline]
    pub(super) fn is_pinned(self) -> bool {
        self.standing().is_pinned()
    }

    /// The class of the list that the block stands in, if it stands in one.
    #[inline]
    pub(super) fn list(self) -> Option<Class> {
        self.is_listed().then(|| self.standing().class())
    }

    #[inline]
    pub(super) fn is_listed(self) -> bool {
        self.0 & LISTED != 0
    }

    #[inline]
    pub(super) fn listed(self, listed: bool) -> Self {
        Self(if listed { self.0 | LISTED } else { self.0 & !LISTED })
    }

    /// Whether another block with the content was ever registered.
    #[inline]
    pub(super) fn is_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    pub(super) fn copied(self) -> Self {
        Self(self.0 | COPIED)
    }

    pub(super) fn marks(self) -> Marks {
        Marks((self.0 >> MARKS_SHIFT) as u16)
    }

    pub(super) fn marked(self, marks: Marks) -> Self {
        Self(self.0 | u32::from(marks.0) << MARKS_SHIFT & MARKS)
    }

    /// What stays when the block loses its content.
    #[inline]
    pub(super) fn without_content(self) -> Self {
        Self(self.0 & (REFERENCES | LISTED))
    }

    /// What moves along with content to a block that one caller has: all but the references.
    pub(super) fn of_content(self) -> Self {
        Self(self.0 & !REFERENCES)
    }
}

/// The block that a word names.
#[inline]
pub(super) fn id(word: &Word) -> BlockId {
    BlockId::new(word.get())
}
