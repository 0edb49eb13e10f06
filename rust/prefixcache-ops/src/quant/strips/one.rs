//! One row: codes are multiplied where they stand in their words, so that three shifts of four are saved.

use std::marker::PhantomData;

use prefixcache_cpu::memory::prefetch;
use prefixcache_cpu::{Kernel, Lanes};

use super::{Columns, Few, prefetch_group, strip_of, strip_width};
use crate::panel::Sums;
use crate::quant::blocks::{Format, GROUP, Scales};
use crate::quant::kernels::{AHEAD, Product, for_pairs, with_field};
use crate::quant::layout::Layout;

/// Whether one row is multiplied without most shifts: see [`PLACES`]. It is not faster for the other formats, nor where
/// vectors are wide and a shuffle makes numbers of codes.
pub(super) const fn has_one(format: Format) -> bool {
    format.is_common() || matches!(format, Format::Q5_0 | Format::Q2K)
}
const fn has_places<F: Layout, L: Lanes>() -> bool {
    L::LANES == 8 || !matches!(F::BITS, 4 | 5)
}

/// Places of a word that codes are taken from without a shift: the lowest bits, those above them, and so on. A code
/// at the second is 2^bits times itself, and its scale as much smaller: both are exact.
const PLACES: usize = 4;

/// Scales of codes by the place that they are taken from: of the first 16 of the depth, and of the others where those
/// have scales of their own.
type PlaceScales<V> = [[[V; 4]; PLACES]; 2];

/// Words of a group of which codes are taken in the order of the depth, shifted down by `by` bits.
struct Shifted<V> {
    words: [V; 4],
    by: u32,
}

impl<L: Lanes, F: Layout> Columns<L, F, 4> {
    /// Halves of a group that have scales of their own.
    const HALVES: usize = match F::SCALES {
        Scales::Sixteens | Scales::SixteenMinimums => 2,
        _ => 1,
    };

    /// Places that are used: as many as save more shifts than they take products.
    const USED: u32 = if F::BITS > 4 { 3 } else { 4 };

    /// Writes the scales of all places.
    #[inline(always)]
    fn write_scales(&self, to: &mut PlaceScales<L::V>) {
        for (to, scales) in to.iter_mut().zip(&self.scales).take(Self::HALVES) {
            for place in 0..Self::USED {
                let down = self.lanes.splat(1.0 / (1_u32 << (F::BITS * place)) as f32);
                for (to, &scale) in to[place as usize].iter_mut().zip(scales) {
                    *to = self.lanes.mul(scale, down);
                }
            }
        }
    }

    /// Adds the products of the group with numbers of a row to the sums.
    ///
    /// # Safety
    /// The row has 32 numbers from `x` on.
    #[inline(always)]
    unsafe fn add_row(&self, scales: &PlaceScales<L::V>, x: *const f32, sums: &mut [L::V; 4]) {
        for first in (0..GROUP).step_by(F::PERIOD) {
            let words = *sums;
            let mut shifted = Shifted { words, by: 0 };
            for_pairs!(PAIR => {
                if const { 2 * PAIR < F::PERIOD } {
                    // SAFETY: the group and the row have these numbers.
                    unsafe {
                        self.add_depth(first, 2 * PAIR, scales, x, &mut shifted, sums);
                        self.add_depth(first, 2 * PAIR + 1, scales, x, &mut shifted, sums);
                    }
                }
            });
        }
    }

    /// Adds the products at depth `first + depth`, of which whole words of codes come before `first`.
    ///
    /// # Safety
    /// The group and the row from `x` on have such numbers.
    #[inline(always)]
    unsafe fn add_depth(
        &self,
        first: usize,
        depth: usize,
        scales: &PlaceScales<L::V>,
        x: *const f32,
        shifted: &mut Shifted<L::V>,
        sums: &mut [L::V; 4],
    ) {
        let lanes = self.lanes;
        // SAFETY: the row has the number.
        let x = unsafe { &*x.add(first + depth) };
        let bit = F::BITS as usize * depth;
        let at = (bit % 32) as u32;
        if at + F::BITS > 32 {
            // There are no registers for two words of all columns.
            for (c, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the group has these numbers.
                let number = unsafe { self.number(c, first, depth) };
                *sum = lanes.in_register(lanes.mul_add(number, lanes.splat(*x), *sum));
            }
            return;
        }
        if at < F::BITS {
            let word = (first * F::BITS as usize + bit) / 32 * strip_width::<L>();
            for (c, to) in shifted.words.iter_mut().enumerate() {
                let at = self.codes.wrapping_add(word + c * L::LANES);
                prefetch(at.wrapping_byte_add(AHEAD));
                // SAFETY: the stream has these words.
                *to = lanes.in_register(unsafe { lanes.load(at.cast()) });
            }
            shifted.by = 0;
        }
        let place = at / F::BITS % Self::USED;
        let by = at - F::BITS * place;
        if by > shifted.by {
            for words in &mut shifted.words {
                let moved = lanes.join(*words, lanes.splat(0.0), by - shifted.by);
                *words = lanes.in_register(moved);
            }
            shifted.by = by;
        }
        let half = depth / 16 % Self::HALVES;
        let (scales, offsets) = (&scales[half][place as usize], self.offsets[half]);
        *sums = with_field!(F::BITS, BITS =>
            lanes.add_fields::<BITS>(*sums, shifted.words, F::BITS * place, scales, offsets, x));
    }
}

/// A panel times one row.
pub(super) struct One<'a, F> {
    pub(super) product: &'a Product<'a, f32>,
    pub(super) sums: &'a mut Sums,
    pub(super) layout: PhantomData<F>,
}

impl<F: Layout> Kernel for One<'_, F> {
    type Output = ();

    const HAS_BF16: bool = false;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        if const { !L::LANE_IS_COLUMN } {
            unreachable!("laid out for another form");
        }
        if const { !has_places::<F, L>() } {
            return Few::<F, 1, 4>::new(self.product, std::slice::from_mut(self.sums)).run(lanes);
        }
        let Product { panel, inputs, used, rows } = self.product;
        for start in (0..*used).step_by(4 * L::LANES) {
            let strip = strip_of::<F, L>(*panel, *inputs, start);
            let mut x = rows.words(0, 0).cast::<f32>();
            let mut sums = [lanes.splat(0.0); 4];
            let mut scales = [[sums; PLACES]; 2];
            let column = start % strip_width::<L>();
            for group in 0..inputs / GROUP {
                prefetch_group::<F, L>(strip, group);
                // SAFETY: the strip has the group, and the row its numbers.
                unsafe {
                    let columns = Columns::<L, F, 4>::new(lanes, strip, group, column);
                    columns.write_scales(&mut scales);
                    columns.add_row(&scales, x, &mut sums);
                    x = x.add(GROUP);
                }
            }
            for (to, sum) in self.sums[start..].chunks_exact_mut(L::LANES).zip(sums) {
                // SAFETY: the chunk holds a vector.
                unsafe { lanes.store(to.as_mut_ptr(), sum) };
            }
        }
    }
}
