//! float16 and E8M0: the types of a block's scales in GGUF files.

/// The number with these bits of a float16; exact.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let (sign, exponent, fraction) =
        (u32::from(bits & 0x8000) << 16, u32::from(bits >> 10 & 0x1f), u32::from(bits & 0x3ff));
    let size = match exponent {
        // Subnormal: a multiple of 2^-24.
        0 => (fraction as f32 / 16_777_216.0).to_bits(),
        31 => 0x7f80_0000 | fraction << 13,
        _ => (exponent + 112) << 23 | fraction << 13,
    };
    f32::from_bits(sign | size)
}

/// Whether the bits are those of a number, neither NaN nor infinite.
pub fn f16_is_finite(bits: u16) -> bool {
    bits & 0x7c00 != 0x7c00
}

/// Half of the power of two with this exponent in E8M0, as GGUF counts the scales of MXFP4: 2^(bits - 128);
/// exact.
pub fn e8m0_to_f32(bits: u8) -> f32 {
    let twice = f32::from_bits((u32::from(bits) << 23).max(0x0040_0000));
    twice * 0.5
}

#[cfg(test)]
mod tests {
    use super::{e8m0_to_f32, f16_is_finite, f16_to_f32};

    #[test]
    fn every_exponent_is_half_of_its_power_of_two() {
        for bits in 0..=254 {
            assert_eq!(f64::from(e8m0_to_f32(bits)), 2f64.powi(i32::from(bits) - 128));
        }
    }

    #[test]
    fn every_number_is_sign_times_fraction_times_a_power_of_two() {
        for bits in 0..=u16::MAX {
            let (got, exponent) = (f16_to_f32(bits), i32::from(bits >> 10 & 0x1f));
            let fraction = f32::from(bits & 0x3ff) / 1024.0;
            let size = match exponent {
                0 => fraction * 2.0_f32.powi(-14),
                31 if fraction == 0.0 => f32::INFINITY,
                31 => f32::NAN,
                _ => (1.0 + fraction) * 2.0_f32.powi(exponent - 15),
            };
            assert_eq!(got.is_sign_negative(), bits & 0x8000 != 0);
            assert!(got.abs() == size || got.is_nan() && size.is_nan(), "{bits:#x}");
            assert_eq!(got.is_finite(), f16_is_finite(bits));
        }
    }
}
