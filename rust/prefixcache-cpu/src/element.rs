//! The number types of tensors: how they stand in 32-bit words, and how words are multiplied.

use crate::bf16::Bf16;
use crate::lanes::Lanes;

/// A number type of activations, weights and the KV cache.
pub trait Element: Copy + Send + Sync + 'static {
    /// Numbers in a 32-bit word.
    const PER_WORD: usize;

    /// Rounds to the nearest.
    fn from_f32(value: f32) -> Self;

    /// Exact.
    fn to_f32(self) -> f32;

    /// acc + the product of two words, number by number.
    fn dot<L: Lanes>(lanes: L, acc: L::V, a: L::V, b: L::V) -> L::V;

    /// Lines of words from two vectors of numbers, in which the two numbers of each of `L::LANES`
    /// columns are adjacent: one line or two, in the order of the depth.
    fn lines<L: Lanes>(lanes: L, a: L::V, b: L::V) -> (L::V, Option<L::V>);

    /// The same from vectors of numbers of the same columns, `b` at the next depth.
    fn column_lines<L: Lanes>(lanes: L, a: L::V, b: L::V) -> (L::V, Option<L::V>);

    /// Loads a vector.
    ///
    /// # Safety
    /// `from` is readable for `L::LANES` numbers.
    unsafe fn load<L: Lanes>(lanes: L, from: *const Self) -> L::V;

    /// Rounds and stores a vector.
    ///
    /// # Safety
    /// `to` is writable for `L::LANES` numbers.
    unsafe fn store<L: Lanes>(lanes: L, to: *mut Self, v: L::V);

    /// Loads the first `count` lanes; the others are 0.
    ///
    /// # Safety
    /// `from` is readable for `count` numbers.
    #[inline(always)]
    unsafe fn load_some<L: Lanes>(lanes: L, from: *const Self, count: usize) -> L::V {
        if count >= L::LANES {
            // SAFETY: the caller vouches for them.
            return unsafe { Self::load(lanes, from) };
        }
        let mut numbers = [Self::from_f32(0.0); 16];
        // SAFETY: `count` is below 16; a vector is at most 16 numbers.
        unsafe {
            std::ptr::copy_nonoverlapping(from, numbers.as_mut_ptr(), count);
            Self::load(lanes, numbers.as_ptr())
        }
    }

    /// Rounds and stores the first `count` lanes.
    ///
    /// # Safety
    /// `to` is writable for `count` numbers.
    #[inline(always)]
    unsafe fn store_some<L: Lanes>(lanes: L, to: *mut Self, v: L::V, count: usize) {
        if count >= L::LANES {
            // SAFETY: the caller vouches for them.
            return unsafe { Self::store(lanes, to, v) };
        }
        let mut numbers = [Self::from_f32(0.0); 16];
        // SAFETY: `count` is below 16; a vector is at most 16 numbers.
        unsafe {
            Self::store(lanes, numbers.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(numbers.as_ptr(), to, count);
        }
    }
}

impl Element for f32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn dot<L: Lanes>(lanes: L, acc: L::V, a: L::V, b: L::V) -> L::V {
        lanes.mul_add(a, b, acc)
    }

    #[inline(always)]
    fn lines<L: Lanes>(lanes: L, a: L::V, b: L::V) -> (L::V, Option<L::V>) {
        let (even, odd) = lanes.unzip(a, b);
        (even, Some(odd))
    }

    #[inline(always)]
    fn column_lines<L: Lanes>(_: L, a: L::V, b: L::V) -> (L::V, Option<L::V>) {
        (a, Some(b))
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, from: *const Self) -> L::V {
        // SAFETY: the caller's promise is the same.
        unsafe { lanes.load(from) }
    }

    #[inline(always)]
    unsafe fn store<L: Lanes>(lanes: L, to: *mut Self, v: L::V) {
        // SAFETY: the caller's promise is the same.
        unsafe { lanes.store(to, v) }
    }
}

impl Element for Bf16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Bf16::from_f32(value)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        Bf16::to_f32(self)
    }

    #[inline(always)]
    fn dot<L: Lanes>(lanes: L, acc: L::V, a: L::V, b: L::V) -> L::V {
        lanes.dot_pair(acc, a, b)
    }

    #[inline(always)]
    fn lines<L: Lanes>(lanes: L, a: L::V, b: L::V) -> (L::V, Option<L::V>) {
        (lanes.round_pairs(a, b), None)
    }

    #[inline(always)]
    fn column_lines<L: Lanes>(lanes: L, a: L::V, b: L::V) -> (L::V, Option<L::V>) {
        (lanes.zip_rounded(a, b), None)
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, from: *const Self) -> L::V {
        // SAFETY: the caller's promise is the same.
        unsafe { lanes.load_bf16(from) }
    }

    #[inline(always)]
    unsafe fn store<L: Lanes>(lanes: L, to: *mut Self, v: L::V) {
        // SAFETY: the caller's promise is the same.
        unsafe { lanes.store_bf16(to, v) }
    }
}
