//! Ages of blocks, in buckets.

use super::Queue;

/// Half octaves of age, from an eighth of a second to six hours.
pub(super) const BUCKETS: usize = if cfg!(loom) { 2 } else { 36 };

/// The bucket of an age in ticks: 0, 1, 2, 3, 4 and 5, 6 and 7, 8 to 11, 12 to 15, ...
#[inline]
pub(super) fn bucket(age: u32) -> usize {
    let Some(octave) = age.checked_ilog2().filter(|&octave| octave > 0) else {
        return age as usize;
    };
    let upper_half = age >> (octave - 1) & 1;
    ((2 * octave + upper_half) as usize).min(BUCKETS - 1)
}

/// The first age of a bucket.
pub(super) fn start(bucket: usize) -> u64 {
    match bucket {
        0 | 1 => bucket as u64,
        _ => (2 + (bucket as u64 & 1)) << (bucket / 2 - 1),
    }
}

/// Something for each bucket.
pub(super) type Row = [f64; BUCKETS];

/// Waits of one queue by their age.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Waits {
    /// Those that ended with a use.
    pub(super) used: Row,
    /// Those that went on for so long, and of which no more is known.
    pub(super) open: Row,
}

/// The waits of each queue.
pub(super) type Counts = [Waits; Queue::COUNT];

/// Sampled blocks that wait, by queue and bucket of age.
pub(super) type Waiting = [Row; Queue::COUNT];

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn buckets_begin_where_they_say() {
        for at in 1..BUCKETS {
            let first = u32::try_from(start(at)).unwrap();
            assert_eq!((bucket(first), bucket(first - 1)), (at, at - 1));
        }
        assert_eq!(bucket(u32::MAX), BUCKETS - 1);
    }
}
