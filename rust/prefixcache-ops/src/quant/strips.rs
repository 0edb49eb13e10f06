//! Quantized weights with a column in each lane: for forms whose products are those of `f32`.
//!
//! A panel is strips of four vectors of columns, one after the other. A column's codes of a group are
//! one stream of bits, in the order of the depth; word w of all columns is a line of words. So a
//! vector of numbers takes a shift, a mask, a conversion and a product, and nothing is shuffled. For one row
//! three shifts of four are saved: see [`one`].
//!
//! Codes are stored unsigned: a number is `scale * code + offset`, where the offset of a format with
//! signed codes is `-scale * 2^(bits - 1)`, and that of one with a table the scale times its least number. Both products are exact and the sum is rounded once, so the
//! number is the same but for the sign of a zero, which no sum shows.

mod one;

use std::marker::PhantomData;
use std::ops::Range;

use prefixcache_cpu::memory::prefetch;
use prefixcache_cpu::{Element, Form, Kernel, Lanes, Rows};

use one::{One, has_one};

use super::blocks::{BlockScales, Format, GROUP};
use super::kernels::{self, AHEAD, Multiply, Product, Store, TakeLines, for_pairs, numbers};
use super::layout::{CodeAt, Layout, codes_at, pack_scales};
use crate::panel::{Line, PANEL, Sums};

/// Columns of a strip.
const fn strip_width<L: Lanes>() -> usize {
    4 * L::LANES
}

/// Columns of a strip where the form lays weights of such a layer out in strips.
pub(super) fn strip_of_form<E: Element>(form: Form) -> Option<usize> {
    struct Asked<E>(PhantomData<E>);
    impl<E: Element> Kernel for Asked<E> {
        type Output = Option<usize>;

        const HAS_BF16: bool = E::PER_WORD > 1;

        fn run<L: Lanes>(self, _: L) -> Option<usize> {
            L::LANE_IS_COLUMN.then_some(strip_width::<L>())
        }
    }
    form.run(Asked(PhantomData::<E>))
}

/// The most rows that are multiplied in registers: with more, to store what is dequantized and to load it
/// for a few rows at a time takes less time. What has eight bits is dequantized fastest.
pub fn max_few(format: Format, strip: usize) -> usize {
    match format {
        Format::Q8_0 if strip < PANEL => 8,
        _ if format.is_common() => 6,
        _ => 4,
    }
}

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Lays out the blocks of the rows from `first` on, as many as there are in a panel.
pub(super) fn pack_panel<F: Layout>(
    blocks: Rows<'_, u8>,
    first: usize,
    strip_columns: usize,
    to: &mut [u32],
) {
    let used = PANEL.min(blocks.rows() - first);
    let strip_words = to.len() / (PANEL / strip_columns);
    for (column, row) in (0..used).zip(first..) {
        let strip = &mut to[column / strip_columns * strip_words..][..strip_words];
        let blocks = blocks.row(row).chunks_exact(F::FORMAT.bytes());
        for (block, to) in blocks.zip(strip.chunks_exact_mut(F::BLOCK_BYTES * strip_columns / 4)) {
            let scales = BlockScales::read(F::FORMAT, block);
            pack_scales::<F>(&scales, strip_columns, column % strip_columns, to);
            for group in 0..F::GROUPS {
                let lines = &mut to[codes_at::<F>(strip_columns, group) / 4..];
                let words = stream::<F>(F::FORMAT.codes(block, group));
                for (word, bits) in words.into_iter().take(F::BITS as usize).enumerate() {
                    lines[word * strip_columns + column % strip_columns] = bits;
                }
            }
        }
    }
}

/// The codes of a group, unsigned, without the bits between them: `F::BITS` words.
#[inline(always)]
fn stream<F: Layout>(codes: [u64; GROUP / 8]) -> [u32; 8] {
    const BYTES: u64 = 0x00ff_00ff_00ff_00ff;
    const HALVES: u64 = 0x0000_ffff_0000_ffff;
    // From codes as the file has them: those that it has in two's complement.
    let unsigned = u64::from_le_bytes([F::ZERO ^ F::FORMAT.zero(); 8]);
    let mut bytes = [0; 40];
    for (i, codes) in codes.into_iter().enumerate() {
        let codes = codes ^ unsigned;
        let twos = codes & BYTES | (codes >> 8 & BYTES) << F::BITS;
        let fours = twos & HALVES | (twos >> 16 & HALVES) << (2 * F::BITS);
        let eight = fours & u64::from(u32::MAX) | fours >> 32 << (4 * F::BITS);
        bytes[i * F::BITS as usize..][..8].copy_from_slice(&eight.to_le_bytes());
    }
    std::array::from_fn(|i| u32::from_le_bytes(*bytes[4 * i..].first_chunk().expect("40 bytes")))
}

/// Where the code of a column of a strip starts in its group.
#[inline(always)]
pub(super) fn code_at<F: Layout>(strip: usize, column: usize, depth: usize) -> CodeAt {
    let bit = F::BITS as usize * depth;
    CodeAt {
        word: bit / 32 * strip + column,
        bit: (bit % 32) as u32,
        line: strip,
        inverted: F::SIGNED.into(),
    }
}

/// `C` vectors of columns of a group of a strip.
struct Columns<L: Lanes, F, const C: usize> {
    lanes: L,
    codes: *const u32,
    /// What codes are multiplied by: the first 16 of the depth, and the others.
    scales: [[L::V; C]; 2],
    /// What is added to the products, in the same order.
    offsets: [[L::V; C]; 2],
    layout: PhantomData<F>,
}

impl<L: Lanes, F: Layout, const C: usize> Columns<L, F, C> {
    /// The columns from `column` on, a multiple of the vector's lanes.
    ///
    /// # Safety
    /// The strip has such a group and columns.
    #[inline(always)]
    unsafe fn new(lanes: L, strip: *const u8, group: usize, column: usize) -> Self {
        let width = const { strip_width::<L>() };
        let (header, at) = F::group_at(width, group);
        let mut scales = [[lanes.splat(0.0); C]; 2];
        let mut offsets = scales;
        let zero = lanes.splat(match F::TABLE {
            Some(table) => table.least.into(),
            None => -f32::from(F::ZERO),
        });
        for c in 0..C {
            let column = column + c * L::LANES;
            // SAFETY: inside the headers of these columns.
            let [of_halves, added] = unsafe {
                let (header, group) = (strip.add(header), strip.add(at));
                kernels::scales::<F, L>(lanes, header, group, width, column)
            };
            for half in 0..2 {
                scales[half][c] = of_halves[half];
                offsets[half][c] = match F::SCALES.have_minimums() {
                    true => added[half],
                    false => lanes.mul(of_halves[half], zero),
                };
            }
        }
        // SAFETY: inside the group.
        let codes = unsafe { strip.add(at + F::GROUP_HEADER * width).cast::<u32>().add(column) };
        Self { lanes, codes, scales, offsets, layout: PhantomData }
    }

    /// Dequantizes the group: in a loop over as many numbers as fill whole words, so that shifts are by
    /// constants.
    ///
    /// # Safety
    /// `take` has the lines of a group.
    #[inline(always)]
    unsafe fn each_line<E: Element>(&self, take: &mut impl TakeLines<L, C>) {
        for first in (0..GROUP).step_by(F::PERIOD) {
            for_pairs!(PAIR => {
                if const { 2 * PAIR < F::PERIOD } {
                    // SAFETY: the caller's promise.
                    unsafe { self.pair::<E>(first, 2 * PAIR, take) };
                }
            });
        }
    }

    /// Dequantizes the numbers at depth `first + depth` and after it.
    ///
    /// # Safety
    /// As [`Self::each_line`], and there are such numbers.
    #[inline(always)]
    unsafe fn pair<E: Element>(&self, first: usize, depth: usize, take: &mut impl TakeLines<L, C>) {
        let mut words = [self.lanes.splat(0.0); C];
        let mut more = words;
        for c in 0..C {
            // SAFETY: the stream has 32 codes.
            let (a, b) =
                unsafe { (self.number(c, first, depth), self.number(c, first, depth + 1)) };
            let (even, odd) = E::column_lines(self.lanes, a, b);
            words[c] = even;
            if let Some(odd) = odd {
                more[c] = odd;
            }
        }
        let line = (first + depth) / E::PER_WORD;
        // SAFETY: `take` has these lines.
        unsafe {
            take.take(line, words);
            if E::PER_WORD == 1 {
                take.take(line + 1, more);
            }
        }
    }

    /// The numbers of vector `c` at depth `first + depth`, of which whole words of codes come before `first`.
    ///
    /// # Safety
    /// There are such numbers.
    #[inline(always)]
    unsafe fn number(&self, c: usize, first: usize, depth: usize) -> L::V {
        let lanes = self.lanes;
        let CodeAt { word, bit: at, line, .. } =
            code_at::<F>(strip_width::<L>(), c * L::LANES, depth);
        let word = first * F::BITS as usize / 32 * line + word;
        if at < F::BITS {
            prefetch(self.codes.wrapping_byte_add(AHEAD).wrapping_add(word));
        }
        // SAFETY: the stream has this code, so the words with its bits.
        let code = unsafe { numbers::<F, L>(lanes, self.codes.add(word), line, at, false) };
        let half = depth / 16;
        lanes.mul_add(code, self.scales[half][c], self.offsets[half][c])
    }
}

/// A panel times the rows of a task, `H` of them and `C` vectors of columns of eight at a time.
struct Few<'a, F, const H: usize, const C: usize> {
    product: &'a Product<'a, f32>,
    sums: &'a mut [Sums],
    layout: PhantomData<F>,
}

impl Product<'_, f32> {
    /// Writes the sums of the panel, which is laid out in strips, and its rows.
    pub(super) fn multiply_strips<F: Layout>(&self, form: Form, sums: &mut [Sums]) {
        // As many sums as there are registers for, with the scales of the columns.
        match sums.len() {
            0 => {}
            1 if const { has_one(F::FORMAT) } => {
                form.run(One::<F> { product: self, sums: &mut sums[0], layout: PhantomData })
            }
            1 => form.run(Few::<F, 1, 4>::new(self, sums)),
            2 if const { F::FORMAT.is_common() } => form.run(Few::<F, 2, 2>::new(self, sums)),
            5..=6 if const { F::FORMAT.is_common() } => {
                form.run(Few::<F, 6, 1>::new(self, sums));
            }
            7.. => {
                let (four, others) = sums.split_at_mut(4);
                self.multiply_strips::<F>(form, four);
                let mut rows = self.rows;
                rows.first += four.len();
                Product { rows, ..*self }.multiply_strips::<F>(form, others);
            }
            _ => form.run(Few::<F, 4, 2>::new(self, sums)),
        }
    }
}

impl<'a, F, const H: usize, const C: usize> Few<'a, F, H, C> {
    fn new(product: &'a Product<'a, f32>, sums: &'a mut [Sums]) -> Self {
        Self { product, sums, layout: PhantomData }
    }
}

impl<F: Layout, const H: usize, const C: usize> Kernel for Few<'_, F, H, C> {
    type Output = ();

    const HAS_BF16: bool = false;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        if const { !L::LANE_IS_COLUMN } {
            // Not compiled for the forms that it is not run with.
            unreachable!("laid out for another form");
        }
        // There are twice as many registers of vectors that are twice as wide.
        match const { (L::LANES, C) } {
            (16, 1) => self.multiply::<L, 2>(lanes),
            (16, 2) => self.multiply::<L, 4>(lanes),
            _ => self.multiply::<L, C>(lanes),
        }
    }
}

impl<F: Layout, const H: usize, const N: usize> Few<'_, F, H, N> {
    /// Writes the sums, those of `C` vectors at a time.
    #[inline(always)]
    fn multiply<L: Lanes, const C: usize>(self, lanes: L) {
        let product = self.product;
        for column in (0..product.used).step_by(C * L::LANES) {
            let sums = product.tile::<F, L, H, C>(lanes, column, self.sums.len());
            for (to, sums) in self.sums.iter_mut().zip(&sums) {
                let to = to[column..][..C * L::LANES].chunks_exact_mut(L::LANES);
                for (to, &sum) in to.zip(sums) {
                    // SAFETY: the chunk holds a vector.
                    unsafe { lanes.store(to.as_mut_ptr(), sum) };
                }
            }
        }
    }
}

impl Product<'_, f32> {
    /// The sums of `H` rows and `C` vectors from `column` on. Rows that there are not, of `count`, are the
    /// last one, computed for nothing.
    #[inline(always)]
    fn tile<F: Layout, L: Lanes, const H: usize, const C: usize>(
        &self,
        lanes: L,
        column: usize,
        count: usize,
    ) -> [[L::V; C]; H] {
        let strip = strip_of::<F, L>(self.panel, self.inputs, column);
        let mut multiply = Multiply::<L, f32, H, C> {
            lanes,
            rows: std::array::from_fn(|r| self.rows.words(r.min(count - 1), 0)),
            sums: [[lanes.splat(0.0); C]; H],
            element: PhantomData,
        };
        for group in 0..self.inputs / GROUP {
            if column.is_multiple_of(strip_width::<L>()) {
                prefetch_group::<F, L>(strip, group);
            }
            // SAFETY: the strip has the group, the rows its words.
            unsafe {
                Columns::<L, F, C>::new(lanes, strip, group, column % strip_width::<L>())
                    .each_line::<f32>(&mut multiply);
                for row in &mut multiply.rows {
                    *row = row.add(GROUP);
                }
            }
        }
        multiply.sums
    }
}

/// The strip with a column of a panel.
#[inline(always)]
fn strip_of<F: Layout, L: Lanes>(panel: *const u8, inputs: usize, column: usize) -> *const u8 {
    let blocks = inputs / F::FORMAT.block();
    panel.wrapping_add(column / strip_width::<L>() * strip_width::<L>() * blocks * F::BLOCK_BYTES)
}

/// Asks for the scales of a group before they are read: it takes too many instructions to dequantize one for loads
/// alone to keep enough cache lines on their way. Codes are asked for word by word: all at once they would fill what
/// the first cache has for lines on their way, and the loads of this group would wait.
#[inline(always)]
fn prefetch_group<F: Layout, L: Lanes>(strip: *const u8, group: usize) {
    let width = const { strip_width::<L>() };
    let (header, at) = F::group_at(width, group);
    let start = if F::GROUPS == 1 { header } else { at };
    let bytes = codes_at::<F>(width, group) - start;
    for line in 0..bytes.div_ceil(CACHE_LINE) {
        prefetch(strip.wrapping_add(start + AHEAD + line * CACHE_LINE));
    }
}

/// Dequantizes groups of the depth.
pub(super) struct Dequantize<'a, E, F> {
    pub(super) panel: *const u8,
    pub(super) inputs: usize,
    pub(super) groups: Range<usize>,
    pub(super) to: &'a mut [Line],
    pub(super) layout: PhantomData<(E, F)>,
}

impl<E: Element, F: Layout> Kernel for Dequantize<'_, E, F> {
    type Output = ();

    const HAS_BF16: bool = E::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        if const { !L::LANE_IS_COLUMN } {
            unreachable!("laid out for another form");
        }
        let lines = self.to.chunks_exact_mut(GROUP / E::PER_WORD);
        for (group, lines) in self.groups.zip(lines) {
            for column in (0..PANEL).step_by(L::LANES) {
                let strip = strip_of::<F, L>(self.panel, self.inputs, column);
                if column.is_multiple_of(strip_width::<L>()) {
                    prefetch_group::<F, L>(strip, group);
                }
                // SAFETY: the strip has the group, and `lines` are its lines, of 64 columns.
                unsafe {
                    let to = lines.as_mut_ptr().cast::<u32>().add(column);
                    Columns::<L, F, 1>::new(lanes, strip, group, column % strip_width::<L>())
                        .each_line::<E>(&mut Store { lanes, to });
                }
            }
        }
    }
}
