//! Percentiles of a stream of numbers in bounded memory.

/// The bits of a number that are kept: what is reported of it is less than a thousandth below it.
const BITS: u32 = 10;

/// How often which number came, in buckets whose width grows with the numbers.
#[derive(Clone, Debug, Default)]
pub struct Quantiles {
    counts: Vec<u64>,
    total: u64,
}

impl Quantiles {
    /// Adds a number.
    pub fn push(&mut self, value: u64) {
        let bucket = bucket(value);
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.total += 1;
    }

    /// The number at a percentile from 0 to 100, by nearest rank; 0 where there is none.
    #[must_use]
    pub fn at(&self, percentile: u64) -> u64 {
        let rank = (self.total * percentile).div_ceil(100).max(1);
        let mut below = 0;
        let reaches = |count: &u64| {
            below += count;
            below >= rank
        };
        self.counts.iter().position(reaches).map_or(0, least)
    }
}

/// The bucket of a number: the number itself, or its exponent and its first bits.
fn bucket(value: u64) -> usize {
    let shift = (u64::BITS - value.leading_zeros()).saturating_sub(BITS + 1);
    ((u64::from(shift) << BITS) + (value >> shift)) as usize
}

/// The least number of a bucket.
fn least(bucket: usize) -> u64 {
    let shift = (bucket >> BITS).saturating_sub(1);
    ((bucket - (shift << BITS)) as u64) << shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_sorted_numbers_up_to_a_thousandth() {
        let numbers: Vec<u64> = (0..5000_u64).map(|n| n * n * 37 % 1_000_003).collect();
        let mut quantiles = Quantiles::default();
        numbers.iter().for_each(|&number| quantiles.push(number));
        let mut sorted = numbers;
        sorted.sort_unstable();
        for percentile in [0, 1, 50, 90, 99, 100] {
            let rank = (sorted.len() * percentile as usize).div_ceil(100).max(1);
            let (exact, estimate) = (sorted[rank - 1], quantiles.at(percentile));
            assert!(
                estimate <= exact && exact - estimate <= exact / 1000,
                "{estimate} is not {exact}"
            );
        }
        assert_eq!(Quantiles::default().at(50), 0);
        let mut large = Quantiles::default();
        large.push(u64::MAX);
        assert!(large.at(50) > u64::MAX - u64::MAX / 1000);
    }
}
