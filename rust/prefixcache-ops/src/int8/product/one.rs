//! One row, for forms without dot products of four bytes.

use prefixcache_cpu::ByteLanes;

use super::codes::{four_steps, most_pairs, products_of};
use super::panel::{Packed, Panel, VECTORS};
use super::scaling::{Factors, Scaling, half_factors, headers};
use crate::int8::activations::ActivationBlock;
use crate::int8::tiles::TILE;
use crate::panel::Sums;

impl<P: Packed, L: ByteLanes> Panel<P, L> {
    /// Multiplies it with one row, whose numbers are loaded once for all vectors of a unit.
    #[inline(always)]
    pub(super) fn multiply_one(&self, x: &[ActivationBlock], sums: &mut Sums) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        sums.fill(0.0);
        for number in 0..self.depth * self.width {
            let (d, tile) = (number / self.width, number % self.width);
            let unit = self.units.wrapping_add(number * layout.unit());
            let to = sums[tile * TILE..][..TILE].as_mut_ptr();
            let mut acc = [lanes.splat_f32(0.0); VECTORS];
            // SAFETY: the panel has the unit with its blocks, and its sums.
            unsafe {
                let headers = headers::<P, L>(lanes, unit);
                for (v, acc) in acc.iter_mut().enumerate().take(TILE / L::LANES) {
                    *acc = lanes.load_f32(to.add(v * L::LANES));
                }
                for (b, x) in x[d * layout.blocks..][..layout.blocks].iter().enumerate() {
                    self.fetch_block(unit, b);
                    let at = layout.header() + b * layout.block();
                    add_one::<P, L>(lanes, unit, at, &headers, x, &mut acc);
                }
                for (v, &acc) in acc.iter().enumerate().take(TILE / L::LANES) {
                    lanes.store(to.add(v * L::LANES), acc);
                }
            }
        }
    }
}

/// Adds the products of a unit's block and one row to the sums of the unit's vectors.
///
/// # Safety
/// The unit has codes at `at`; `headers` are its own.
#[inline(always)]
unsafe fn add_one<P: Packed, L: ByteLanes>(
    lanes: L,
    unit: *const u8,
    at: usize,
    headers: &[(L::F, L::F); VECTORS],
    x: &ActivationBlock,
    acc: &mut [L::F; VECTORS],
) {
    let (halves, most) = const { (P::LAYOUT.halves(), most_pairs(P::LAYOUT.dot_bits)) };
    let words = x.codes.as_ptr().cast::<i32>();
    let mut in_pairs = [[lanes.splat(0x0001_0001); 2]; VECTORS];
    let [mut high, mut sums, mut low_pairs, mut upper_pairs] = [[lanes.splat(0); VECTORS]; 4];
    // SAFETY: the caller vouches for the unit, whose parts these are; a block of x has eight words.
    unsafe {
        for (v, in_pairs) in in_pairs.iter_mut().enumerate().take(TILE / L::LANES) {
            if halves {
                let [first, second] = half_factors::<P, L>(lanes, unit, at, v * L::LANES).0;
                *in_pairs = [lanes.pair(first, first), lanes.pair(second, second)];
            }
        }
        for g in 0..4 {
            let x_low = lanes.splat(words.add(g).read_unaligned());
            let x_upper = lanes.splat(words.add(4 + g).read_unaligned());
            for v in 0..TILE / L::LANES {
                let from = unit.add(at + 4 * v * L::LANES);
                let (low, upper) = four_steps::<P, L>(lanes, from, g, &mut high[v]);
                let low = products_of::<P, L>(lanes, low, x_low);
                let upper = products_of::<P, L>(lanes, upper, x_upper);
                if g % most == 0 {
                    (low_pairs[v], upper_pairs[v]) = (low, upper);
                } else {
                    low_pairs[v] = lanes.add_pairs(low_pairs[v], low);
                    upper_pairs[v] = lanes.add_pairs(upper_pairs[v], upper);
                }
                if g < 3 && (g + 1) % most > 0 {
                    continue;
                }
                if !halves && most == 8 {
                    let both = lanes.add_pairs(low_pairs[v], upper_pairs[v]);
                    sums[v] = lanes.dot_pairs(both, in_pairs[v][0]);
                } else {
                    let low = lanes.dot_pairs(low_pairs[v], in_pairs[v][0]);
                    let upper = lanes.dot_pairs(upper_pairs[v], in_pairs[v][1]);
                    sums[v] = lanes.add(sums[v], lanes.add(low, upper));
                }
            }
        }
        let x = Factors::new(lanes, x);
        for v in 0..TILE / L::LANES {
            let scaling = Scaling::<P, L>::new(lanes, unit, at, v * L::LANES, headers[v]);
            let sum = scaling.less_offset(lanes, sums[v], &x);
            acc[v] = scaling.add(lanes, lanes.to_f32(sum), &x, acc[v]);
        }
    }
}
