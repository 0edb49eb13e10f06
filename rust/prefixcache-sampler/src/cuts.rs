//! How low a token's logit may be to be drawn: min_p, then top_k, then top_p of the remaining mass.
//!
//! Ties are kept on both sides of a cut, so that the order of equal logits plays no part.

use crate::blocks::{Blocks, each_padded, largest};
use crate::math::{ln, mass};
use crate::row::Draw;

/// Buckets that tokens fall into by how far they are below the largest logit.
const BUCKETS: usize = 1024;
/// Buckets of a logit's unit: what is 32 below the largest has no mass.
const BUCKETS_A_UNIT: f32 = 32.0;
/// Tokens whose masses are computed together.
const CHUNK: usize = 64;

/// Memory of the cuts of a row.
#[derive(Default)]
pub struct Spare {
    kept: Vec<f32>,
    bucket: Vec<f32>,
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
    let kept = match floor > f32::NEG_INFINITY {
        true => {
            spare.kept.clear();
            spare
                .kept
                .extend(logits.tokens_from(floor).map(|(_, logit)| logit));
            &spare.kept
        }
        false => logits.values,
    };
    nucleus(kept, logits.most, draw.top_p, &mut spare.bucket)
}

fn log_of_share(min_p: f64) -> f32 {
    match min_p >= f64::MIN_POSITIVE {
        true => (ln(min_p) as f32).min(0.0),
        false => f32::NEG_INFINITY,
    }
}

fn kth_largest(logits: Blocks<'_>, k: usize, spare: &mut Vec<f32>) -> f32 {
    let reached = logits.reached_by(k, spare);
    spare.clear();
    spare.extend(logits.tokens_from(reached).map(|(_, logit)| logit));
    largest(spare, k)
}

/// The least logit of the likeliest tokens whose mass reaches the share `top_p` of that of all `logits`.
///
/// The bucket in which the mass reaches it is found first, then the place in that bucket.
#[inline(always)]
fn nucleus(logits: &[f32], most: f32, top_p: f64, bucket: &mut Vec<f32>) -> f32 {
    let masses = masses_of_buckets(logits, most);
    let wanted = top_p * masses.iter().sum::<u64>() as f64;
    let (mut reached, mut found) = (0, BUCKETS - 1);
    for (i, mass) in masses.into_iter().enumerate() {
        if (reached + mass) as f64 >= wanted {
            found = i;
            break;
        }
        reached += mass;
    }
    gather_bucket(logits, most, found as u32, bucket);
    bucket.sort_unstable_by(|a, b| b.total_cmp(a));
    for &logit in bucket.iter() {
        reached += mass(most - logit);
        if reached as f64 >= wanted {
            return logit;
        }
    }
    unreachable!("the bucket in which the mass reaches the share holds the token that does")
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
    each_padded::<CHUNK>(logits, |_, chunk| {
        let (mut buckets, mut masses) = ([0; CHUNK], [0; CHUNK]);
        for i in 0..CHUNK {
            buckets[i] = bucket_of(most - chunk[i]);
            masses[i] = mass(most - chunk[i]);
        }
        for i in 0..CHUNK {
            sums[buckets[i] as usize % BUCKETS] += masses[i];
        }
    });
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
    each_padded::<CHUNK>(logits, |_, chunk| {
        for i in 0..CHUNK {
            sums[i] += mass(most - chunk[i]);
        }
    });
    sums.iter().sum()
}
