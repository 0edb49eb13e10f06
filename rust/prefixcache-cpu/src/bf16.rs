//! bfloat16: the upper half of an `f32`.

/// A bfloat16 number, as its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(u16);

impl Bf16 {
    /// The number with these bits.
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The bits of the number.
    pub const fn to_bits(self) -> u16 {
        self.0
    }

    /// Rounds to the nearest number, to even in a tie; a NaN stays one.
    #[inline(always)]
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Self((bits >> 16) as u16 | 0x40);
        }
        Self(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }

    /// The same number as an `f32`; exact.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

#[cfg(test)]
mod tests {
    use super::Bf16;

    #[test]
    fn every_number_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let number = Bf16::from_bits(bits);
            let back = Bf16::from_f32(number.to_f32());
            assert!(back == number || number.to_f32().is_nan() && back.to_f32().is_nan());
        }
    }

    #[test]
    fn ties_go_to_even() {
        let tie = |low: u16| f32::from_bits(u32::from(low) << 16 | 0x8000);
        assert_eq!(Bf16::from_f32(tie(0x3f80)).to_bits(), 0x3f80);
        assert_eq!(Bf16::from_f32(tie(0x3f81)).to_bits(), 0x3f82);
        assert_eq!(Bf16::from_f32(f32::MAX).to_f32(), f32::INFINITY);
    }
}
