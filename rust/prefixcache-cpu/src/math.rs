//! e^x and ln x in `f64`: the same bits whatever instructions compute them.
//!
//! Additions, multiplications and divisions alone, in one order and never fused, on numbers one by
//! one. Both are fdlibm's, right to one unit in the last place.

// Of fdlibm: Copyright (C) 1993 by Sun Microsystems, Inc. All rights reserved. Developed at SunPro, a
// Sun Microsystems, Inc. business. Permission to use, copy, modify, and distribute this software is
// freely granted, provided that this notice is preserved.

const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// Added to a number from 0 to 2^51, it shifts the number's whole part to the low bits.
const SHIFT: f64 = (1_u64 << 52) as f64;

/// e^x, for x from -700 to 700.
#[inline(always)]
pub fn exp(x: f64) -> f64 {
    const ROUND: f64 = 1.5 * SHIFT;
    const P: [f64; 5] = [
        1.666_666_666_666_660_2e-1,
        -2.777_777_777_701_559_3e-3,
        6.613_756_321_437_934e-5,
        -1.653_390_220_546_525_2e-6,
        4.138_136_797_057_238_5e-8,
    ];
    let n = x * std::f64::consts::LOG2_E + ROUND;
    let whole = n - ROUND;
    let high = x - whole * LN2_HIGH;
    let low = whole * LN2_LOW;
    let r = high - low;
    let t = r * r;
    let c = r - t * (P[0] + t * (P[1] + t * (P[2] + t * (P[3] + t * P[4]))));
    let y = 1.0 - ((low - (r * c) / (2.0 - c)) - high);
    y * f64::from_bits((n.to_bits() << 52).wrapping_add(1023 << 52))
}

/// ln x, for positive normal numbers.
#[inline(always)]
pub fn ln(x: f64) -> f64 {
    const SQRT_HALF: u64 = 0x3fe6_a09e_667f_3bcd;
    const L: [f64; 7] = [
        6.666_666_666_666_735e-1,
        3.999_999_999_940_942e-1,
        2.857_142_874_366_239e-1,
        2.222_219_843_214_978_4e-1,
        1.818_357_216_161_805e-1,
        1.531_383_769_920_937_3e-1,
        1.479_819_860_511_658_6e-1,
    ];
    // x = 2^k m, with m from sqrt(1 / 2) to sqrt(2); k and its sign in a positive number.
    let bits = x.to_bits();
    let shifted_k = bits.wrapping_sub(SQRT_HALF).wrapping_add(1 << 62) >> 52;
    let k = f64::from_bits(SHIFT.to_bits() | shifted_k) - (SHIFT + 1024.0);
    let m = f64::from_bits(bits.wrapping_sub(shifted_k << 52).wrapping_add(1 << 62));
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let w = z * z;
    let even = w * (L[1] + w * (L[3] + w * L[5]));
    let odd = z * (L[0] + w * (L[2] + w * (L[4] + w * L[6])));
    let half_square = 0.5 * f * f;
    k * LN2_HIGH - ((half_square - (s * (half_square + (even + odd)) + k * LN2_LOW)) - f)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relative_error(got: f64, want: f64) -> f64 {
        ((got - want) / want).abs()
    }

    #[test]
    fn exp_is_that_of_the_standard_library() {
        for i in -700_000..700_000 {
            let x = f64::from(i) * 0.000_999_7;
            assert!(relative_error(exp(x), x.exp()) < 4e-16, "e^{x}");
        }
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn ln_is_that_of_the_standard_library() {
        let near_one = (-300_000..300_000).map(|i| 1.0 + f64::from(i) * 3.1e-6);
        let wide = (-1000..1000).map(|i| 1.37_f64.powi(i));
        let least = [2.0_f64.powi(-54), 2.0_f64.powi(-58), 1.0 - 2.0_f64.powi(-53)];
        for x in near_one.chain(wide).chain(least) {
            let error = (ln(x) - x.ln()).abs();
            assert!(error <= 4e-16 * x.ln().abs(), "ln {x}: {} {}", ln(x), x.ln());
        }
        assert_eq!(ln(1.0), 0.0);
    }
}
