//! The time that policy and losses go by.

use std::time::{Duration, Instant};

use crate::sync::{AtomicU64, Ordering};

use Ordering::Relaxed;

/// The system's monotonic clock, until a time is given.
pub(crate) struct Clock {
    start: Instant,
    /// One more than the microseconds that were given last; 0: none were.
    given: AtomicU64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            given: AtomicU64::new(0),
        }
    }

    /// Sets the time, and ends the use of the system's clock.
    pub(crate) fn set(&self, now: Duration) {
        let micros = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        self.given.store(micros.saturating_add(1), Relaxed);
    }

    /// Microseconds since the clock was made, or what was given.
    pub(crate) fn micros(&self) -> u64 {
        match self.given.load(Relaxed) {
            0 => self.start.elapsed().as_micros() as u64,
            given => given - 1,
        }
    }
}
