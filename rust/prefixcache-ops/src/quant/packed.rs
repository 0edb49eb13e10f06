//! Blocks laid out for the kernels, and their products.
//!
//! The columns of a panel lie block by block: what the 64 blocks at one depth say, side by side. First
//! the blocks' scales, then, for each group of 32 numbers of the depth, the scales of the group and
//! four tiles of 16 columns. A tile holds the codes of 16 columns as 16 streams of bits: code c of
//! stream l belongs, with e = 16 * (c % 2) + l, to column e / 2 and to depth 2 * (c / 2) + e % 2. So one
//! shift brings two codes of 8 columns to where two vectors of numbers need them, and rounding both
//! into one vector gives words of the order that a dense panel has.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use prefixcache_cpu::f16::{e8m0_to_f32, f16_to_f32};
use prefixcache_cpu::{
    AlignedWords, Bf16, CodeTable, Element, Form, Kernel, Lanes, OutOfMemory, Rows, RowsMut, Team,
    WordSource,
};

use super::blocks::{BlockScales, Format, GROUP, Scales};
use super::columns;
use crate::bytes::bytes_mut;
use crate::panel::{PANEL, Sums, TaskRows};

/// Columns of a tile.
const TILE: usize = 16;

/// The most rows whose products are taken from registers. With more, dequantizing the blocks first takes
/// less time: where minimums take registers too, from three rows on.
const MAX_FEW: usize = 4;
const MAX_FEW_WITH_MORE_SCALES: usize = 2;

/// A word of each column of a panel.
#[repr(C, align(64))]
pub struct Line([MaybeUninit<u32>; PANEL]);

impl Line {
    /// One that is not written yet.
    pub const UNWRITTEN: Self = Self([MaybeUninit::uninit(); PANEL]);
}

/// The words of some lines.
///
/// # Safety
/// All of them were written.
pub unsafe fn words_of(lines: &[Line]) -> &[u32] {
    // SAFETY: a line is 64 words, which were written, as the caller vouches.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * PANEL) }
}

/// Bytes that are asked for before they are dequantized: that takes so much computation that
/// loads alone keep too few lines in flight from memory.
pub(super) const AHEAD: usize = 4096;

/// How the numbers of a panel lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// As this module says.
    Tiles,
    /// A column in each lane, as [`columns`] says, in strips of that number of columns.
    Strips(usize),
}

impl Order {
    /// The one in which the form multiplies with rows of this type.
    fn of<E: Element>(form: Form) -> Self {
        columns::strip_of_form::<E>(form).map_or(Self::Tiles, Self::Strips)
    }
}

/// How the blocks of a format are laid out, known to the compiler.
pub(super) trait Layout: Send + Sync {
    const FORMAT: Format;

    /// Bits of a code.
    const BITS: u32 = Self::FORMAT.bits();
    /// Whether codes are in two's complement.
    const SIGNED: bool = Self::FORMAT.is_signed();
    /// What codes stand for, if they are no numbers themselves.
    const TABLE: Option<&'static CodeTable> = Self::FORMAT.table();
    const SCALES: Scales = Self::FORMAT.scales();
    /// What was added to signed codes where they are stored unsigned.
    const ZERO: u8 = if Self::SIGNED { 1 << (Self::BITS - 1) } else { 0 };
    /// Numbers whose codes fill whole words, and which have one scale or are a group.
    const PERIOD: usize = match Self::BITS {
        4 => 8,
        8 => 4,
        _ => GROUP,
    };
    /// The most rows whose products with this format's blocks are taken from registers.
    const MAX_FEW: usize = match Self::SCALES {
        Scales::Plain | Scales::PowerOfTwo | Scales::Group => MAX_FEW,
        _ => MAX_FEW_WITH_MORE_SCALES,
    };
    /// Bytes of a column's own scales in a block.
    const HEADER: usize = match Self::SCALES {
        Scales::PowerOfTwo => 1,
        Scales::Plain | Scales::Group | Scales::Sixteens => 2,
        Scales::Minimum | Scales::GroupMinimum | Scales::SixteenMinimums => 4,
    };
    /// Bytes of a column's scales in a group.
    const GROUP_HEADER: usize = match Self::SCALES {
        Scales::Plain | Scales::PowerOfTwo | Scales::Minimum => 0,
        Scales::Group => 1,
        Scales::GroupMinimum | Scales::Sixteens | Scales::SixteenMinimums => 2,
    };
    /// Bytes of a column in a group.
    const GROUP_BYTES: usize = Self::GROUP_HEADER + GROUP * Self::BITS as usize / 8;
    /// Groups of a block.
    const GROUPS: usize = Self::FORMAT.block() / GROUP;
    /// Bytes of a block of a column.
    const BLOCK_BYTES: usize = Self::HEADER + Self::GROUPS * Self::GROUP_BYTES;

    /// Where, in `width` columns, the scales of the blocks with group `group` start, and the group.
    #[inline(always)]
    fn group_at(width: usize, group: usize) -> (usize, usize) {
        let header = group / Self::GROUPS * Self::BLOCK_BYTES;
        let group = header + Self::HEADER + group % Self::GROUPS * Self::GROUP_BYTES;
        (header * width, group * width)
    }
}

macro_rules! layouts {
    ($($format:ident)*) => {$(
        pub(super) struct $format;

        impl Layout for $format {
            const FORMAT: Format = Format::$format;
        }
    )*};
}

layouts! { Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K Q2K Q3K IQ4NL IQ4XS MXFP4 }

/// Evaluates an expression with `$layout` as the layout of a format.
macro_rules! with_layout {
    ($format:expr, $layout:ident => $body:expr) => {
        with_layout!($format, $layout, $body,
            Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K Q2K Q3K IQ4NL IQ4XS MXFP4)
    };
    ($format:expr, $layout:ident, $body:expr, $($name:ident)*) => {
        match $format {
            $(Format::$name => {
                type $layout = $name;
                $body
            })*
        }
    };
}

/// Rows of blocks, laid out in panels.
pub struct PackedBlocks {
    words: AlignedWords,
    format: Format,
    order: Order,
    inputs: usize,
    outputs: usize,
}

impl PackedBlocks {
    /// The blocks of `outputs` rows of `inputs` numbers that lie in `memory`; zero words are zeros. They are
    /// laid out for products with rows of type `E` in `form` alone.
    ///
    /// # Panics
    /// `inputs` numbers are not whole blocks.
    pub fn new<E: Element>(
        memory: &impl WordSource,
        form: Form,
        format: Format,
        inputs: usize,
        outputs: usize,
    ) -> Result<Self, OutOfMemory> {
        assert!(inputs.is_multiple_of(format.block()), "whole blocks");
        let panels = outputs.div_ceil(PANEL);
        let words = panel_words(format, inputs).checked_mul(panels);
        Ok(Self {
            words: memory.words(words.ok_or(OutOfMemory)?)?,
            format,
            order: Order::of::<E>(form),
            inputs,
            outputs,
        })
    }

    /// Format of the blocks.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Their words, as they lie in memory.
    pub fn words(&self) -> &AlignedWords {
        &self.words
    }

    /// Lays out blocks, a row of them for each output.
    ///
    /// # Panics
    /// They are not as many, or not of `inputs` numbers.
    pub fn pack(&mut self, team: &Team, blocks: Rows<'_, u8>) {
        let width = self.format.row_bytes(self.inputs);
        assert_eq!(blocks.shape(), (self.outputs, width), "shape of the blocks");
        let (format, order) = (self.format, self.order);
        let words = panel_words(format, self.inputs);
        let panels = RowsMut::new(self.words.as_mut_slice(), words);
        team.run(panels.rows(), |panel| {
            // SAFETY: each task has a panel of its own.
            let to = unsafe { panels.part(panel, 0, words) };
            with_layout!(format, F => match order {
                Order::Tiles => pack_panel::<F>(blocks, panel * PANEL, to),
                Order::Strips(strip) => {
                    columns::pack_panel::<F>(blocks, panel * PANEL, strip, to);
                }
            });
        });
    }

    /// Dequantizes a row.
    ///
    /// # Panics
    /// There is no such row, or `out` has not `inputs` numbers.
    pub fn read_row<E: Element>(&self, row: usize, out: &mut [E]) {
        assert!(row < self.outputs && out.len() == self.inputs, "row");
        let panel = self.panel(row / PANEL);
        let column = row % PANEL;
        with_layout!(self.format, F => match self.order {
            Order::Tiles => read_column::<E, F>(panel, PANEL, column, tile_code_at::<F>, out),
            Order::Strips(width) => {
                let words = panel.len() / (PANEL / width);
                let strip = &panel[column / width * words..][..words];
                let code_at = |column, depth| columns::code_at::<F>(width, column, depth);
                read_column::<E, F>(strip, width, column % width, code_at, out);
            }
        });
    }

    /// Whether products with `rows` rows are taken from registers by [`Self::multiply_few`]; with more
    /// rows, and in forms without such products, the blocks are dequantized first.
    pub fn multiplies_few<E: Element>(&self, form: Form, rows: usize) -> bool {
        match self.order {
            Order::Tiles => {
                let most = with_layout!(self.format, F => F::MAX_FEW);
                rows <= most && form.dots_in_registers()
            }
            Order::Strips(strip) => {
                E::PER_WORD == 1 && rows <= columns::max_few(self.format, strip)
            }
        }
    }

    /// Adds the products of a few rows with a panel to the rows' sums, in the order of the depth.
    ///
    /// # Panics
    /// There is no such panel, a row of `x` has not `inputs` numbers, or [`Self::multiplies_few`] says no.
    pub fn multiply_few<E: Element>(
        &self,
        form: Form,
        panel: usize,
        rows: TaskRows<'_, E>,
        sums: &mut [Sums],
    ) {
        let first = rows.first;
        if let Some(x) = rows.x.of_type() {
            self.multiply_f32(form, panel, TaskRows { x, first }, sums);
        } else if let Some(x) = rows.x.of_type() {
            self.multiply_bf16(form, panel, TaskRows { x, first }, sums);
        }
    }

    /// Not generic, so that crates which use it need not compile the kernels of all formats again.
    fn multiply_f32(&self, form: Form, panel: usize, rows: TaskRows<'_, f32>, sums: &mut [Sums]) {
        self.product(form, panel, rows).run(self, form, sums);
    }

    /// Not generic for the same reason.
    fn multiply_bf16(&self, form: Form, panel: usize, rows: TaskRows<'_, Bf16>, sums: &mut [Sums]) {
        self.product(form, panel, rows).run(self, form, sums);
    }

    fn product<'a, E: Element>(
        &'a self,
        form: Form,
        panel: usize,
        rows: TaskRows<'a, E>,
    ) -> Product<'a, E> {
        assert_eq!(self.order, Order::of::<E>(form), "laid out for another form");
        assert_eq!(rows.x.width(), self.inputs, "width of x");
        Product {
            panel: self.panel(panel).as_ptr().cast(),
            inputs: self.inputs,
            used: PANEL.min(self.outputs - panel * PANEL),
            rows,
        }
    }

    /// Writes a part of a panel as the lines of words that a dense panel has: the numbers of the depth from
    /// `start` on, of which there are as many as `to` has room for.
    ///
    /// # Panics
    /// There is no such panel, or these are not whole groups of 32 numbers of its depth.
    pub fn dequantize<E: Element>(&self, form: Form, panel: usize, start: usize, to: &mut [Line]) {
        let depth = start..start + to.len() * E::PER_WORD;
        assert!(depth.end <= self.inputs, "depth of the panel");
        assert!(start.is_multiple_of(GROUP) && depth.len().is_multiple_of(GROUP));
        assert_eq!(self.order, Order::of::<E>(form), "laid out for another form");
        let panel = self.panel(panel).as_ptr().cast();
        let groups = start / GROUP..depth.end / GROUP;
        match E::PER_WORD {
            1 => self.dequantize_f32(form, panel, groups, to),
            _ => self.dequantize_bf16(form, panel, groups, to),
        }
    }

    /// Not generic, as `multiply_f32`.
    fn dequantize_f32(&self, form: Form, panel: *const u8, groups: Range<usize>, to: &mut [Line]) {
        self.dequantize_lines::<f32>(form, panel, groups, to);
    }

    /// Not generic for the same reason.
    fn dequantize_bf16(&self, form: Form, panel: *const u8, groups: Range<usize>, to: &mut [Line]) {
        self.dequantize_lines::<Bf16>(form, panel, groups, to);
    }

    fn dequantize_lines<E: Element>(
        &self,
        form: Form,
        panel: *const u8,
        groups: Range<usize>,
        to: &mut [Line],
    ) {
        let inputs = self.inputs;
        with_layout!(self.format, F => {
            let layout = PhantomData;
            match self.order {
                Order::Tiles => form.run(Dequantize::<E, F> { panel, groups, to, layout }),
                Order::Strips(_) => {
                    form.run(columns::Dequantize::<E, F> { panel, inputs, groups, to, layout });
                }
            }
        });
    }

    fn panel(&self, panel: usize) -> &[u32] {
        let words = panel_words(self.format, self.inputs);
        &self.words.as_slice()[panel * words..(panel + 1) * words]
    }
}

fn panel_words(format: Format, inputs: usize) -> usize {
    let bytes = with_layout!(format, F => F::BLOCK_BYTES);
    inputs / format.block() * (bytes * PANEL / size_of::<u32>())
}

/// Lays out the blocks of the rows from `first` on, as many as there are in a panel.
fn pack_panel<F: Layout>(blocks: Rows<'_, u8>, first: usize, to: &mut [u32]) {
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

/// Where, in `width` columns, the codes of a group start.
#[inline(always)]
pub(super) fn codes_at<F: Layout>(width: usize, group: usize) -> usize {
    F::group_at(width, group).1 + F::GROUP_HEADER * width
}

/// Writes the scales of a block of one of `width` columns.
pub(super) fn pack_scales<F: Layout>(
    scales: &BlockScales,
    width: usize,
    column: usize,
    to: &mut [u32],
) {
    let to = bytes_mut(to);
    let mut put = |at: usize, half: u16| {
        to[at + 2 * column..][..2].copy_from_slice(&half.to_le_bytes());
    };
    match F::SCALES {
        Scales::PowerOfTwo => {
            to[column] = scales.d as u8;
            return;
        }
        _ => put(0, scales.d),
    }
    match F::SCALES {
        Scales::Plain | Scales::PowerOfTwo | Scales::Group | Scales::Sixteens => {}
        Scales::Minimum => put(2 * width, scales.m),
        // With the other sign, it is added.
        Scales::GroupMinimum | Scales::SixteenMinimums => put(2 * width, scales.m ^ 0x8000),
    }
    for group in 0..F::GROUPS {
        let at = F::group_at(width, group).1 + column;
        let pair = match F::SCALES {
            Scales::Plain | Scales::PowerOfTwo | Scales::Minimum => return,
            Scales::Group => {
                to[at] = scales.factors[group].cast_unsigned();
                continue;
            }
            Scales::GroupMinimum => [scales.factors[group].cast_unsigned(), scales.minimums[group]],
            Scales::Sixteens => {
                [2 * group, 2 * group + 1].map(|i| scales.factors[i].cast_unsigned())
            }
            Scales::SixteenMinimums => [2 * group, 2 * group + 1]
                .map(|i| scales.factors[i].cast_unsigned() | scales.minimums[i] << 4),
        };
        (to[at], to[at + width]) = pair.into();
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
fn tile_code_at<F: Layout>(column: usize, depth: usize) -> CodeAt {
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

/// Dequantizes one of `width` columns, whose codes lie where `code_at` says.
fn read_column<E: Element, F: Layout>(
    panel: &[u32],
    width: usize,
    column: usize,
    code_at: impl Fn(usize, usize) -> CodeAt,
    out: &mut [E],
) {
    let bytes =
        |at: usize, count: u32| panel[at / 4] >> (at % 4 * 8) & (u32::MAX >> (32 - 8 * count));
    for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
        let (header, at) = F::group_at(width, group);
        let half = |start| f16_to_f32(bytes(header + start + 2 * column, 2) as u16);
        let byte = |start| bytes(at + start + column, 1) as u8;
        let d = match F::SCALES {
            Scales::PowerOfTwo => e8m0_to_f32(bytes(header + column, 1) as u8),
            _ => half(0),
        };
        let (scales, offsets) = match F::SCALES {
            Scales::Plain | Scales::PowerOfTwo => ([d, d], None),
            Scales::Group => ([d * f32::from(byte(0).cast_signed()); 2], None),
            Scales::Minimum => ([d, d], Some([half(2 * width); 2])),
            Scales::GroupMinimum => {
                let offset = half(2 * width) * f32::from(byte(width));
                ([d * f32::from(byte(0)); 2], Some([offset; 2]))
            }
            Scales::SixteenMinimums => {
                let both = [byte(0), byte(width)];
                let offsets = both.map(|byte| half(2 * width) * f32::from(byte >> 4));
                (both.map(|byte| d * f32::from(byte & 15)), Some(offsets))
            }
            Scales::Sixteens => {
                ([byte(0), byte(width)].map(|scale| d * f32::from(scale.cast_signed())), None)
            }
        };
        let codes = &panel[codes_at::<F>(width, group) / 4..];
        for (depth, out) in out.iter_mut().enumerate() {
            let product = scales[depth / 16] * code::<F>(codes, code_at(column, depth));
            *out = E::from_f32(offsets.map_or(product, |offsets| product + offsets[depth / 16]));
        }
    }
}

/// The lower and the upper four bits of bytes, as numbers.
///
/// # Safety
/// `LANES` bytes are readable.
#[inline(always)]
pub(super) unsafe fn nibbles<L: Lanes>(lanes: L, from: *const u8) -> (L::V, L::V) {
    // Adding it rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    // SAFETY: the caller's promise.
    let bytes = unsafe { lanes.load_u8(from) };
    // Less than half from the upper bits: the lower ones are a part of 16.
    let near = lanes.mul_add(bytes, lanes.splat(1.0 / 16.0), lanes.splat(-7.5 / 16.0));
    let upper = lanes.sub(lanes.add(near, lanes.splat(ROUND)), lanes.splat(ROUND));
    (lanes.mul_add(upper, lanes.splat(-16.0), bytes), upper)
}

/// The table that the format's codes are looked up in.
#[inline(always)]
pub(super) fn table<F: Layout>() -> &'static CodeTable {
    F::TABLE.expect("a format with a table")
}

/// Where a code starts, among those of a group.
pub(super) struct CodeAt {
    pub(super) word: usize,
    pub(super) bit: u32,
    /// Words to the one with the bits that follow.
    pub(super) line: usize,
    /// What the highest bit is inverted with: 1 where signed codes are stored unsigned.
    pub(super) inverted: u32,
}

/// A code, signed where the format's are.
fn code<F: Layout>(codes: &[u32], at: CodeAt) -> f32 {
    let mut bits = u64::from(codes[at.word]);
    if at.bit + F::BITS > 32 {
        bits |= u64::from(codes[at.word + at.line]) << 32;
    }
    let top = ((bits >> at.bit) as u32) << (32 - F::BITS) ^ at.inverted << 31;
    if let Some(table) = F::TABLE {
        return table.codes[(top >> 28) as usize].into();
    }
    match F::SIGNED {
        true => (top.cast_signed() >> (32 - F::BITS)) as f32,
        false => (top >> (32 - F::BITS)) as f32,
    }
}

/// A panel times the rows of a task.
pub(super) struct Product<'a, E> {
    pub(super) panel: *const u8,
    pub(super) inputs: usize,
    /// Columns of the panel that are outputs.
    pub(super) used: usize,
    pub(super) rows: TaskRows<'a, E>,
}

impl<E: Element> Product<'_, E> {
    fn run(&self, blocks: &PackedBlocks, form: Form, sums: &mut [Sums]) {
        with_layout!(blocks.format, F => match blocks.order {
            Order::Tiles => self.multiply_tiles::<F>(form, sums),
            Order::Strips(_) => self.multiply_strips::<F>(form, sums),
        });
    }

    fn multiply_tiles<F: Layout>(&self, form: Form, sums: &mut [Sums]) {
        match sums.len() {
            0 => {}
            1 => form.run(Few::<_, F, 1>::new(self, sums)),
            2 if const { F::MAX_FEW == 2 || F::FORMAT.is_common() } => {
                form.run(Few::<_, F, 2>::new(self, sums));
            }
            _ if const { F::MAX_FEW == 2 } => unreachable!("too many rows"),
            _ => form.run(Few::<_, F, MAX_FEW>::new(self, sums)),
        }
    }
}

/// What becomes of the lines of words that blocks are dequantized to.
trait TakeLine<L: Lanes> {
    /// Takes the words of some columns at word `line` of the group.
    ///
    /// # Safety
    /// There is such a word.
    unsafe fn take(&mut self, line: usize, words: L::V);
}

/// Multiplies them with `H` rows.
struct Multiply<L: Lanes, E, const H: usize> {
    lanes: L,
    rows: [*const u32; H],
    sums: [L::V; H],
    element: PhantomData<E>,
}

impl<L: Lanes, E: Element, const H: usize> TakeLine<L> for Multiply<L, E, H> {
    #[inline(always)]
    unsafe fn take(&mut self, line: usize, words: L::V) {
        for (sum, row) in self.sums.iter_mut().zip(self.rows) {
            // SAFETY: the row has this word, as the caller vouches.
            let x = self.lanes.splat_word(unsafe { row.add(line).read_unaligned() });
            *sum = E::dot(self.lanes, *sum, words, x);
        }
    }
}

/// Stores them in the dequantized panel.
struct Store<L> {
    lanes: L,
    /// Where the group's first line has these columns.
    to: *mut u32,
}

impl<L: Lanes> TakeLine<L> for Store<L> {
    #[inline(always)]
    unsafe fn take(&mut self, line: usize, words: L::V) {
        // SAFETY: the panel has this line, as the caller vouches.
        unsafe { self.lanes.store(self.to.add(line * PANEL).cast(), words) }
    }
}

/// Repeats for each pair of numbers of a group, known to the compiler.
macro_rules! for_pairs {
    ($pair:ident => $body:block) => {
        for_pairs!($pair, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($pair:ident, $body:block, $($number:literal)*) => {
        $({
            const $pair: usize = $number;
            $body
        })*
    };
}
pub(super) use for_pairs;

/// A vector's columns of a group of the depth.
struct Columns<L: Lanes, F> {
    lanes: L,
    /// The words of the tile in which the first vector of numbers has its codes, and the second.
    codes: [*const u32; 2],
    /// What their numbers are multiplied by: for the first 16 of the depth, and the others.
    scales: [[L::V; 2]; 2],
    /// What is added, if anything, in the same order.
    offsets: Option<[[L::V; 2]; 2]>,
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
            let half = |start: usize| lanes.load_f16(header.add(start).cast::<u16>().add(column));
            let byte = |start: usize| group.add(start + column);
            let twice = |v| <[L::V; 2]>::from(lanes.twice(v));
            let d = match F::SCALES {
                Scales::PowerOfTwo => lanes.load_e8m0(header.add(column)),
                _ => half(0),
            };
            let (scales, offsets) = match F::SCALES {
                Scales::Plain | Scales::PowerOfTwo => ([twice(d); 2], None),
                Scales::Group => {
                    let scale = lanes.mul(d, lanes.load_i8(byte(0).cast()));
                    ([twice(scale); 2], None)
                }
                Scales::Minimum => ([twice(d); 2], Some([twice(half(2 * PANEL)); 2])),
                Scales::GroupMinimum => {
                    let scale = lanes.mul(d, lanes.load_u8(byte(0)));
                    let offset = lanes.mul(half(2 * PANEL), lanes.load_u8(byte(PANEL)));
                    ([twice(scale); 2], Some([twice(offset); 2]))
                }
                Scales::Sixteens => {
                    let scale = |at| twice(lanes.mul(d, lanes.load_i8(byte(at).cast())));
                    ([scale(0), scale(PANEL)], None)
                }
                Scales::SixteenMinimums => {
                    let minimum = half(2 * PANEL);
                    let [mut scales, mut offsets] = [[[d; 2]; 2]; 2];
                    // A closure is not inlined here, and then runs without the form's instructions.
                    for sixteen in 0..2 {
                        let (scale, factor) = nibbles(lanes, byte(sixteen * PANEL));
                        scales[sixteen] = twice(lanes.mul(d, scale));
                        offsets[sixteen] = twice(lanes.mul(minimum, factor));
                    }
                    (scales, Some(offsets))
                }
            };
            let tile = column / TILE * TILE * F::BITS as usize;
            let tile = group.add(F::GROUP_HEADER * PANEL).cast::<u32>().add(tile);
            let (scales_at, scale_bytes) = match F::GROUPS {
                1 => (header, F::HEADER),
                _ => (group, F::GROUP_HEADER),
            };
            lanes.prefetch(scales_at.wrapping_add(AHEAD + column * scale_bytes));
            for line in 0..F::BITS as usize {
                lanes.prefetch(tile.wrapping_add(line * TILE + AHEAD / size_of::<u32>()));
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
    unsafe fn dequantize<E: Element, const HALF: usize>(&self, take: &mut impl TakeLine<L>) {
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
        take: &mut impl TakeLine<L>,
    ) {
        let half = if L::LANES == TILE { 1 } else { HALF };
        // SAFETY: the tile has 32 codes in each of its streams, and `take` these lines.
        unsafe {
            let a = self.number::<0>(first, 2 * pair + HALF);
            let b = self.number::<1>(first, 2 * pair + half);
            let (words, more) = E::lines(self.lanes, a, b);
            let line = (first + pair) * (2 / E::PER_WORD);
            take.take(line, words);
            if let Some(more) = more {
                take.take(line + 1, more);
            }
        }
    }

    /// The numbers of a vector's codes `2 * first + code`.
    #[inline(always)]
    unsafe fn number<const VECTOR: usize>(&self, first: usize, code: usize) -> L::V {
        let bit = F::BITS as usize * code;
        let (word, at) = (bit / 32 * TILE, (bit % 32) as u32);
        let word = 2 * first * F::BITS as usize / 32 * TILE + word;
        // SAFETY: the stream has this code, so the words with its bits.
        let mut words = unsafe { self.lanes.load(self.codes[VECTOR].add(word).cast()) };
        let mut from = at;
        if at + F::BITS > 32 {
            // SAFETY: as above.
            let next = unsafe { self.lanes.load(self.codes[VECTOR].add(word + TILE).cast()) };
            words = self.lanes.join(words, next, at);
            from = 0;
        }
        let number = match (F::BITS, F::SIGNED) {
            (4, _) if F::TABLE.is_some() => self.lanes.lookup(table::<F>(), words, from),
            (2, _) => self.lanes.field::<2, false>(words, from),
            (3, _) => self.lanes.field::<3, true>(words, from),
            (4, true) => self.lanes.field::<4, true>(words, from),
            (4, false) => self.lanes.field::<4, false>(words, from),
            (5, true) => self.lanes.field::<5, true>(words, from),
            (5, false) => self.lanes.field::<5, false>(words, from),
            (6, _) => self.lanes.field::<6, true>(words, from),
            _ => self.lanes.field::<8, true>(words, from),
        };
        let sixteen = code / 16;
        let scale = self.scales[sixteen][VECTOR];
        match self.offsets {
            Some(offsets) => self.lanes.mul_add(number, scale, offsets[sixteen][VECTOR]),
            None => self.lanes.mul(number, scale),
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
    take: &mut impl TakeLine<L>,
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
struct Few<'a, E, F, const H: usize> {
    product: &'a Product<'a, E>,
    sums: &'a mut [Sums],
    layout: PhantomData<F>,
}

impl<'a, E, F, const H: usize> Few<'a, E, F, H> {
    fn new(product: &'a Product<'a, E>, sums: &'a mut [Sums]) -> Self {
        Self { product, sums, layout: PhantomData }
    }
}

impl<E: Element, F: Layout, const H: usize> Kernel for Few<'_, E, F, H> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        if const { !L::DOT_IN_REGISTERS || E::PER_WORD == 1 } {
            // Not compiled for the forms and types that it is not run with.
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
                    let mut multiply = Multiply::<L, E, H> {
                        lanes,
                        rows,
                        sums: sums.each_ref().map(|sums| lanes.load(sums.as_ptr().add(column))),
                        element: PhantomData,
                    };
                    dequantize::<E, F, L>(lanes, product.panel, group, column, &mut multiply);
                    for (to, sum) in sums.iter_mut().zip(multiply.sums) {
                        lanes.store(to.as_mut_ptr().add(column), sum);
                    }
                }
            }
        }
        self.sums.copy_from_slice(&sums[..=last]);
    }
}

/// Dequantizes groups of the depth.
struct Dequantize<'a, E, F> {
    panel: *const u8,
    groups: Range<usize>,
    to: &'a mut [Line],
    layout: PhantomData<(E, F)>,
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
