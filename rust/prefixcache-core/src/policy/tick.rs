//! The policy's unit of time.

use crate::clock::Clock;

/// Ticks in a second.
const PER_SECOND: u64 = 8;

/// A time, in eighths of a second since the clock was made; it wraps around after 17 years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tick(u32);

impl Tick {
    pub(super) fn of(clock: &Clock) -> Self {
        Self((clock.micros() * PER_SECOND / 1_000_000) as u32)
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
