//! How the blocks of a panel lie, whichever way its columns do.
//!
//! Columns lie side by side, block by block: what the blocks at one depth say, first their scales, then, for each group
//! of 32 numbers of the depth, the scales of the group and the codes.

use prefixcache_cpu::f16::{e8m0_to_f32, f16_to_f32};
use prefixcache_cpu::{CodeTable, Element};

use super::blocks::{BlockScales, GROUP, Scales};
use super::formats::OfFormat;
use crate::bytes::bytes_mut;

/// How the blocks of a format are laid out, known to the compiler.
pub(super) trait Layout: OfFormat {
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
    /// Bytes of a column's own scales in a block.
    const HEADER: usize = Self::SCALES.block_bytes();
    /// Bytes of a column's scales in a group.
    const GROUP_HEADER: usize = Self::SCALES.group_bytes();
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

impl<F: OfFormat> Layout for F {}

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
        let bytes = scales.of_group(F::SCALES, group);
        for (i, &byte) in bytes[..F::GROUP_HEADER].iter().enumerate() {
            to[at + i * width] = byte;
        }
    }
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

/// Dequantizes one of `width` columns, whose codes lie where `code_at` says.
pub(super) fn read_column<E: Element, F: Layout>(
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

/// The table that the format's codes are looked up in.
#[inline(always)]
pub(super) fn table<F: Layout>() -> &'static CodeTable {
    F::TABLE.expect("a format with a table")
}
