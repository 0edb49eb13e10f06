//! Many rows, for forms whose vectors have dot products of four bytes for all outputs of a unit.

use prefixcache_cpu::ByteLanes;

use super::panel::{Packed, Panel};
use super::scaling::{Factors, header_of};
use super::unpacked::Unpacked;
use crate::int8::activations::{ActivationBlock, QuantizedRows};
use crate::int8::tiles::{TILE, TILES};
use crate::panel::{PANEL, Sums};

/// Rows of a tile of [`Panel::multiply_wide`].
pub(super) const WIDE_ROWS: usize = 6;

impl<P: Packed, L: ByteLanes> Panel<P, L> {
    /// Multiplies it, which is as wide as any, with whole tiles of rows: its codes are unpacked once for all of them.
    #[inline(always)]
    pub(super) fn multiply_wide(&self, x: &QuantizedRows, first: usize, sums: &mut [Sums]) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        sums.fill([0.0; PANEL]);
        let (row, stride) = (x.row(first).as_ptr(), x.stride());
        for d in 0..self.depth {
            let units = self.units.wrapping_add(d * TILES * layout.unit());
            for b in 0..layout.blocks {
                let at = layout.header() + b * layout.block();
                let mut x = row.wrapping_add(d * layout.blocks + b);
                // SAFETY: the panel has four such units, each of them the block, and each row as many blocks.
                unsafe {
                    for tile in 0..TILES {
                        self.fetch_block(units.add(tile * layout.unit()), b);
                    }
                    let block = WideBlock::<P, L>::new(lanes, units, at);
                    for sums in sums.as_chunks_mut::<WIDE_ROWS>().0 {
                        block.add_rows(x, stride, sums);
                        x = x.wrapping_add(WIDE_ROWS * stride);
                    }
                }
            }
        }
    }
}

/// The numbers of a block of all outputs of a panel, to be multiplied with many rows.
struct WideBlock<P, L: ByteLanes> {
    lanes: L,
    /// Of a half of the block where halves have factors, else of all. The compiler is not to know it: unrolled, sums
    /// would not stay in registers.
    words: usize,
    vectors: [Unpacked<P, L>; TILES],
    /// Of the sums of both halves, where they have some.
    factors: [[L::F; 2]; TILES],
}

impl<P: Packed, L: ByteLanes> WideBlock<P, L> {
    /// # Safety
    /// Four units lie here, which have codes at `at`.
    #[inline(always)]
    unsafe fn new(lanes: L, units: *const u8, at: usize) -> Self {
        let layout = const { P::LAYOUT };
        let mut factors = [[lanes.splat_f32(0.0); 2]; TILES];
        // SAFETY: the caller's promise is the same.
        let vectors: [Unpacked<P, L>; TILES] = unsafe {
            let [a, b] = [units, units.add(layout.unit())];
            let [c, d] = [units.add(2 * layout.unit()), units.add(3 * layout.unit())];
            // A closure would not be inlined reliably.
            [
                Unpacked::new(lanes, a, at, 0, header_of::<P, L>(lanes, a, 0)),
                Unpacked::new(lanes, b, at, 0, header_of::<P, L>(lanes, b, 0)),
                Unpacked::new(lanes, c, at, 0, header_of::<P, L>(lanes, c, 0)),
                Unpacked::new(lanes, d, at, 0, header_of::<P, L>(lanes, d, 0)),
            ]
        };
        for (factors, vector) in factors.iter_mut().zip(&vectors) {
            for (factor, &of_half) in factors.iter_mut().zip(&vector.scaling.factors) {
                *factor = lanes.to_f32(of_half);
            }
        }
        let words = std::hint::black_box(if layout.halves() { 4 } else { 8 });
        Self { lanes, words, vectors, factors }
    }

    /// Adds the products with `R` rows, of which `x` is the first one's block, to their sums.
    ///
    /// # Safety
    /// Each of the rows has a block, `stride` blocks after that of the row before it.
    #[inline(always)]
    unsafe fn add_rows<const R: usize>(
        &self,
        x: *const ActivationBlock,
        stride: usize,
        sums: &mut [Sums; R],
    ) {
        let (lanes, halves) = (self.lanes, const { P::LAYOUT.halves() });
        let mut rows = [x; R];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = x.wrapping_add(r * stride);
        }
        let mut totals = [[lanes.splat_f32(0.0); TILES]; R];
        for half in 0..if halves { 2 } else { 1 } {
            // SAFETY: the caller's promise is the same.
            let of_half = unsafe { self.code_sums(&rows, half) };
            for (totals, of_half) in totals.iter_mut().zip(&of_half) {
                for (w, total) in totals.iter_mut().enumerate() {
                    let sum = lanes.to_f32(of_half[w]);
                    // The sum of a half times its factor is below 2^24, so that the sum of both is rounded once.
                    *total = match (halves, half) {
                        (false, _) => sum,
                        (true, 0) => lanes.mul_f32(sum, self.factors[w][0]),
                        (true, _) => lanes.mul_add(sum, self.factors[w][1], *total),
                    };
                }
            }
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the block.
            let x = Factors::new(lanes, unsafe { &*rows[r] });
            for (w, vector) in self.vectors.iter().enumerate() {
                let to = sums[w * TILE..][..TILE].as_mut_ptr();
                // SAFETY: the slice holds the numbers of a vector.
                unsafe {
                    let acc = lanes.load_f32(to);
                    lanes.store(to, vector.scaling.add(lanes, totals[r][w], &x, acc));
                }
            }
        }
    }

    /// The sums of the codes less their offset, times the codes of x: those of half `half`, where halves have factors.
    ///
    /// # Safety
    /// Each of the rows is a block.
    #[inline(always)]
    unsafe fn code_sums<const R: usize>(
        &self,
        rows: &[*const ActivationBlock; R],
        half: usize,
    ) -> [[L::I; TILES]; R] {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        let mut sums = [[lanes.splat(0); TILES]; R];
        if layout.offset != 0 {
            for (sums, &row) in sums.iter_mut().zip(rows) {
                // SAFETY: the caller vouches for the block.
                let x = unsafe { &*row };
                let sum = match layout.halves() {
                    true => x.minus_halves[half].into(),
                    false => x.minus_sum,
                };
                *sums = [lanes.splat(sum.wrapping_mul(layout.offset)); TILES];
            }
        }
        let mut word = half * self.words;
        let end = word + self.words;
        loop {
            let mut codes = [lanes.splat(0); TILES];
            for (codes, vector) in codes.iter_mut().zip(&self.vectors) {
                // SAFETY: a block has eight words.
                *codes = unsafe { *vector.codes.as_ptr().add(word) };
            }
            for (sums, &row) in sums.iter_mut().zip(rows) {
                // SAFETY: a block begins with its codes, which are eight words.
                let x = lanes.splat(unsafe { row.cast::<i32>().add(word).read_unaligned() });
                for (sum, &codes) in sums.iter_mut().zip(&codes) {
                    *sum = lanes.dot(*sum, codes, x);
                }
            }
            word += 1;
            if word == end {
                return sums;
            }
        }
    }
}
