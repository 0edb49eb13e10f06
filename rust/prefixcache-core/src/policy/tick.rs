//! The policy's unit of time.

use crate::clock::Clock;

/// Microseconds in a tick.
const LENGTH: u64 = 125_000;

/// A time, in eighths of a second since the clock was made; it wraps around after 17 years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tick(u32);

impl Tick {
    pub(super) fn of(clock: &Clock) -> Self {
        Self((clock.micros() / LENGTH) as u32)
    }

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
