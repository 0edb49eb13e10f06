//! Who is changing the pool: any number of writers, or one thread that resizes it.

use std::marker::PhantomData;

use crate::sync::{AtomicU64, Fault, Mode, Ordering, OwnLine, pause, planted};

use Ordering::Acquire;

const RESIZING: u64 = 1 << 63;

/// The number of writers inside a call, and whether a resize keeps others out.
///
/// Of a [`SingleWriter`](crate::pool::SingleWriter) nothing is counted: whoever resizes is the writer.
#[derive(Debug, Default)]
pub(super) struct Writers {
    word: OwnLine<AtomicU64>,
}

/// The right to change the pool until it is dropped.
pub(super) struct Inside<'a, M: Mode> {
    writers: &'a Writers,
    mode: PhantomData<M>,
}

/// The right to resize the pool, which keeps all writers out until it is dropped.
pub(super) struct Alone<'a, M: Mode> {
    writers: &'a Writers,
    mode: PhantomData<M>,
}

impl Writers {
    /// Begins a call that changes the pool. Waits for the end of a resize.
    #[inline]
    pub(super) fn enter<M: Mode>(&self) -> Inside<'_, M> {
        if M::SHARED {
            while M::count_up(&self.word.0) & RESIZING != 0 && !planted(Fault::EnterResize) {
                self.leave::<M>();
                self.wait();
            }
        }
        Inside {
            writers: self,
            mode: PhantomData,
        }
    }

    #[inline]
    fn leave<M: Mode>(&self) {
        M::add(&self.word.0, 1_u64.wrapping_neg());
    }

    #[cold]
    fn wait(&self) {
        // Acquire: what the resize did is seen after it.
        while self.word.0.load(Acquire) & RESIZING != 0 {
            pause();
        }
    }

    /// Keeps all writers out, unless one is inside or another thread resizes.
    pub(super) fn exclude<M: Mode>(&self) -> Option<Alone<'_, M>> {
        M::exchange(&self.word.0, 0, RESIZING).ok()?;
        Some(Alone {
            writers: self,
            mode: PhantomData,
        })
    }
}

impl<M: Mode> Drop for Inside<'_, M> {
    #[inline]
    fn drop(&mut self) {
        if M::SHARED {
            self.writers.leave::<M>();
        }
    }
}

impl<M: Mode> Drop for Alone<'_, M> {
    fn drop(&mut self) {
        // A sum, as writers who wait may be counted for a moment.
        M::add(&self.writers.word.0, RESIZING.wrapping_neg());
    }
}
