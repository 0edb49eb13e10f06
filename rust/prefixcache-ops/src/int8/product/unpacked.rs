//! A block whose codes are unpacked once for several rows.

use prefixcache_cpu::ByteLanes;

use super::codes::{four_steps, most_pairs, products_of};
use super::panel::{Packed, Panel};
use super::scaling::{Factors, Scaling, headers};
use crate::int8::activations::{ActivationBlock, QuantizedRows};
use crate::int8::tiles::TILE;
use crate::panel::{PANEL, Sums};

impl<P: Packed, L: ByteLanes> Panel<P, L> {
    /// Multiplies it with some rows, whose sums are in memory: what takes the time is to unpack codes and to
    /// multiply them.
    #[inline(always)]
    pub(super) fn multiply_in_memory(&self, x: &QuantizedRows, first: usize, sums: &mut [Sums]) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        sums.fill([0.0; PANEL]);
        let (row, stride) = (x.row(first).as_ptr(), x.stride());
        for number in 0..self.depth * self.width {
            let (d, tile) = (number / self.width, number % self.width);
            let unit = self.units.wrapping_add(number * layout.unit());
            // SAFETY: the panel has the unit.
            let headers = unsafe { headers::<P, L>(lanes, unit) };
            for b in 0..layout.blocks {
                self.fetch_block(unit, b);
                for (v, &header) in headers.iter().enumerate().take(TILE / L::LANES) {
                    // SAFETY: the unit has such a block, and each row as many blocks.
                    unsafe {
                        let at = layout.header() + b * layout.block();
                        let block = Unpacked::<P, L>::new(lanes, unit, at, v * L::LANES, header);
                        let mut x = row.add(d * layout.blocks + b);
                        for sums in &mut *sums {
                            let to = sums[tile * TILE + v * L::LANES..][..L::LANES].as_mut_ptr();
                            let acc = lanes.load_f32(to);
                            lanes.store(to, block.add_row(lanes, &*x, acc));
                            x = x.wrapping_add(stride);
                        }
                    }
                }
            }
        }
    }
}

/// The numbers of a block in a vector of outputs.
pub(super) struct Unpacked<P, L: ByteLanes> {
    /// Of the first 16 steps, four each, and of the others.
    pub(super) codes: [L::I; 8],
    pub(super) scaling: Scaling<P, L>,
}

impl<P: Packed, L: ByteLanes> Unpacked<P, L> {
    /// # Safety
    /// As of [`Scaling::new`].
    #[inline(always)]
    pub(super) unsafe fn new(
        lanes: L,
        unit: *const u8,
        at: usize,
        lane: usize,
        header: (L::F, L::F),
    ) -> Self {
        let mut codes = [lanes.splat(0); 8];
        let mut high = lanes.splat(0);
        // SAFETY: the caller vouches for the unit, whose parts these are.
        unsafe {
            for g in 0..4 {
                let from = unit.add(at + 4 * lane);
                (codes[g], codes[4 + g]) = four_steps::<P, L>(lanes, from, g, &mut high);
            }
            let scaling = Scaling::new(lanes, unit, at, lane, header);
            Self { codes, scaling }
        }
    }

    /// A row's sums with the products of its block.
    #[inline(always)]
    fn add_row(&self, lanes: L, x: &ActivationBlock, acc: L::F) -> L::F {
        let words = x.codes.as_ptr().cast::<i32>();
        // SAFETY: a block of x has eight words.
        let sum = unsafe {
            if const { P::LAYOUT.halves() } {
                let [first, second] = self.scaling.factors;
                let low = dots::<P, L>(lanes, &self.codes[..4], words, Some(first));
                let upper = dots::<P, L>(lanes, &self.codes[4..], words.add(4), Some(second));
                lanes.add(low, upper)
            } else {
                dots::<P, L>(lanes, &self.codes, words, None)
            }
        };
        let x = Factors::new(lanes, x);
        let sum = self.scaling.less_offset(lanes, sum, &x);
        self.scaling.add(lanes, lanes.to_f32(sum), &x, acc)
    }
}

/// The products of codes with numbers of x, times factors where there are some.
///
/// # Safety
/// `x` is readable for as many words as there are codes.
#[inline(always)]
unsafe fn dots<P: Packed, L: ByteLanes>(
    lanes: L,
    codes: &[L::I],
    x: *const i32,
    factors: Option<L::I>,
) -> L::I {
    let most = const { most_pairs(P::LAYOUT.dot_bits) };
    let in_pairs = match factors {
        Some(factors) => lanes.pair(factors, factors),
        None => lanes.splat(0x0001_0001),
    };
    let [mut sum, mut pairs] = [lanes.splat(0); 2];
    for (i, &codes_of_four) in codes.iter().enumerate() {
        // SAFETY: the caller vouches for the words.
        let x = lanes.splat(unsafe { x.add(i).read_unaligned() });
        if const { L::DOT_OF_FOUR } {
            sum = lanes.dot(sum, codes_of_four, x);
            continue;
        }
        let more = products_of::<P, L>(lanes, codes_of_four, x);
        pairs = match i % most {
            0 => more,
            _ => lanes.add_pairs(pairs, more),
        };
        if (i + 1) % most == 0 || i + 1 == codes.len() {
            sum = lanes.add(sum, lanes.dot_pairs(pairs, in_pairs));
        }
    }
    match factors {
        Some(factors) if L::DOT_OF_FOUR => lanes.mul(sum, factors),
        _ => sum,
    }
}
