//! How many free blocks are not spoken for, and whether threads are taking or giving back blocks.
//!
//! A thread takes a credit before it looks for a free block, and gives one back only after a block is
//! reachable again, so whoever has a credit finds a block: another thread can take the one it looks
//! at, but not the last one. That makes an allocation of n blocks all or nothing, without a way back.
//!
//! A resize needs the free blocks to itself. So the same word counts the calls that are taking or
//! giving back blocks, where they change it in any case, and says whether a resize keeps them out.

use std::marker::PhantomData;

use crate::error::Exhausted;
use crate::sync::{AtomicU64, Fault, Mode, Ordering, OwnLine, planted, yield_now};

use Ordering::{Acquire, Relaxed};

/// `resizing:1 | calls inside:31 | free blocks that nobody has taken a credit for:32`.
#[derive(Debug, Default)]
pub(crate) struct Credits {
    word: OwnLine<AtomicU64>,
}

const AVAILABLE: u64 = (1 << 32) - 1;
const ONE_INSIDE: u64 = 1 << 32;
const RESIZING: u64 = 1 << 63;

/// Until it is dropped, the free blocks change and no resize begins.
///
/// In [`SingleWriter`](crate::pool::SingleWriter) mode nothing is counted: whoever resizes is the one
/// thread that makes the calls.
pub(crate) struct Inside<'a, M: Mode> {
    credits: &'a Credits,
    /// Credits to give back at the end.
    returned: usize,
    mode: PhantomData<M>,
}

impl<M: Mode> Inside<'_, M> {
    /// Gives `count` credits back when this is dropped. Their blocks are reachable by then.
    #[inline]
    pub(crate) fn give_at_end(&mut self, count: usize) {
        self.returned += count;
    }
}

impl<M: Mode> Drop for Inside<'_, M> {
    #[inline]
    fn drop(&mut self) {
        let one = if M::SHARED { ONE_INSIDE } else { 0 };
        let change = (self.returned as u64).wrapping_sub(one);
        if change != 0 {
            M::add(&self.credits.word.0, change);
        }
    }
}

/// Until it is dropped, no call takes or gives back blocks.
pub(crate) struct Resizing<'a, M: Mode> {
    credits: &'a Credits,
    mode: PhantomData<M>,
}

impl<M: Mode> Drop for Resizing<'_, M> {
    fn drop(&mut self) {
        // A subtraction, as the calls that wait are counted now and then.
        M::add(&self.credits.word.0, RESIZING.wrapping_neg());
    }
}

impl Credits {
    fn inside<M: Mode>(&self) -> Inside<'_, M> {
        Inside { credits: self, returned: 0, mode: PhantomData }
    }

    /// Begins a call that gives back blocks, or moves them. Waits for the end of a resize.
    #[inline]
    pub(crate) fn enter<M: Mode>(&self) -> Inside<'_, M> {
        while M::SHARED && M::fetch_add(&self.word.0, ONE_INSIDE) & RESIZING != 0 {
            if planted(Fault::EnterResize) {
                break;
            }
            M::add(&self.word.0, ONE_INSIDE.wrapping_neg());
            self.wait();
        }
        self.inside()
    }

    /// Begins a call that takes `count` blocks, with credits for them or not at all. Waits for the end
    /// of a resize.
    #[inline]
    pub(crate) fn enter_taking<M: Mode>(&self, count: usize) -> Result<Inside<'_, M>, Exhausted> {
        let one = if M::SHARED { ONE_INSIDE } else { 0 };
        self.change::<M>(count, one)?;
        Ok(self.inside())
    }

    /// Keeps all calls out that take or give back blocks, unless one is inside.
    pub(crate) fn begin_resize<M: Mode>(&self) -> Option<Resizing<'_, M>> {
        loop {
            let word = self.word.0.load(Acquire);
            if word & !AVAILABLE != 0 {
                return None;
            }
            if M::exchange(&self.word.0, word, word | RESIZING).is_ok() {
                let mode = PhantomData;
                return Some(Resizing { credits: self, mode });
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
    pub(crate) fn take<M: Mode>(&self, count: usize) -> Result<(), Exhausted> {
        self.change::<M>(count, 0)
    }

    /// Takes `count` credits and counts `entering` calls as inside, or does nothing.
    #[inline]
    fn change<M: Mode>(&self, count: usize, entering: u64) -> Result<(), Exhausted> {
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
            match M::exchange(&self.word.0, word, word - count as u64 + entering) {
                Ok(()) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// Takes up to `most` credits; how many.
    pub(crate) fn take_some<M: Mode>(&self, most: usize) -> usize {
        loop {
            let count = most.min(self.available());
            if self.take::<M>(count).is_ok() {
                return count;
            }
        }
    }

    /// Gives `count` credits back. Their blocks are reachable by now.
    #[inline]
    pub(crate) fn give<M: Mode>(&self, count: usize) {
        if count > 0 {
            M::add(&self.word.0, count as u64);
        }
    }

    /// The credits that are left.
    #[inline]
    pub(crate) fn available(&self) -> usize {
        (self.word.0.load(Acquire) & AVAILABLE) as usize
    }
}
