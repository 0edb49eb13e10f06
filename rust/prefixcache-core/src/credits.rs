//! How many free blocks are not spoken for.
//!
//! A thread takes a credit before it looks for a free block, and gives one back only after a block is
//! reachable again, so whoever has a credit finds a block: another thread can take the one it looks
//! at, but not the last one. That makes an allocation of n blocks all or nothing, without a way back.

use crate::error::Exhausted;
use crate::sync::{AtomicU64, Mode, Ordering, OwnLine};

use Ordering::{Acquire, Relaxed};

/// The free blocks that nobody has taken a credit for.
#[derive(Debug, Default)]
pub(crate) struct Credits {
    available: OwnLine<AtomicU64>,
}

impl Credits {
    /// Takes `count` credits, or none.
    #[inline]
    pub(crate) fn take<M: Mode>(&self, count: usize) -> Result<(), Exhausted> {
        // Relaxed: the exchange acquires, and with it the places of the blocks that were given back.
        let mut available = self.available.0.load(Relaxed);
        while available >= count as u64 {
            match M::exchange(&self.available.0, available, available - count as u64) {
                Ok(()) => return Ok(()),
                Err(now) => available = now,
            }
        }
        Err(Exhausted {
            needed: count,
            free: available as usize,
        })
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
            M::add(&self.available.0, count as u64);
        }
    }

    /// The credits that are left.
    #[inline]
    pub(crate) fn available(&self) -> usize {
        self.available.0.load(Acquire) as usize
    }
}
