//! Random numbers that are a pure function of seed, position and token.
//!
//! Nothing is drawn from a generator with a state, so that a token's noise is the same whatever else is
//! in the batch, however the prompt was chunked, and when a request is resumed.
//!
//! The noise is made block by block, so that the least of a block is known without its members: of
//! sixteen standard exponential variables the least is a sixteenth of one, any member may be it, and by
//! how much the others exceed it are again standard exponential variables, all of them independent.

use crate::blocks::{MEMBERS, token_of};
use crate::math::{ln, to_f64};

// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const MIX_1: u64 = 0xbf58_476d_1ce4_e5b9;
const MIX_2: u64 = 0x94d0_49bb_1331_11eb;

/// Standard exponential variables of one row, one a token, none of them 0.
#[derive(Clone, Copy)]
pub struct Noise {
    block_key: u64,
    token_key: u64,
}

impl Noise {
    /// That of the token at `position` of a sequence with this seed.
    pub fn new(seed: u64, position: u64) -> Self {
        let block_key = mix(mix(seed).wrapping_add(position.wrapping_mul(GOLDEN)));
        let token_key = mix(block_key ^ MIX_1);
        Self { block_key, token_key }
    }

    /// The least noise in a block.
    #[inline(always)]
    pub fn least_of(self, block: usize) -> f64 {
        least(bits(self.block_key, block))
    }

    /// The noise of a token.
    #[inline(always)]
    pub fn of(self, block: usize, member: usize) -> f64 {
        let block_bits = bits(self.block_key, block);
        if block_bits % MEMBERS as u64 == member as u64 {
            return least(block_bits);
        }
        least(block_bits) + exponential(bits(self.token_key, token_of(block, member)))
    }
}

#[inline(always)]
fn least(block_bits: u64) -> f64 {
    exponential(block_bits) * (1.0 / MEMBERS as f64)
}

/// From the upper 53 bits.
#[inline(always)]
fn exponential(bits: u64) -> f64 {
    const LEAST: f64 = 1.0 / (1_u64 << 54) as f64;
    const STEP: f64 = 1.0 / (1_u64 << 53) as f64;
    let found = -ln((to_f64(bits >> 11) + 0.5) * STEP);
    if found > LEAST { found } else { LEAST }
}

#[inline(always)]
fn bits(key: u64, counter: usize) -> u64 {
    mix(key.wrapping_add((counter as u64 + 1).wrapping_mul(GOLDEN)))
}

#[inline(always)]
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(MIX_1);
    let x = (x ^ (x >> 27)).wrapping_mul(MIX_2);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        // The first outputs of the authors' program for the seed 1234567.
        let found = [0, 1, 2].map(|counter| bits(1_234_567, counter));
        let want =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(found, want);
    }

    #[test]
    fn the_least_of_a_block_is_the_least_of_its_members() {
        for position in 0..50 {
            let noise = Noise::new(7, position);
            for block in 0..200 {
                let of_members = (0..MEMBERS).map(|member| noise.of(block, member));
                let least = of_members.fold(f64::INFINITY, f64::min);
                assert_eq!(least, noise.least_of(block));
            }
        }
    }

    #[test]
    fn noise_is_positive_at_both_ends() {
        assert_eq!(exponential(u64::MAX), 1.0 / (1_u64 << 54) as f64);
        assert!((exponential(0) - 54.0 * std::f64::consts::LN_2).abs() < 1e-12);
    }
}
