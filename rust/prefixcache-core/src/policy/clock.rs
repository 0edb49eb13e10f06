//! The policy's time.

use std::time::{Duration, Instant};

use crate::sync::{AtomicU64, Ordering};

use Ordering::Relaxed;

/// Ticks in a second.
const PER_SECOND: u128 = 8;

/// A time, in eighths of a second since the clock was made; it wraps around after 17 years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tick(u32);

impl Tick {
    #[inline]
    pub(crate) const fn new(number: u32) -> Self {
        Self(number)
    }

    #[inline]
    pub(crate) const fn get(self) -> u32 {
        self.0
    }

    /// How many ticks have passed since `earlier`; 0 if another thread read the later time first.
    #[inline]
    pub(crate) const fn since(self, earlier: Self) -> u32 {
        let passed = self.0.wrapping_sub(earlier.0);
        if passed < 1 << 31 { passed } else { 0 }
    }
}

/// The system's monotonic clock, until a time is given.
pub(super) struct Clock {
    start: Instant,
    /// One more than the tick that was given last; 0: none was.
    given: AtomicU64,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self {
            start: Instant::now(),
            given: AtomicU64::new(0),
        }
    }

    pub(super) fn set(&self, now: Duration) {
        self.given.store(u64::from(ticks(now)) + 1, Relaxed);
    }

    pub(super) fn now(&self) -> Tick {
        match self.given.load(Relaxed) {
            0 => Tick(ticks(self.start.elapsed())),
            given => Tick((given - 1) as u32),
        }
    }
}

fn ticks(time: Duration) -> u32 {
    (time.as_millis() * PER_SECOND / 1000) as u32
}
