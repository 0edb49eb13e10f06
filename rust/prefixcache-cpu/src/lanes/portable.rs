//! Plain Rust that every processor runs; the compiler makes what vectors it can of it.

use super::{CodeTable, Lanes};
use crate::bf16::Bf16;
use crate::f16::f16_to_f32;

/// Eight lanes in plain Rust.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Portable;

type V = [f32; 8];

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> V {
    std::array::from_fn(f)
}

fn low(word: f32) -> f32 {
    f32::from_bits(word.to_bits() << 16)
}

fn high(word: f32) -> f32 {
    f32::from_bits(word.to_bits() & 0xffff_0000)
}

impl Lanes for Portable {
    type V = V;
    const UNROLLED: bool = false;
    const LANES: usize = 8;
    const WIDTH: usize = 2;

    operations! {
        fn splat(self, x: f32) -> V { [x; 8] }
        fn iota(self) -> V { each(|i| i as f32) }
        fn field<const BITS: u32, const SIGNED: bool>(self, words: V, at: u32) -> V {
            words.map(|word| {
                let top = word.to_bits() << (32 - at - BITS);
                match SIGNED {
                    true => (top.cast_signed() >> (32 - BITS)) as f32,
                    false => (top >> (32 - BITS)) as f32,
                }
            })
        }
        fn lookup(self, table: &CodeTable, words: V, at: u32) -> V {
            words.map(|word| table.numbers[(word.to_bits() >> at & 15) as usize])
        }
        fn join(self, low: V, high: V, at: u32) -> V {
            each(|i| f32::from_bits(low[i].to_bits() >> at | high[i].to_bits() << (32 - at)))
        }
        fn twice(self, v: V) -> (V, V) { (each(|i| v[i / 2]), each(|i| v[4 + i / 2])) }
        fn unzip(self, a: V, b: V) -> (V, V) {
            let lane = |i: usize| if i < 8 { a[i] } else { b[i - 8] };
            (each(|i| lane(2 * i)), each(|i| lane(2 * i + 1)))
        }
        fn add(self, a: V, b: V) -> V { each(|i| a[i] + b[i]) }
        fn sub(self, a: V, b: V) -> V { each(|i| a[i] - b[i]) }
        fn mul(self, a: V, b: V) -> V { each(|i| a[i] * b[i]) }
        fn div(self, a: V, b: V) -> V { each(|i| a[i] / b[i]) }
        fn max(self, a: V, b: V) -> V { each(|i| if a[i] > b[i] { a[i] } else { b[i] }) }
        fn min(self, a: V, b: V) -> V { each(|i| if a[i] < b[i] { a[i] } else { b[i] }) }
        fn mul_add(self, a: V, b: V, c: V) -> V {
            // Two roundings: a fused one would be a call into the C library here.
            each(|i| a[i] * b[i] + c[i])
        }
        fn dot_pair(self, acc: V, a: V, b: V) -> V {
            each(|i| acc[i] + low(a[i]) * low(b[i]) + high(a[i]) * high(b[i]))
        }
        fn select_less(self, a: V, b: V, yes: V, no: V) -> V {
            each(|i| if a[i] < b[i] { yes[i] } else { no[i] })
        }
        fn pow2(self, n: V) -> V { each(|i| f32::from_bits((n[i].to_bits() << 23).wrapping_add(127 << 23))) }
        fn zip_upper(self, even: V, odd: V) -> V {
            each(|i| f32::from_bits((even[i].to_bits() >> 16) | odd[i].to_bits()))
        }
        fn highest(self, v: V) -> V { [v.into_iter().fold(v[0], |a, b| if a > b { a } else { b }); 8] }
    }

    operations! {
        unsafe fn load(self, from: *const f32) -> V { from.cast::<V>().read_unaligned() }
        unsafe fn store(self, to: *mut f32, v: V) { to.cast::<V>().write_unaligned(v) }
        unsafe fn load_bf16(self, from: *const Bf16) -> V {
            from.cast::<[Bf16; 8]>().read_unaligned().map(Bf16::to_f32)
        }
        unsafe fn store_bf16(self, to: *mut Bf16, v: V) {
            to.cast::<[Bf16; 8]>().write_unaligned(v.map(Bf16::from_f32));
        }
        unsafe fn load_f16(self, from: *const u16) -> V {
            from.cast::<[u16; 8]>().read_unaligned().map(f16_to_f32)
        }
        unsafe fn load_u8(self, from: *const u8) -> V { from.cast::<[u8; 8]>().read().map(f32::from) }
        unsafe fn load_i8(self, from: *const i8) -> V { from.cast::<[i8; 8]>().read().map(f32::from) }
    }

    // Not inlined: it would be compiled again for each format.
    #[inline(never)]
    fn round_pairs(self, a: V, b: V) -> V {
        let bits = |x: f32| u32::from(Bf16::from_f32(x).to_bits());
        let (even, odd) = self.unzip(a, b);
        each(|i| f32::from_bits(bits(even[i]) | bits(odd[i]) << 16))
    }
}
