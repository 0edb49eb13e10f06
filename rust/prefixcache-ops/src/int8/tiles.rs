//! Weights in blocks, laid out for dot products of bytes.
//!
//! A *unit* is one block of the file for each of 16 outputs: 32 steps of the depth, or 256 with
//! the formats of such blocks. A panel of four units side by side follows the depth, so that it is read in the order in
//! which it lies in memory; the last panel may be narrower. A unit holds for its outputs, side by side:
//!
//! - the scales and, where the format has them, the minimums, as the file has them (half precision, or
//!   an exponent);
//! - for each 32 steps the lowest four bits of codes: byte `64 g + 4 c + t` has that of output c at
//!   step `4 g + t` below that at step `16 + 4 g + t`, so that 64 bytes are 16 lanes of four steps
//!   each, twice;
//! - the fifth bits: byte `4 c + t` has in its bit g that of step `4 g + t`, in its bit `4 + g` that
//!   of step `16 + 4 g + t`;
//! - of codes of two or three bits the lowest two in pairs of pairs: byte `64 i + 4 c + t` has those of
//!   steps `8 i + t`, `16 + 8 i + t` and the fours after them; then the third bits as the fifth ones;
//! - what the formats of 256 numbers multiply scales and minimums with, a byte each.
//!
//! Eight bits a code are plain: byte `64 g + 4 c + t` is step `4 g + t`, g up to 7, plus 128. Of six bits
//! those up to g = 5 are so too; above them are the codes of g = 6, in pairs of bits at g = 0, 1 and 2, and
//! those of g = 7.

use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_cpu::{AlignedWords, Element, Rows, RowsMut, Team, WordSource};

use super::activations::BLOCK;
use crate::bytes::{bytes_mut, bytes_of};
use crate::panel::PANEL;
use crate::quant::blocks::{Block, BlockScales, Format, GroupCodes, MAX_BLOCK, Scales};

/// Outputs of a unit.
pub const TILE: usize = 16;

/// Units side by side in a panel.
pub const TILES: usize = PANEL / TILE;

/// How the units of a format are laid out.
#[derive(Clone, Copy)]
pub struct Layout {
    /// Blocks of 32 steps in a unit.
    pub blocks: usize,
    /// Bits of a code as it is stored: 2 to 6, or 8.
    pub bits: usize,
    /// What codes are replaced with before they are multiplied, if they are: their numbers plus the offset.
    pub table: Option<[u8; 16]>,
    /// Bits of a code as it is multiplied.
    pub dot_bits: usize,
    /// Subtracted from what is multiplied.
    pub offset: i32,
    /// What is stored of scales.
    pub scales: Scales,
}

impl Layout {
    /// That of a format.
    pub const fn of(format: Format) -> Self {
        let (table, dot_bits, offset) = match (format, format.table()) {
            (_, Some(table)) => {
                let (bits, offset) = dot_of(&table.codes);
                (Some(above(&table.codes, offset)), bits, offset)
            }
            (Format::Q8_0, _) => (None, 8, 128),
            _ => {
                let bits = format.bits() as usize;
                (None, if bits < 4 { 4 } else { bits }, format.zero() as i32)
            }
        };
        Self {
            blocks: format.block() / BLOCK,
            bits: format.bits() as usize,
            table,
            dot_bits,
            offset,
            scales: format.scales(),
        }
    }

    /// Whether numbers have minimums.
    pub const fn minimums(self) -> bool {
        self.scales.have_minimums()
    }

    /// Whether the halves of 32 steps have factors of their own.
    pub const fn halves(self) -> bool {
        matches!(self.scales, Scales::Sixteens | Scales::SixteenMinimums)
    }

    /// Bytes before the blocks of a unit: scales and minimums.
    pub const fn header(self) -> usize {
        TILE * self.scales.block_bytes()
    }

    /// Bytes of the codes of 32 steps.
    pub const fn codes(self) -> usize {
        TILE * BLOCK / 8 * self.bits
    }

    /// Bytes of 32 steps: codes and factors.
    pub const fn block(self) -> usize {
        self.codes() + TILE * self.scales.group_bytes()
    }

    /// Bytes of a unit.
    pub const fn unit(self) -> usize {
        self.header() + self.blocks * self.block()
    }
}

/// Bits that the numbers of a table take, and what makes all of them positive: codes of eight bits are counted less 128.
const fn dot_of(codes: &[i8; 16]) -> (usize, i32) {
    let (mut least, mut most, mut i) = (0, 0, 0);
    while i < codes.len() {
        let code = codes[i] as i32;
        least = if code < least { code } else { least };
        most = if code > most { code } else { most };
        i += 1;
    }
    if most - least < 32 { (5, -least) } else { (8, 128) }
}

/// The numbers of a table plus an offset.
const fn above(codes: &[i8; 16], offset: i32) -> [u8; 16] {
    let (mut above, mut i) = ([0; 16], 0);
    while i < above.len() {
        above[i] = (codes[i] as i32 + offset) as u8;
        i += 1;
    }
    above
}

/// A weight of one format in tiles.
pub struct Int8Weight {
    format: Format,
    words: AlignedWords,
    inputs: usize,
    outputs: usize,
}

impl Int8Weight {
    /// The blocks of `outputs` rows of `inputs` numbers that lie in `memory`; zero words are zeros.
    ///
    /// # Errors
    /// There is no memory for them.
    ///
    /// # Panics
    /// `inputs` numbers are not whole blocks.
    pub fn new(
        memory: &impl WordSource,
        format: Format,
        inputs: usize,
        outputs: usize,
    ) -> Result<Self, OutOfMemory> {
        assert!(inputs.is_multiple_of(format.block()), "whole blocks");
        let words = (Layout::of(format).unit() / size_of::<u32>())
            .checked_mul(inputs / format.block())
            .and_then(|tile| tile.checked_mul(outputs.div_ceil(TILE)));
        Ok(Self { format, words: memory.words(words.ok_or(OutOfMemory)?)?, inputs, outputs })
    }

    /// Lays out blocks, a row of them for each output.
    ///
    /// # Panics
    /// They are not as many, or not of `inputs` numbers.
    pub fn pack(&mut self, team: &Team, blocks: Rows<'_, u8>) {
        let (format, depth, layout) = (self.format, self.depth(), Layout::of(self.format));
        let shape = (self.outputs, format.row_bytes(self.inputs));
        assert_eq!(blocks.shape(), shape, "shape of the blocks");
        let widths: Vec<usize> = (0..self.panels()).map(|panel| self.width(panel)).collect();
        let words = RowsMut::new(self.words.as_mut_slice(), layout.unit() / size_of::<u32>());
        team.run(widths.len(), |panel| {
            let (first, width) = (panel * TILES * depth, widths[panel]);
            for unit in 0..width * depth {
                // SAFETY: each task has the units of a panel of its own.
                let to = bytes_mut(unsafe { words.part(first + unit, 0, words.width()) });
                let output = panel * PANEL + unit % width * TILE;
                for column in 0..TILE.min(blocks.rows() - output) {
                    let row = blocks.row(output + column);
                    let bytes = &row[unit / width * format.bytes()..];
                    write_block(format, to, column, bytes);
                }
            }
        });
    }

    /// Numbers of an input row.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Numbers of an output row.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// The format of its blocks.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Its words, as they lie in memory.
    pub fn words(&self) -> &AlignedWords {
        &self.words
    }

    /// Panels of `PANEL` outputs.
    pub fn panels(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }

    /// Units of a panel along the depth.
    pub fn depth(&self) -> usize {
        self.inputs / self.format.block()
    }

    /// Units of a panel side by side.
    pub fn width(&self, panel: usize) -> usize {
        (self.outputs.div_ceil(TILE) - panel * TILES).min(TILES)
    }

    /// The units of panel `panel`.
    pub fn panel(&self, panel: usize) -> &[u8] {
        let start = self.unit_at(panel * TILES, 0);
        let bytes = self.width(panel) * self.depth() * Layout::of(self.format).unit();
        &bytes_of(self.words.as_slice())[start..start + bytes]
    }

    /// Where the unit of some 16 outputs at some depth starts.
    fn unit_at(&self, tile: usize, depth: usize) -> usize {
        let (panel, place) = (tile / TILES, tile % TILES);
        let units = panel * TILES * self.depth() + depth * self.width(panel) + place;
        units * Layout::of(self.format).unit()
    }

    /// Dequantizes a row.
    ///
    /// # Panics
    /// There is no such row, or `out` has not `inputs` numbers.
    pub fn read_row<E: Element>(&self, row: usize, out: &mut [E]) {
        assert!(row < self.outputs && out.len() == self.inputs, "row");
        for (depth, out) in out.chunks_exact_mut(self.format.block()).enumerate() {
            let unit = &bytes_of(self.words.as_slice())[self.unit_at(row / TILE, depth)..];
            let block = read_block(self.format, unit, row % TILE);
            for (i, out) in out.iter_mut().enumerate() {
                *out = E::from_f32(block.number(i));
            }
        }
    }
}

/// Writes a block of output `column`.
fn write_block(format: Format, unit: &mut [u8], column: usize, block: &[u8]) {
    let (layout, scales) = (Layout::of(format), BlockScales::read(format, block));
    match layout.scales {
        Scales::PowerOfTwo => unit[column] = scales.d as u8,
        _ => unit[2 * column..][..2].copy_from_slice(&scales.d.to_le_bytes()),
    }
    if layout.minimums() {
        unit[2 * (TILE + column)..][..2].copy_from_slice(&scales.m.to_le_bytes());
    }
    let groups = unit[layout.header()..].chunks_exact_mut(layout.block());
    for (group, to) in groups.enumerate() {
        let (packed, factors) = to.split_at_mut(layout.codes());
        write_codes(layout.bits, packed, column, format.codes(block, group));
        let bytes = scales.of_group(layout.scales, group);
        for (factors, byte) in factors.chunks_exact_mut(TILE).zip(bytes) {
            factors[column] = byte;
        }
    }
}

/// Writes the codes of an output as the file has them.
fn write_codes(bits: usize, to: &mut [u8], column: usize, codes: GroupCodes) {
    const NIBBLES: u32 = 0x0f0f_0f0f;
    const PAIRS: u32 = 0x0303_0303;
    const ONES: u32 = 0x0101_0101;
    let code = |g: usize| (codes[g / 2] >> (32 * (g % 2))) as u32;
    let mut put = |at: usize, word: u32| {
        to[at + 4 * column..][..4].copy_from_slice(&word.to_le_bytes());
    };
    if bits == 8 {
        // Dot products want unsigned codes.
        return (0..8).for_each(|g| put(64 * g, code(g) ^ 0x8080_8080));
    }
    if bits == 6 {
        let pair = |g: usize| code(6 + g / 3) >> (2 * (g % 3)) & PAIRS;
        return (0..6).for_each(|g| put(64 * g, code(g) | pair(g) << 6));
    }
    if bits < 4 {
        let pair = |g: usize| code(g) & PAIRS | (code(4 + g) & PAIRS) << 2;
        (0..2).for_each(|i| put(64 * i, pair(2 * i) | pair(2 * i + 1) << 4));
        let third = |g: usize| code(g) >> 2 & ONES | (code(4 + g) >> 2 & ONES) << 4;
        if bits == 3 {
            put(128, (0..4).fold(0, |word, g| word | third(g) << g));
        }
        return;
    }
    (0..4).for_each(|g| put(64 * g, code(g) & NIBBLES | (code(4 + g) & NIBBLES) << 4));
    let fifth = |g: usize| code(g) >> 4 & ONES | (code(4 + g) >> 4 & ONES) << 4;
    if bits == 5 {
        put(256, (0..4).fold(0, |word, g| word | fifth(g) << g));
    }
}

/// The block of output `column`, as [`write_block`] was given it.
fn read_block(format: Format, unit: &[u8], column: usize) -> Block {
    let layout = Layout::of(format);
    let half = |at: usize| u16::from_le_bytes([unit[at], unit[at + 1]]);
    let minimum = layout.minimums().then(|| half(2 * (TILE + column)));
    let mut block = Block {
        format,
        scales: BlockScales {
            d: match layout.scales {
                Scales::PowerOfTwo => unit[column].into(),
                _ => half(2 * column),
            },
            m: minimum.unwrap_or(0),
            factors: [1; 16],
            minimums: [0; 16],
        },
        codes: [0; MAX_BLOCK],
    };
    let blocks = unit[layout.header()..layout.unit()].chunks_exact(layout.block());
    for (b, from) in blocks.enumerate() {
        let (packed, factors) = from.split_at(layout.codes());
        for (step, code) in block.codes[BLOCK * b..][..BLOCK].iter_mut().enumerate() {
            let unsigned = read_code(layout.bits, packed, column, step);
            let unsigned = layout.table.map_or(unsigned, |table| table[usize::from(unsigned)]);
            *code = unsigned.wrapping_sub(layout.offset as u8).cast_signed();
        }
        let pair = || [factors[column], factors[TILE + column]];
        match layout.scales {
            Scales::Plain | Scales::PowerOfTwo | Scales::Minimum => {}
            Scales::Group => block.scales.factors[b] = factors[column].cast_signed(),
            Scales::GroupMinimum => {
                block.scales.factors[b] = pair()[0].cast_signed();
                block.scales.minimums[b] = pair()[1];
            }
            Scales::Sixteens => {
                block.scales.factors[2 * b..][..2].copy_from_slice(&pair().map(u8::cast_signed));
            }
            Scales::SixteenMinimums => {
                let (factors, minimums) =
                    (pair().map(|byte| byte & 15), pair().map(|byte| byte >> 4));
                block.scales.factors[2 * b..][..2].copy_from_slice(&factors.map(u8::cast_signed));
                block.scales.minimums[2 * b..][..2].copy_from_slice(&minimums);
            }
        }
    }
    block
}

fn read_code(bits: usize, packed: &[u8], column: usize, step: usize) -> u8 {
    let (g, byte) = (step / 4, 4 * column + step % 4);
    if bits == 8 {
        return packed[64 * g + byte];
    }
    if bits == 6 {
        let pair = |i: usize| packed[64 * (3 * (g - 6) + i) + byte] >> 6;
        return match g {
            6.. => pair(0) | pair(1) << 2 | pair(2) << 4,
            _ => packed[64 * g + byte] & 63,
        };
    }
    let (g, second) = (g % 4, g / 4);
    if bits < 4 {
        let low = packed[64 * (g / 2) + byte] >> (4 * (g % 2) + 2 * second) & 3;
        let third = packed.get(128 + byte).map_or(0, |byte| byte >> (4 * second + g) & 1);
        return low | third << 2;
    }
    let nibble = packed[64 * g + byte] >> (4 * second) & 15;
    let fifth = packed.get(256 + byte);
    nibble | fifth.map_or(0, |byte| byte >> (4 * second + g) & 1) << 4
}
