//! Plain Rust that every processor runs.

use super::{ByteLanes, dots_of_four};
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
    const WIDTH: usize = 2;
    const DOT_OF_FOUR: bool = false;

    #[inline(always)]
    fn splat(self, x: i32) -> I {
        [x; 8]
    }

    #[inline(always)]
    fn splat_f32(self, x: f32) -> F {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn load(self, from: *const u8) -> I {
        // SAFETY: the caller vouches for 32 readable bytes.
        let words = unsafe { from.cast::<[[u8; 4]; 8]>().read_unaligned() };
        words.map(i32::from_le_bytes)
    }

    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> I {
        // SAFETY: the caller vouches for 8 readable bytes.
        unsafe { from.cast::<[u8; 8]>().read_unaligned() }.map(i32::from)
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> I {
        // SAFETY: the caller vouches for 8 readable bytes.
        unsafe { from.cast::<[i8; 8]>().read_unaligned() }.map(i32::from)
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> F {
        // SAFETY: the caller vouches for 16 readable bytes.
        let halves = unsafe { from.cast::<[[u8; 2]; 8]>().read_unaligned() };
        halves.map(|bytes| f16_to_f32(u16::from_le_bytes(bytes)))
    }

    #[inline(always)]
    unsafe fn load_e8m0(self, from: *const u8) -> F {
        // SAFETY: the caller vouches for 8 readable bytes.
        unsafe { from.cast::<[u8; 8]>().read_unaligned() }.map(e8m0_to_f32)
    }

    #[inline(always)]
    unsafe fn load_f32(self, from: *const f32) -> F {
        // SAFETY: the caller vouches for 8 readable numbers.
        unsafe { from.cast::<F>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: F) {
        // SAFETY: the caller vouches for 8 writable numbers.
        unsafe { to.cast::<F>().write_unaligned(v) }
    }

    #[inline(always)]
    fn add(self, a: I, b: I) -> I {
        each(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn sub(self, a: I, b: I) -> I {
        each(|i| a[i].wrapping_sub(b[i]))
    }

    #[inline(always)]
    fn mul(self, a: I, b: I) -> I {
        each(|i| a[i].wrapping_mul(b[i]))
    }

    #[inline(always)]
    fn and(self, a: I, b: I) -> I {
        each(|i| a[i] & b[i])
    }

    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        each(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], bytes: I) -> I {
        bytes.map(|word| i32::from_le_bytes(word.to_le_bytes().map(|i| table[usize::from(i & 15)])))
    }

    #[inline(always)]
    fn shift_up<const N: u32>(self, a: I) -> I {
        a.map(|word| word << N)
    }

    #[inline(always)]
    fn shift_down<const N: u32>(self, a: I) -> I {
        a.map(|word| (word as u32 >> N) as i32)
    }

    #[inline(always)]
    fn dot_codes(self, acc: I, codes: I, x: I) -> I {
        self.dot_bytes(acc, codes, x)
    }

    #[inline(always)]
    fn dot_bytes(self, acc: I, bytes: I, x: I) -> I {
        each(|i| {
            let (bytes, x) = (bytes[i].to_le_bytes(), x[i].to_le_bytes());
            (0..4).fold(acc[i], |sum, k| {
                sum.wrapping_add(i32::from(bytes[k]) * i32::from(x[k] as i8))
            })
        })
    }

    // Not inlined: it would be compiled again for each format.
    #[inline(never)]
    unsafe fn dots<const BITS: usize, const N: usize>(self, codes: &[I; N], x: *const i32) -> I {
        // SAFETY: the caller's promise is the same.
        unsafe { dots_of_four::<Self, BITS, N>(self, codes, x) }
    }

    #[inline(always)]
    fn to_f32(self, a: I) -> F {
        a.map(|number| number as f32)
    }

    #[inline(always)]
    fn mul_f32(self, a: F, b: F) -> F {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: F, b: F, c: F) -> F {
        // Fused, as the other forms are; where the processor cannot, the C library computes it.
        each(|i| a[i].mul_add(b[i], c[i]))
    }
}
