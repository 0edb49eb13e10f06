//! Many rows, for forms without dot products of four bytes.

use prefixcache_cpu::ByteLanes;

use super::codes::{has_signs, most_pairs, products};
use super::panel::{Packed, Panel, VECTORS};
use super::scaling::{Factors, headers};
use super::unpacked::Unpacked;
use crate::int8::activations::{ActivationBlock, QuantizedRows};
use crate::int8::tiles::TILE;
use crate::panel::{PANEL, Sums};

impl<P: Packed, L: ByteLanes> Panel<P, L> {
    /// Multiplies it with whole tiles of rows: both vectors of a unit share what is loaded of x, and rows what is loaded
    /// of the weight.
    #[inline(always)]
    pub(super) fn multiply_tiles(&self, x: &QuantizedRows, first: usize, sums: &mut [Sums]) {
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
                let at = layout.header() + b * layout.block();
                let x = row.wrapping_add(d * layout.blocks + b);
                // SAFETY: the unit has such a block, and each row as many blocks.
                unsafe {
                    let block = UnpackedBlock::<P, L>::new(lanes, unit, at, &headers);
                    if const { tile_rows::<P, L>() == 2 } {
                        block.add_all::<2>(x, stride, sums, tile);
                    } else {
                        block.add_all::<4>(x, stride, sums, tile);
                    }
                }
            }
        }
    }
}

/// The numbers of a block of 16 outputs, to be multiplied with many rows.
struct UnpackedBlock<P, L: ByteLanes> {
    lanes: L,
    /// Eight, which the compiler is not to know: unrolled, most sums would not stay in registers.
    words: usize,
    vectors: [Unpacked<P, L>; VECTORS],
    /// Of codes that have signs.
    magnitudes: [[L::I; 8]; VECTORS],
}

impl<P: Packed, L: ByteLanes> UnpackedBlock<P, L> {
    /// # Safety
    /// The unit has codes at `at`; `headers` are its own.
    #[inline(always)]
    unsafe fn new(lanes: L, unit: *const u8, at: usize, headers: &[(L::F, L::F); VECTORS]) -> Self {
        // SAFETY: the caller's promise is the same; a form with tiles has as many vectors.
        let vectors: [Unpacked<P, L>; VECTORS] = unsafe {
            [
                Unpacked::new(lanes, unit, at, 0, headers[0]),
                Unpacked::new(lanes, unit, at, TILE / VECTORS, headers[1]),
            ]
        };
        let mut magnitudes = [vectors[0].codes, vectors[1].codes];
        if const { has_signs::<P, L>() } {
            for magnitudes in magnitudes.as_flattened_mut() {
                *magnitudes = lanes.magnitudes(*magnitudes);
            }
        }
        Self { lanes, words: std::hint::black_box(8), vectors, magnitudes }
    }

    /// Adds the products with rows in tiles of `R`, of which `x` is the first one's block, to their sums of unit `tile`.
    ///
    /// # Safety
    /// Each of the rows has a block, `stride` blocks after that of the row before it.
    #[inline(always)]
    unsafe fn add_all<const R: usize>(
        &self,
        mut x: *const ActivationBlock,
        stride: usize,
        sums: &mut [Sums],
        tile: usize,
    ) {
        for sums in sums.as_chunks_mut::<R>().0 {
            // SAFETY: the caller's promise is the same.
            unsafe { self.add_rows(x, stride, sums, tile) };
            x = x.wrapping_add(R * stride);
        }
    }

    /// Adds the products with `R` rows.
    ///
    /// # Safety
    /// As of [`Self::add_all`].
    #[inline(always)]
    unsafe fn add_rows<const R: usize>(
        &self,
        x: *const ActivationBlock,
        stride: usize,
        sums: &mut [Sums; R],
        tile: usize,
    ) {
        let (lanes, run) = (self.lanes, const { run::<P>() });
        // Unrolled it keeps sums of pairs of half the words in registers.
        let count = if run == 4 { 8 } else { self.words };
        let mut words = [x.cast::<i32>(); R];
        for (r, words) in words.iter_mut().enumerate() {
            *words = x.wrapping_add(r * stride).cast();
        }
        let [mut totals, mut pairs] = [[[lanes.splat(0); VECTORS]; R]; 2];
        let mut step = 0;
        loop {
            for i in [step, step + 1] {
                for r in 0..R {
                    // SAFETY: a block begins with its codes, which are eight words.
                    let x = lanes.splat(unsafe { words[r].add(i).read_unaligned() });
                    for (v, vector) in self.vectors.iter().enumerate() {
                        // SAFETY: there are eight words here too.
                        let more = unsafe {
                            let codes = *vector.codes.as_ptr().add(i);
                            let magnitudes = match const { has_signs::<P, L>() } {
                                true => *self.magnitudes[v].as_ptr().add(i),
                                false => codes,
                            };
                            products::<P, L>(lanes, codes, magnitudes, x)
                        };
                        if run == 1 {
                            let sum = vector.scaling.sum(lanes, more, 0);
                            totals[r][v] = lanes.add(totals[r][v], sum);
                        } else {
                            pairs[r][v] = lanes.add_pairs(pairs[r][v], more);
                        }
                    }
                }
            }
            if matches!(run, 2 | 4) && (step + 2) % run == 0 {
                for (totals, pairs) in totals.iter_mut().zip(&mut pairs) {
                    for (v, vector) in self.vectors.iter().enumerate() {
                        let sum = vector.scaling.sum(lanes, pairs[v], step / 4);
                        totals[v] = lanes.add(totals[v], sum);
                        pairs[v] = lanes.splat(0);
                    }
                }
            }
            step += 2;
            if step == count {
                break;
            }
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the block.
            let x = Factors::new(lanes, unsafe { &*x.wrapping_add(r * stride) });
            for (v, vector) in self.vectors.iter().enumerate() {
                let sum = match run {
                    8 => vector.scaling.sum(lanes, pairs[r][v], 0),
                    _ => totals[r][v],
                };
                let sum = vector.scaling.less_offset(lanes, sum, &x);
                let to = sums[tile * TILE + v * L::LANES..][..L::LANES].as_mut_ptr();
                // SAFETY: the slice holds LANES numbers.
                unsafe {
                    let acc = lanes.load_f32(to);
                    lanes.store(to, vector.scaling.add(lanes, lanes.to_f32(sum), &x, acc));
                }
            }
        }
    }
}

/// Words of four steps whose products with a row are summed in pairs before they are multiplied with a factor, or
/// before 16 bits no longer hold them.
const fn run<P: Packed>() -> usize {
    match most_pairs(P::LAYOUT.dot_bits) {
        8 if P::LAYOUT.halves() => 4,
        most => most,
    }
}

/// Rows that are multiplied at once where there are many; 0 where [`Panel::multiply_in_memory`] is as fast.
pub(super) const fn tile_rows<P: Packed, L: ByteLanes>() -> usize {
    match (P::LAYOUT.halves(), run::<P>()) {
        _ if L::DOT_OF_FOUR => 0,
        (true, 4) => 0,
        // Sums of pairs and of words both stay in registers so.
        (_, 2) => 2,
        _ => 4,
    }
}
