//! The one clock of a pool, its eviction policy and the hints that act on it.

use std::time::{Duration, Instant};

use crate::sync::{Arc, AtomicU64, Ordering::Relaxed};

/// The system's monotonic clock, until a time is given. All clones show the same time.
#[derive(Clone, Debug)]
pub struct Clock(Arc<Times>);

#[derive(Debug)]
struct Times {
    start: Instant,
    /// One more than the microseconds that were given last; 0: none were.
    given: AtomicU64,
}

impl Default for Clock {
    fn default() -> Self {
        Self(Arc::new(Times { start: Instant::now(), given: AtomicU64::new(0) }))
    }
}

impl Clock {
    /// Sets the time, and ends the use of the system's clock: with times that are given, the same calls have
    /// the same outcome.
    pub fn set(&self, now: Duration) {
        let micros = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        // Relaxed: the time orders nothing.
        self.0.given.store(micros.saturating_add(1), Relaxed);
    }

    /// The time since the clock was made, or what was given.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_micros(self.micros())
    }

    pub(crate) fn micros(&self) -> u64 {
        match self.0.given.load(Relaxed) {
            0 => self.0.start.elapsed().as_micros() as u64,
            given => given - 1,
        }
    }
}
