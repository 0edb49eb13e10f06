//! How many free blocks are not spoken for, and whether threads are taking or giving back blocks.
//!
//! A thread takes a credit before it looks for a free block, and gives one back only after a block is
//! reachable again, so whoever has a credit finds a block: another thread can take the one it looks
//! at, but not the last one. That makes an allocation of n blocks all or nothing, without a way back.
//!
//! A resize needs the free blocks to itself. So the same word counts the calls that are taking or
//! giving back blocks, where they change it in any case, and says whether a resize keeps them out.

use super::words::{add, exchange};
use crate::error::Exhausted;
use crate::sync::{AtomicU64, Fault, Ordering, OwnLine, planted, yield_now};

use Ordering::{Acquire, Relaxed};

/// `resizing:1 | calls inside:31 | free blocks that nobody has taken a credit for:32`.
#[derive(Debug, Default)]
pub(super) struct Credits {
    word: OwnLine<AtomicU64>,
}

const AVAILABLE: u64 = (1 << 32) - 1;
const ONE_INSIDE: u64 = 1 << 32;
const RESIZING: u64 = 1 << 63;

/// Until it is dropped, the free blocks change and no resize begins.
pub(super) struct Inside<'a> {
    credits: &'a Credits,
    /// Credits to give back at the end.
    returned: usize,
}

impl Inside<'_> {
    /// Gives `count` credits back when this is dropped. Their blocks are reachable by then.
    #[inline]
    pub(super) fn give_at_end(&mut self, count: usize) {
        self.returned += count;
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        add(&self.credits.word.0, (self.returned as u64).wrapping_sub(ONE_INSIDE));
    }
}

/// Until it is dropped, no call takes or gives back blocks.
pub(super) struct Resizing<'a>(&'a Credits);

impl Drop for Resizing<'_> {
    fn drop(&mut self) {
        // A subtraction, as the calls that wait are counted now and then.
        add(&self.0.word.0, RESIZING.wrapping_neg());
    }
}

impl Credits {
    /// Begins a call that gives back blocks, or moves them. Waits for the end of a resize.
    #[inline]
    pub(super) fn enter(&self) -> Inside<'_> {
        while add(&self.word.0, ONE_INSIDE) & RESIZING != 0 && !planted(Fault::EnterResize) {
            add(&self.word.0, ONE_INSIDE.wrapping_neg());
            self.wait();
        }
        Inside { credits: self, returned: 0 }
    }

    /// Begins a call that takes `count` blocks, with credits for them or not at all. Waits for the end
    /// of a resize.
    #[inline]
    pub(super) fn enter_taking(&self, count: usize) -> Result<Inside<'_>, Exhausted> {
        self.change(count, ONE_INSIDE)?;
        Ok(Inside { credits: self, returned: 0 })
    }

    /// Keeps all calls out that take or give back blocks, unless one is inside.
    pub(super) fn begin_resize(&self) -> Option<Resizing<'_>> {
        loop {
            let word = self.word.0.load(Acquire);
            if word & !AVAILABLE != 0 {
                return None;
            }
            if exchange(&self.word.0, word, word | RESIZING).is_ok() {
                return Some(Resizing(self));
            }
        }
    }

    #[cold]
    fn wait(&self) {
        // Acquire: what the resize did is seen after it.
        while self.word.0.load(Acquire) & RESIZING != 0 {
            yield_now();
        }
    }

    /// Takes `count` credits, or none, inside a call.
    #[inline]
    pub(super) fn take(&self, count: usize) -> Result<(), Exhausted> {
        self.change(count, 0)
    }

    /// Takes `count` credits and counts `entering` calls as inside, or does nothing.
    #[inline]
    fn change(&self, count: usize, entering: u64) -> Result<(), Exhausted> {
        // Relaxed: the exchange acquires, and with it the places of the blocks that were given back.
        let mut word = self.word.0.load(Relaxed);
        loop {
            if entering != 0 && word & RESIZING != 0 && !planted(Fault::EnterResize) {
                self.wait();
                word = self.word.0.load(Relaxed);
                continue;
            }
            let free = word & AVAILABLE;
            if free < count as u64 {
                return Err(Exhausted { needed: count, free: free as usize });
            }
            match exchange(&self.word.0, word, word - count as u64 + entering) {
                Ok(()) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// Takes up to `most` credits; how many.
    pub(super) fn take_some(&self, most: usize) -> usize {
        loop {
            let count = most.min(self.available());
            if self.take(count).is_ok() {
                return count;
            }
        }
    }

    /// Gives `count` credits back. Their blocks are reachable by now.
    #[inline]
    pub(super) fn give(&self, count: usize) {
        if count > 0 {
            add(&self.word.0, count as u64);
        }
    }

    /// The credits that are left.
    #[inline]
    pub(super) fn available(&self) -> usize {
        (self.word.0.load(Acquire) & AVAILABLE) as usize
    }
}
