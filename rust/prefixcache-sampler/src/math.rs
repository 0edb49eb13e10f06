//! The masses of tokens: the same bits whatever instructions compute them.

pub use prefixcache_cpu::math::{exp, ln};

/// Added to a number from 0 to 2^51, it shifts the number's whole part to the low bits.
const SHIFT: f64 = (1_u64 << 52) as f64;

/// A whole number below 2^53. AVX2 has no instruction for it.
#[inline(always)]
pub fn to_f64(x: u64) -> f64 {
    const HIGH: f64 = SHIFT * (1_u64 << 32) as f64;
    let low = f64::from_bits(SHIFT.to_bits() | (x & 0xffff_ffff)) - SHIFT;
    let high = f64::from_bits(HIGH.to_bits() | (x >> 32)) - HIGH;
    high + low
}

/// The mass of a token is this times its probability over that of the likeliest token.
///
/// Masses are whole numbers, so that their sum does not depend on the order. Those of 2^19 tokens
/// are below 2^63.
pub const UNITS: f64 = (1_u64 << 44) as f64;

/// The mass of a token whose logit is `below` less than the largest; 0 where that is NaN.
#[inline(always)]
pub fn mass(below: f32) -> u64 {
    // The last bit of this number is a unit.
    const BASE: f64 = 256.0;
    let below = if below < 64.0 { below } else { 64.0 };
    (exp(-f64::from(below)) + BASE).to_bits() - BASE.to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_are_converted_exactly() {
        for shift in 0..53 {
            for low in [0, 1, 3] {
                let x = ((1_u64 << shift) | low) & ((1 << 53) - 1);
                assert_eq!(to_f64(x), x as f64);
            }
        }
    }

    #[test]
    fn masses_are_whole_numbers_of_units() {
        assert_eq!(mass(0.0), 1 << 44);
        for i in 0..40_000 {
            let below = i as f32 / 1000.0;
            let want = (f64::from(-below).exp() * UNITS).round();
            assert!((mass(below) as f64 - want).abs() <= 1.0, "{below}");
        }
        for far in [32.0, 1e30, f32::INFINITY, f32::NAN] {
            assert_eq!(mass(far), 0);
        }
    }
}
