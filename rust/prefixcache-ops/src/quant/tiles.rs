//! Quantized weights in tiles of 16 columns.
//!
//! After the scales of a group come four tiles. A tile holds the codes of 16 columns as 16 streams of bits: code c of
//! stream l belongs, with e = 16 * (c % 2) + l, to column e / 2 and to depth 2 * (c / 2) + e % 2. So one
//! shift brings two codes of 8 columns to where two vectors of numbers need them, and rounding both
//! into one vector gives words of the order that a dense panel has.

use std::marker::PhantomData;
use std::ops::Range;

use prefixcache_cpu::memory::prefetch;
use prefixcache_cpu::{Bf16, Element, Form, Kernel, Lanes, Rows};

use super::blocks::{BlockScales, Format, GROUP, Scales};
use super::kernels::{self, AHEAD, Multiply, Product, Store, TakeLines, for_pairs, numbers};
use super::layout::{CodeAt, Layout, codes_at, pack_scales};
use crate::panel::{Line, PANEL, Sums};

/// Columns of a tile.
const TILE: usize = 16;

/// The most rows whose products are taken from registers. With more, dequantizing the blocks first takes
/// less time: where minimums take registers too, from three rows on.
const MAX_FEW: usize = 4;
const MAX_FEW_WITH_MORE_SCALES: usize = 2;

/// The most rows whose products with a format's blocks are taken from registers.
pub(super) const fn max_few(format: Format) -> usize {
    match format.scales() {
        Scales::Plain | Scales::PowerOfTwo | Scales::Group => MAX_FEW,
        _ => MAX_FEW_WITH_MORE_SCALES,
    }
}

/// Lays out the blocks of the rows from `first` on, as many as there are in a panel.
pub(super) fn pack_panel<F: Layout>(blocks: Rows<'_, u8>, first: usize, to: &mut [u32]) {
    let used = PANEL.min(blocks.rows() - first);
    for (at, to) in to.chunks_exact_mut(F::BLOCK_BYTES * PANEL / 4).enumerate() {
        let block = |column: usize| {
            &blocks.row(first + column)[at * F::FORMAT.bytes()..][..F::FORMAT.bytes()]
        };
        for column in 0..used {
            let scales = BlockScales::read(F::FORMAT, block(column));
            pack_scales::<F>(&scales, PANEL, column, to);
        }
        for start in (0..used).step_by(TILE) {
            for group in 0..F::GROUPS {
                let tile = codes_at::<F>(PANEL, group);
                let tile = tile / 4 + start * F::BITS as usize;
                let codes = tile_codes::<F>(start..used.min(start + TILE), group, block);
                pack_codes::<F>(&codes, &mut to[tile..][..TILE * F::BITS as usize]);
            }
        }
    }
}

/// Eight codes of each column of a tile, four times.
type TileCodes = [[u64; TILE]; GROUP / 8];

/// The codes of a group in these columns, as they lie in a stream.
#[inline(always)]
fn tile_codes<'a, F: Layout>(
    columns: Range<usize>,
    group: usize,
    block: impl Fn(usize) -> &'a [u8],
) -> TileCodes {
    // Subtracting the highest bit of a code changes this bit alone.
    let zeros = u64::from_le_bytes([F::FORMAT.zero(); 8]);
    let mut all = [[0; TILE]; GROUP / 8];
    for (i, column) in columns.enumerate() {
        let codes = F::FORMAT.codes(block(column), group);
        for (to, codes) in all.iter_mut().zip(codes) {
            to[i] = codes ^ zeros;
        }
    }
    all
}

/// Lays out the codes of a group of the depth.
#[inline(always)]
fn pack_codes<F: Layout>(codes: &TileCodes, tile: &mut [u32]) {
    /// The bytes of even depths, with room for a second code above each.
    const EVEN: u64 = 0x00ff_00ff_00ff_00ff;
    // What streams have of each eight of the depth; the streams with even depths, and the others.
    let mut parts = [[[0; TILE / 2]; 2]; GROUP / 8 + 1];
    for (parts, codes) in parts.iter_mut().zip(codes) {
        let (first, second) = codes.split_at(TILE / 2);
        for (parity, parts) in parts.iter_mut().enumerate() {
            for ((part, first), second) in parts.iter_mut().zip(first).zip(second) {
                let (first, second) = (first >> (8 * parity), second >> (8 * parity));
                *part = close_up::<F>(first & EVEN | (second & EVEN) << F::BITS);
            }
        }
    }
    let bits = 8 * F::BITS as usize;
    for (word, line) in tile.chunks_exact_mut(TILE).enumerate() {
        let (part, at) = (32 * word / bits, 32 * word % bits);
        // The bits of the next part are above those that are left of this one.
        let word = |parity: usize, i: usize| {
            let next = parts[part + 1][parity][i] << 1 << (bits - at - 1);
            (parts[part][parity][i] >> at | next) as u32
        };
        for (i, to) in line.chunks_exact_mut(2).enumerate() {
            (to[0], to[1]) = (word(0, i), word(1, i));
        }
    }
}

/// Four pairs of codes, of 16 bits each, without the zeros between them.
#[inline(always)]
fn close_up<F: Layout>(pairs: u64) -> u64 {
    let gap = 16 - 2 * F::BITS;
    let low = u64::from(u32::MAX >> (32 - 2 * F::BITS));
    let low = low | low << 32;
    let twos = pairs & low | pairs >> gap & low << (2 * F::BITS);
    let low = u64::from(u32::MAX >> (2 * gap));
    twos & low | twos >> (2 * gap) & low << (4 * F::BITS)
}

/// Where the code of a column of a panel starts in its group.
pub(super) fn code_at<F: Layout>(column: usize, depth: usize) -> CodeAt {
    let element = 2 * (column % TILE) + depth % 2;
    let bit = F::BITS * (depth / 2 * 2 + element / TILE) as u32;
    let tile = column / TILE * TILE * F::BITS as usize;
    CodeAt {
        word: tile + bit as usize / 32 * TILE + element % TILE,
        bit: bit % 32,
        line: TILE,
        inverted: 0,
    }
}

impl Product<'_, Bf16> {
    /// Writes the sums of the panel, which is laid out in tiles, and its rows.
    pub(super) fn multiply_tiles<F: Layout>(&self, form: Form, sums: &mut [Sums]) {
        match sums.len() {
            0 => {}
            1 => form.run(Few::<F, 1>::new(self, sums)),
            2 if const { max_few(F::FORMAT) == 2 || F::FORMAT.is_common() } => {
                form.run(Few::<F, 2>::new(self, sums));
            }
            _ if const { max_few(F::FORMAT) == 2 } => unreachable!("too many rows"),
            _ => form.run(Few::<F, MAX_FEW>::new(self, sums)),
        }
    }
}

/// A vector's columns of a group of the depth.
struct Columns<L: Lanes, F> {
    lanes: L,
    /// The words of the tile in which the first vector of numbers has its codes, and the second.
    codes: [*const u32; 2],
    /// What their numbers are multiplied by: for the first 16 of the depth, and the others.
    scales: [[L::V; 2]; 2],
    /// What is added where the format has minimums, in the same order.
    offsets: [[L::V; 2]; 2],
    layout: PhantomData<F>,
}

impl<L: Lanes, F: Layout> Columns<L, F> {
    /// The columns from `column` on, a multiple of the vector's lanes.
    ///
    /// # Safety
    /// The panel has such a group, and 64 columns.
    #[inline(always)]
    unsafe fn new(lanes: L, panel: *const u8, group: usize, column: usize) -> Self {
        let (header, at) = F::group_at(PANEL, group);
        // SAFETY: inside the headers and the tile of these columns.
        unsafe {
            let (header, group) = (panel.add(header), panel.add(at));
            let [of_halves, added] = kernels::scales::<F, L>(lanes, header, group, PANEL, column);
            let [mut scales, mut offsets] = [[of_halves; 2]; 2];
            for half in 0..2 {
                scales[half] = lanes.twice(of_halves[half]).into();
                offsets[half] = lanes.twice(added[half]).into();
            }
            let tile = column / TILE * TILE * F::BITS as usize;
            let tile = group.add(F::GROUP_HEADER * PANEL).cast::<u32>().add(tile);
            let (scales_at, scale_bytes) = match F::GROUPS {
                1 => (header, F::HEADER),
                _ => (group, F::GROUP_HEADER),
            };
            prefetch(scales_at.wrapping_add(AHEAD + column * scale_bytes));
            for line in 0..F::BITS as usize {
                prefetch(tile.wrapping_add(line * TILE + AHEAD / size_of::<u32>()));
            }
            Self {
                lanes,
                codes: [tile, tile.add(L::LANES % TILE)],
                scales,
                offsets,
                layout: PhantomData,
            }
        }
    }

    /// Dequantizes the group. `HALF` says in which half of the tile the columns are, where they are a half.
    ///
    /// # Safety
    /// `take` has the lines of a group.
    #[inline(always)]
    unsafe fn dequantize<E: Element, const HALF: usize>(&self, take: &mut impl TakeLines<L, 1>) {
        if const { !L::UNROLLED } {
            for pair in 0..GROUP / 2 {
                // SAFETY: the caller's promise.
                unsafe { self.dequantize_pair::<E, HALF>(0, pair, take) };
            }
            return;
        }
        // As many at once as fill whole words, so that the shifts are constants.
        for first in (0..GROUP / 2).step_by(F::PERIOD / 2) {
            for_pairs!(PAIR => {
                if const { 2 * PAIR < F::PERIOD } {
                    // SAFETY: the caller's promise.
                    unsafe { self.dequantize_pair::<E, HALF>(first, PAIR, take) };
                }
            });
        }
    }

    /// Dequantizes two depths of the group: pair `first + pair`, of which whole words of codes come before
    /// `first`.
    ///
    /// # Safety
    /// As [`Self::dequantize`], and there is such a pair.
    #[inline(always)]
    unsafe fn dequantize_pair<E: Element, const HALF: usize>(
        &self,
        first: usize,
        pair: usize,
        take: &mut impl TakeLines<L, 1>,
    ) {
        let half = if L::LANES == TILE { 1 } else { HALF };
        // SAFETY: the tile has 32 codes in each of its streams, and `take` these lines.
        unsafe {
            let a = self.number::<0>(first, 2 * pair + HALF);
            let b = self.number::<1>(first, 2 * pair + half);
            let (words, more) = E::lines(self.lanes, a, b);
            let line = (first + pair) * (2 / E::PER_WORD);
            take.take(line, [words]);
            if let Some(more) = more {
                take.take(line + 1, [more]);
            }
        }
    }

    /// The numbers of a vector's codes `2 * first + code`.
    #[inline(always)]
    unsafe fn number<const VECTOR: usize>(&self, first: usize, code: usize) -> L::V {
        let bit = F::BITS as usize * code;
        let (word, at) = (bit / 32 * TILE, (bit % 32) as u32);
        let word = 2 * first * F::BITS as usize / 32 * TILE + word;
        let from = self.codes[VECTOR].wrapping_add(word);
        // SAFETY: the stream has this code, so the words with its bits.
        let number = unsafe { numbers::<F, L>(self.lanes, from, TILE, at, F::SIGNED) };
        let sixteen = code / 16;
        let scale = self.scales[sixteen][VECTOR];
        match F::SCALES.have_minimums() {
            true => self.lanes.mul_add(number, scale, self.offsets[sixteen][VECTOR]),
            false => self.lanes.mul(number, scale),
        }
    }
}

/// Dequantizes a vector's columns of a group.
///
/// # Safety
/// As [`Columns::new`] and [`Columns::dequantize`] demand.
#[inline(always)]
unsafe fn dequantize<E: Element, F: Layout, L: Lanes>(
    lanes: L,
    panel: *const u8,
    group: usize,
    column: usize,
    take: &mut impl TakeLines<L, 1>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let columns = Columns::<L, F>::new(lanes, panel, group, column);
        match column % TILE {
            0 => columns.dequantize::<E, 0>(take),
            _ => columns.dequantize::<E, 1>(take),
        }
    }
}

/// At most `H` rows, multiplied as the blocks are dequantized.
struct Few<'a, F, const H: usize> {
    product: &'a Product<'a, Bf16>,
    sums: &'a mut [Sums],
    layout: PhantomData<F>,
}

impl<'a, F, const H: usize> Few<'a, F, H> {
    fn new(product: &'a Product<'a, Bf16>, sums: &'a mut [Sums]) -> Self {
        Self { product, sums, layout: PhantomData }
    }
}

impl<F: Layout, const H: usize> Kernel for Few<'_, F, H> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        if const { !L::DOT_IN_REGISTERS } {
            // Not compiled for the forms that it is not run with.
            unreachable!("the form dequantizes all panels");
        }
        let product = self.product;
        // Rows that there are not are the last one, computed for nothing.
        let last = self.sums.len() - 1;
        let mut sums = [[0.0; PANEL]; H];
        for group in 0..product.inputs / GROUP {
            let rows = std::array::from_fn(|r| product.rows.words(r.min(last), group * GROUP));
            for column in (0..product.used).step_by(L::LANES) {
                // SAFETY: `sums` has 64 columns, the rows the words of the group, the panel the group.
                unsafe {
                    let mut multiply = Multiply::<L, Bf16, H, 1> {
                        lanes,
                        rows,
                        sums: sums.each_ref().map(|sums| [lanes.load(sums.as_ptr().add(column))]),
                        element: PhantomData,
                    };
                    dequantize::<Bf16, F, L>(lanes, product.panel, group, column, &mut multiply);
                    for (to, [sum]) in sums.iter_mut().zip(multiply.sums) {
                        lanes.store(to.as_mut_ptr().add(column), sum);
                    }
                }
            }
        }
        self.sums.copy_from_slice(&sums[..=last]);
    }
}

/// Dequantizes groups of the depth.
pub(super) struct Dequantize<'a, E, F> {
    pub(super) panel: *const u8,
    pub(super) groups: Range<usize>,
    pub(super) to: &'a mut [Line],
    pub(super) layout: PhantomData<(E, F)>,
}

impl<E: Element, F: Layout> Kernel for Dequantize<'_, E, F> {
    type Output = ();

    const HAS_BF16: bool = E::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        if const { L::LANE_IS_COLUMN } {
            unreachable!("laid out for another form");
        }
        for (group, lines) in self.groups.zip(self.to.chunks_exact_mut(GROUP / E::PER_WORD)) {
            for column in (0..PANEL).step_by(L::LANES) {
                // SAFETY: the panel has the group, and `lines` are its lines, of 64 columns.
                unsafe {
                    let to = lines.as_mut_ptr().cast::<u32>().add(column);
                    let take = &mut Store { lanes, to };
                    dequantize::<E, F, L>(lanes, self.panel, group, column, take);
                }
            }
        }
    }
}
