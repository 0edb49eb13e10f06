//! Plain Rust that every processor runs.

use super::ByteLanes;
use crate::f16::{e8m0_to_f32, f16_to_f32};

/// Eight lanes in plain Rust.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Portable;

type I = [i32; 8];
type F = [f32; 8];

#[inline(always)]
fn each<T>(f: impl Fn(usize) -> T) -> [T; 8] {
    std::array::from_fn(f)
}

impl ByteLanes for Portable {
    type I = I;
    type F = F;
    const LANES: usize = 8;
    const DOT_OF_FOUR: bool = false;

    operations! {
        fn splat(self, x: i32) -> I { [x; 8] }
        fn splat_f32(self, x: f32) -> F { [x; 8] }
        fn add(self, a: I, b: I) -> I { each(|i| a[i].wrapping_add(b[i])) }
        fn sub(self, a: I, b: I) -> I { each(|i| a[i].wrapping_sub(b[i])) }
        fn mul(self, a: I, b: I) -> I { each(|i| a[i].wrapping_mul(b[i])) }
        fn and(self, a: I, b: I) -> I { each(|i| a[i] & b[i]) }
        fn or(self, a: I, b: I) -> I { each(|i| a[i] | b[i]) }
        fn lookup(self, table: &[u8; 16], bytes: I) -> I {
            bytes.map(|word| i32::from_le_bytes(word.to_le_bytes().map(|i| table[usize::from(i & 15)])))
        }
        fn shift_up<const N: u32>(self, a: I) -> I { a.map(|word| word << N) }
        fn shift_down<const N: u32>(self, a: I) -> I { a.map(|word| (word as u32 >> N) as i32) }
        fn less_128(self, bytes: I) -> I { bytes.map(|word| word ^ 0x8080_8080_u32.cast_signed()) }
        fn add_pairs(self, a: I, b: I) -> I {
            each(|i| halves(a[i].wrapping_add(b[i]), (a[i] >> 16).wrapping_add(b[i] >> 16)))
        }
        fn pair(self, low: I, high: I) -> I { each(|i| halves(low[i], high[i])) }
        fn dot_pairs(self, a: I, b: I) -> I {
            let product = |a: i32, b: i32| i32::from(a as i16) * i32::from(b as i16);
            each(|i| product(a[i], b[i]).wrapping_add(product(a[i] >> 16, b[i] >> 16)))
        }
        fn to_f32(self, a: I) -> F { a.map(|number| number as f32) }
        fn mul_f32(self, a: F, b: F) -> F { each(|i| a[i] * b[i]) }
        fn mul_add(self, a: F, b: F, c: F) -> F {
            // Fused, as the other forms are; where the processor cannot, the C library computes it.
            each(|i| a[i].mul_add(b[i], c[i]))
        }
    }

    operations! {
        unsafe fn load(self, from: *const u8) -> I {
            from.cast::<[[u8; 4]; 8]>().read_unaligned().map(i32::from_le_bytes)
        }
        unsafe fn load_f16(self, from: *const u8) -> F {
            let halves = from.cast::<[[u8; 2]; 8]>().read_unaligned();
            halves.map(|bytes| f16_to_f32(u16::from_le_bytes(bytes)))
        }
        unsafe fn load_u8(self, from: *const u8) -> I {
            from.cast::<[u8; 8]>().read_unaligned().map(i32::from)
        }
        unsafe fn load_i8(self, from: *const u8) -> I {
            from.cast::<[i8; 8]>().read_unaligned().map(i32::from)
        }
        unsafe fn load_e8m0(self, from: *const u8) -> F {
            from.cast::<[u8; 8]>().read_unaligned().map(e8m0_to_f32)
        }
        unsafe fn load_f32(self, from: *const f32) -> F { from.cast::<F>().read_unaligned() }
        unsafe fn store(self, to: *mut f32, v: F) { to.cast::<F>().write_unaligned(v) }
    }

    // Not inlined: it would be compiled again for each format.
    #[inline(never)]
    fn pairs(self, codes: I, x: I) -> I {
        each(|i| {
            let (codes, x) = (codes[i].to_le_bytes(), x[i].to_le_bytes());
            let product = |k: usize| i32::from(codes[k]) * i32::from(x[k] as i8);
            halves(product(0) + product(1), product(2) + product(3))
        })
    }

    #[inline(never)]
    fn magnitudes(self, bytes: I) -> I {
        bytes.map(|word| {
            i32::from_le_bytes(word.to_le_bytes().map(|byte| (byte as i8).unsigned_abs()))
        })
    }

    #[inline(never)]
    fn with_signs(self, x: I, signs: I) -> I {
        each(|i| {
            let (x, signs) = (x[i].to_le_bytes(), signs[i].to_le_bytes());
            let byte = |k: usize| (x[k] as i8 * (signs[k] as i8).signum()) as u8;
            i32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
        })
    }
}

/// The lower halves of two words.
fn halves(low: i32, high: i32) -> i32 {
    high << 16 | low & 0xffff
}
