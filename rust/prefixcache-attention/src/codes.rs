//! Keys and values in eight bits: how they are rounded, where they stand, and a tile of them as numbers.
//!
//! What a token has in one head, a row of keys or of values, is rounded alone, keys after a rotation that queries share
//! (`rotation.rs`). Its scale is its largest magnitude divided by 127, in `f32`; its codes are its numbers divided by
//! the scale, rounded to the nearest integer, halves to even. A row is the same codes whatever is computed with it, in
//! every form. Every reader reads the codes, also those of the step's own tokens, so a hit reads what a miss does. A row
//! whose scale would be no normal number is zeros; one that holds a number which is not finite, once a key is rotated,
//! has NaN for its scale, which shows in what is read.
//!
//! A page holds its heads one after the other, a head its groups of 16 tokens, each in the order in which it is read:
//!
//! - the codes of the keys, number by number, those of the 16 tokens side by side;
//! - the scales of the keys, and those of the values;
//! - the codes of the values, token by token.
//!
//! Codes are exact in `f32` and in bfloat16. Products of them add up in the order in which those of numbers do; a key's
//! scale multiplies its score, a value's scale its probability.

use std::ops::Range;

use prefixcache_cpu::{Element, Form, Kernel, Lanes, Rows, RowsMut, Team};

use crate::paged::{GROUP, KvElement};
use crate::rotation::rotate_key;
use crate::{Attention, MAX_HEAD_DIM, Plan};

/// Blocks that keep codes are of a multiple of as many tokens.
pub const CODE_TOKENS: usize = GROUP;

/// The largest code.
const MOST: f32 = 127.0;

/// 1.5 * 2^23: adding it rounds to an integer, which is in the lowest bits then.
const ROUND: f32 = 12_582_912.0;

/// Bytes of the scales of a group's keys, or of its values.
const SCALE_BYTES: usize = GROUP * size_of::<f32>();

impl Attention {
    /// Bytes of a layer's part of a page whose keys and values are codes.
    pub fn code_bytes(&self, block_size: usize) -> usize {
        self.kv_heads() * head_bytes(self.head_dim(), block_size)
    }
}

/// Bytes of a head's part of a page.
fn head_bytes(dims: usize, block_size: usize) -> usize {
    block_size / GROUP * CodeGroup::bytes(dims)
}

/// Where the parts of a group of 16 tokens of one head stand.
pub(crate) struct CodeGroup {
    pub(crate) key_scales: usize,
    pub(crate) value_scales: usize,
    pub(crate) values: usize,
}

impl CodeGroup {
    #[inline(always)]
    pub(crate) fn new(dims: usize) -> Self {
        let key_scales = GROUP * dims;
        let value_scales = key_scales + SCALE_BYTES;
        Self { key_scales, value_scales, values: value_scales + SCALE_BYTES }
    }

    #[inline(always)]
    pub(crate) fn bytes(dims: usize) -> usize {
        2 * (GROUP * dims + SCALE_BYTES)
    }
}

/// Where a head's group of the block's token number `offset` starts in its page.
#[inline(always)]
pub(crate) fn group_at(head: usize, offset: usize, dims: usize, block_size: usize) -> usize {
    head * head_bytes(dims, block_size) + offset / GROUP * CodeGroup::bytes(dims)
}

/// Rounds each token's keys and values [T, K * D] and writes them to its slot, `block * block_size + offset`.
///
/// # Panics
/// The shapes do not fit, blocks are not whole groups of 16 tokens, or a slot lies outside the cache.
pub fn append_codes<E: Element>(
    form: Form,
    team: &Team,
    cache: &RowsMut<'_, u8>,
    plan: &Plan,
    slots: &[i64],
    keys: Rows<'_, E>,
    values: Rows<'_, E>,
) {
    let (attention, size) = (plan.attention(), plan.block_size());
    let shape = (slots.len(), attention.kv_heads() * attention.head_dim());
    assert!(size.is_multiple_of(GROUP), "tokens of a block");
    assert_eq!(cache.width(), attention.code_bytes(size), "width of the cache");
    assert_eq!(keys.shape(), shape, "shape of the keys");
    assert_eq!(values.shape(), shape, "shape of the values");
    let numbers = 2 * slots.len() * attention.head_dim();
    team.run_rows(attention.kv_heads(), numbers, |heads| {
        form.run(Append { cache, plan, slots, keys, values, heads });
    });
}

struct Append<'a, E> {
    cache: &'a RowsMut<'a, u8>,
    plan: &'a Plan,
    slots: &'a [i64],
    keys: Rows<'a, E>,
    values: Rows<'a, E>,
    heads: Range<usize>,
}

impl<E: Element> Kernel for Append<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let (dims, size) = (self.plan.attention().head_dim(), self.plan.block_size());
        let at = CodeGroup::new(dims);
        let (mut codes, mut rotated) = ([0; MAX_HEAD_DIM], [0.0; MAX_HEAD_DIM]);
        let (codes, rotated) = (&mut codes[..dims], &mut rotated[..dims]);
        for (token, &slot) in self.slots.iter().enumerate() {
            let slot = usize::try_from(slot).expect("slots are not negative");
            let (block, offset) = (slot / size, slot % size);
            let place = offset % GROUP;
            for head in self.heads.clone() {
                let group = group_at(head, offset, dims, size);
                // SAFETY: a head belongs to one task, and its parts do not overlap.
                let group = unsafe { self.cache.part(block, group, CodeGroup::bytes(dims)) };
                let numbers = head * dims..(head + 1) * dims;
                rotate_key(&self.keys.row(token)[numbers.clone()], rotated);
                let scale = round_row(rotated, codes);
                let lines = group[..at.key_scales].chunks_exact_mut(GROUP);
                for (line, &code) in lines.zip(&*codes) {
                    line[place] = code;
                }
                write_scale(&mut group[at.key_scales..], place, scale);
                let scale = round_row(&self.values.row(token)[numbers], codes);
                group[at.values + place * dims..][..dims].copy_from_slice(codes);
                write_scale(&mut group[at.value_scales..], place, scale);
            }
        }
    }
}

#[inline(always)]
fn write_scale(scales: &mut [u8], place: usize, scale: f32) {
    scales[place * size_of::<f32>()..][..size_of::<f32>()].copy_from_slice(&scale.to_ne_bytes());
}

/// Writes the codes of a row, and returns its scale.
#[inline(always)]
fn round_row<E: Element>(row: &[E], codes: &mut [u8]) -> f32 {
    // As integers, magnitudes are in the same order, and those that are not finite above all others.
    let mut largest = 0;
    for x in row {
        largest = largest.max(x.to_f32().to_bits() & 0x7fff_ffff);
    }
    let scale = f32::from_bits(largest) / MOST;
    if !scale.is_normal() {
        codes.fill(0);
        return if f32::from_bits(largest).is_finite() { 0.0 } else { f32::NAN };
    }
    for (code, x) in codes.iter_mut().zip(row) {
        // The lowest bits of the sum are those of the integer.
        *code = (x.to_f32() / scale + ROUND).to_bits() as u8;
    }
    scale
}

/// A number of a panel as it stands in memory: a word that products read, or a code that words are made of.
pub(crate) trait PanelNumber<E>: Copy {
    /// Numbers in a row of a word's column: a code is one of what a word holds.
    const PER_WORD: usize;

    /// `L::LANES` words, of the numbers at `from` and `stride` numbers behind them where a word is made of two.
    ///
    /// # Safety
    /// `L::LANES` numbers are readable at each.
    unsafe fn words<L: Lanes>(lanes: L, from: *const Self, stride: usize) -> L::V;
}

impl<E> PanelNumber<E> for u32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    unsafe fn words<L: Lanes>(lanes: L, from: *const Self, _: usize) -> L::V {
        // SAFETY: the caller's promise is the same.
        unsafe { lanes.load(from.cast()) }
    }
}

impl<E: KvElement> PanelNumber<E> for i8 {
    const PER_WORD: usize = E::PER_WORD;

    #[inline(always)]
    unsafe fn words<L: Lanes>(lanes: L, from: *const Self, stride: usize) -> L::V {
        // SAFETY: the caller's promise is the same.
        unsafe { E::join_codes(lanes, from, stride) }
    }
}

/// As [`prefixcache_cpu::tile::dot_tile`], of panels of words or of codes, with the same sums in the same order.
///
/// # Safety
/// Each row is readable for `depth` words, and each panel for `L::LANES` numbers at each of `depth * PER_WORD`
/// multiples of `stride`.
#[inline(always)]
pub(crate) unsafe fn dot_panels<E, P, L, const H: usize, const W: usize>(
    lanes: L,
    acc: &mut [[L::V; W]; H],
    rows: &[*const u32; H],
    panels: &[*const P; W],
    stride: usize,
    depth: usize,
) where
    E: KvElement,
    P: PanelNumber<E>,
    L: Lanes,
{
    for w in 0..depth {
        // SAFETY: w is below `depth`, so the caller vouches for these addresses.
        unsafe {
            let mut columns = [lanes.splat(0.0); W];
            for (column, panel) in columns.iter_mut().zip(panels) {
                *column = P::words(lanes, panel.add(w * P::PER_WORD * stride), stride);
            }
            for r in 0..H {
                let x = lanes.splat_word(rows[r].add(w).read_unaligned());
                for c in 0..W {
                    acc[r][c] = E::dot(lanes, acc[r][c], columns[c], x);
                }
            }
        }
    }
}

/// Writes a group's codes of keys, or of values, as the words that products read: `lines` lines of `line` codes each.
///
/// # Safety
/// `codes` is readable for `lines * line` bytes, both multiples of 16, and `to` writable for as many numbers.
#[inline(always)]
pub(crate) unsafe fn unpack<E: KvElement, L: Lanes>(
    lanes: L,
    codes: *const i8,
    (lines, line): (usize, usize),
    to: *mut u32,
) {
    for first in (0..lines).step_by(E::PER_WORD) {
        for at in (0..line).step_by(L::LANES) {
            // SAFETY: inside what the caller vouches for; `line` is a multiple of LANES.
            unsafe {
                let words = E::join_codes(lanes, codes.add(first * line + at), line);
                lanes.store(to.add(first / E::PER_WORD * line + at).cast(), words);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scale of these numbers, and their codes.
    fn rounded(row: &[f32]) -> (f32, Vec<i8>) {
        let mut codes = vec![77; row.len()];
        let scale = round_row(row, &mut codes);
        (scale, codes.into_iter().map(u8::cast_signed).collect())
    }

    #[test]
    fn rows_are_rounded_to_the_nearest_halves_to_even() {
        let row = [127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -126.5];
        let codes = vec![127, -127, 0, 2, 2, 0, -2, 0, -126];
        for power in [1.0, 2.0_f32.powi(-100), 2.0_f32.powi(100)] {
            assert_eq!(rounded(&row.map(|x| x * power)), (power, codes.clone()));
        }
    }

    #[test]
    fn rows_without_a_scale_are_zeros_or_nan() {
        assert_eq!(rounded(&[0.0, -0.0]), (0.0, vec![0, 0]));
        assert_eq!(rounded(&[1e-38, -1e-40]), (0.0, vec![0, 0]));
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(rounded(&[1.0, bad]).0.is_nan());
        }
        assert!(rounded(&[f32::MAX, 1.0]).0.is_finite());
    }
}
