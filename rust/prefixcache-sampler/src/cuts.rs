//! How low a token's logit may be to be drawn: min_p, then top_k, then top_p of the remaining mass.
//!
//! Ties are kept on both sides of a cut, so that the order of equal logits plays no part.

use crate::blocks::{Blocks, chunk_at, largest};
use crate::math::{ln, mass};
use crate::row::Draw;

/// Buckets that tokens fall into by how far they are below the largest logit.
const BUCKETS: usize = 1024;
/// Buckets of a logit's unit: what is 32 below the largest has no mass.
const BUCKETS_A_UNIT: f32 = 32.0;
/// Among how many of the likeliest tokens a nucleus is looked for, one after the other.
const LIKELIEST: [usize; 2] = [64, 512];
/// Tokens whose masses are computed together.
const CHUNK: usize = 16;

/// Memory of the cuts of a row.
#[derive(Default)]
pub struct Spare {
    kept: Vec<f32>,
    few: Vec<f32>,
}

/// The least logit that the cuts leave.
#[inline(always)]
pub fn floor(logits: Blocks<'_>, draw: &Draw, spare: &mut Spare) -> f32 {
    let mut floor = logits.most + log_of_share(draw.min_p);
    if 0 < draw.top_k && draw.top_k < logits.values.len() {
        floor = floor.max(kth_largest(logits, draw.top_k, &mut spare.kept));
    }
    let cuts_mass = draw.top_p < 1.0;
    if !cuts_mass {
        return floor;
    }
    nucleus(logits, floor, draw.top_p, spare)
}

fn log_of_share(min_p: f64) -> f32 {
    match min_p >= f64::MIN_POSITIVE {
        true => (ln(min_p) as f32).min(0.0),
        false => f32::NEG_INFINITY,
    }
}

fn kth_largest(logits: Blocks<'_>, k: usize, spare: &mut Vec<f32>) -> f32 {
    let reached = logits.reached_by(k, spare);
    gather_from(logits, reached, spare);
    largest(spare, k)
}

fn gather_from(logits: Blocks<'_>, floor: f32, found: &mut Vec<f32>) {
    found.clear();
    found.extend(logits.tokens_from(floor).map(|(_, logit)| logit));
}

/// The least logit of the likeliest tokens whose mass reaches the share `top_p` of that of all tokens
/// not below `floor`.
///
/// It is most often among the few likeliest tokens. Else the bucket in which the mass reaches the share
/// is found first, and then the place in that bucket.
#[inline(always)]
fn nucleus(logits: Blocks<'_>, floor: f32, top_p: f64, spare: &mut Spare) -> f32 {
    let Spare { kept, few } = spare;
    let most = logits.most;
    let kept = match floor > f32::NEG_INFINITY {
        true => {
            gather_from(logits, floor, kept);
            &kept[..]
        }
        false => logits.values,
    };
    let wanted = top_p * mass_of_all(kept, most) as f64;
    for count in LIKELIEST {
        let reached = logits.reached_by(count, few);
        gather_from(logits, reached.max(floor), few);
        if let Some(found) = reaching(few, most, 0, wanted) {
            return found;
        }
    }
    let masses = masses_of_buckets(kept, most);
    let mut before = 0;
    let mut reaches = |&mass: &u64| {
        before += mass;
        before as f64 >= wanted
    };
    let bucket = masses.iter().position(&mut reaches).expect("all tokens reach the share");
    before -= masses[bucket];
    gather_bucket(kept, most, bucket as u32, few);
    reaching(few, most, before, wanted).expect("the bucket that reaches the share")
}

/// The logit with which the mass from the largest on, and `before`, reaches what is wanted.
fn reaching(logits: &mut [f32], most: f32, before: u64, wanted: f64) -> Option<f32> {
    logits.sort_unstable_by(|a, b| b.total_cmp(a));
    let mut sum = before;
    let found = logits.iter().find(|&&logit| {
        sum += mass(most - logit);
        sum as f64 >= wanted
    });
    found.copied()
}

#[inline(always)]
fn bucket_of(below: f32) -> u32 {
    // Added to a number from 0 to 2^22, it rounds it and shifts it to the low bits.
    const SHIFT: f32 = (1 << 23) as f32;
    const LAST: f32 = (BUCKETS - 1) as f32;
    let place = below * BUCKETS_A_UNIT;
    let place = if place < LAST { place } else { LAST };
    (place + SHIFT).to_bits() - SHIFT.to_bits()
}

#[inline(always)]
fn masses_of_buckets(logits: &[f32], most: f32) -> [u64; BUCKETS] {
    let mut sums = [0; BUCKETS];
    let mut padded = [0.0; CHUNK];
    for start in (0..logits.len()).step_by(CHUNK) {
        let chunk = chunk_at(logits, start, &mut padded);
        let (mut buckets, mut masses) = ([0; CHUNK], [0; CHUNK]);
        for i in 0..CHUNK {
            buckets[i] = bucket_of(most - chunk[i]);
            masses[i] = mass(most - chunk[i]);
        }
        for i in 0..CHUNK {
            sums[buckets[i] as usize % BUCKETS] += masses[i];
        }
    }
    sums
}

/// The logits of a bucket, found without a branch.
#[inline(always)]
fn gather_bucket(logits: &[f32], most: f32, bucket: u32, found: &mut Vec<f32>) {
    found.clear();
    found.resize(logits.len(), 0.0);
    let mut count = 0;
    for &logit in logits {
        found[count] = logit;
        count += usize::from(bucket_of(most - logit) == bucket);
    }
    found.truncate(count);
}

/// The mass of all tokens.
#[inline(always)]
pub fn mass_of_all(logits: &[f32], most: f32) -> u64 {
    let mut sums = [0; CHUNK];
    let mut padded = [0.0; CHUNK];
    for start in (0..logits.len()).step_by(CHUNK) {
        let chunk = chunk_at(logits, start, &mut padded);
        for i in 0..CHUNK {
            sums[i] += mass(most - chunk[i]);
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use prefixcache_cpu::{Form, Kernel, Lanes};

    use super::*;

    struct Floor<'a>(&'a [f32], Draw);

    impl Kernel for Floor<'_> {
        type Output = f32;

        fn run<L: Lanes>(self, lanes: L) -> f32 {
            let mut best = Vec::new();
            let logits = Blocks::new(lanes, self.0, &mut best).expect("finite logits");
            floor(logits, &self.1, &mut Spare::default())
        }
    }

    /// All are sorted, and summed one after the other.
    fn plain_floor(logits: &[f32], top_k: usize, top_p: f64) -> f32 {
        let mut sorted = logits.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let most = sorted[0];
        if top_k > 0 {
            let least = sorted[top_k - 1];
            sorted.retain(|&logit| logit >= least);
        }
        if top_p == 1.0 {
            return sorted[sorted.len() - 1];
        }
        let all: u64 = sorted.iter().map(|&logit| mass(most - logit)).sum();
        let mut sum = 0;
        let found = sorted.iter().find(|&&logit| {
            sum += mass(most - logit);
            sum as f64 >= top_p * all as f64
        });
        *found.expect("all reach the share")
    }

    #[test]
    fn floors_are_those_of_sorted_logits() {
        // Wide enough that flat logits have more than the likeliest tokens inside.
        for (i, vocab) in [700, 40_000, 70_001].into_iter().enumerate() {
            for spread in [0.0, 1e-3, 0.3, 4.0, 60.0] {
                // The fractions of a golden ratio are spread evenly, in no order.
                let place = |token| (f64::from(token) * 0.618_033_988_749_895).fract();
                let logits = (0..vocab).map(|token| (place(token) * spread) as f32 - i as f32);
                let logits: Vec<f32> = logits.collect();
                for (top_k, top_p) in [
                    (0, 1e-9),
                    (0, 0.4),
                    (0, 0.97),
                    (0, 1.0 - 1e-9),
                    (5, 0.5),
                    (600, 0.9),
                    (600, 1.0),
                ] {
                    let draw =
                        Draw { temperature: 1.0, min_p: 0.0, top_k, top_p, seed: 0, position: 0 };
                    let want = plain_floor(&logits, top_k, top_p);
                    for form in Form::available() {
                        let found = form.run(Floor(&logits, draw));
                        assert_eq!(found, want, "{vocab} {spread} {top_k} {top_p}");
                    }
                }
            }
        }
    }
}
