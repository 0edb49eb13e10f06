//! The paged cache: where its numbers stand, writing tokens to it, and packing a tile of it.
//!
//! A layer's cache is a matrix of P rows: a block's keys of each head, then its values of each head,
//! B * D numbers a head. Rows may lie apart, so that layers share the memory of a block. Blocks of whole groups of 16 tokens hold each group as the dot
//! products read it, so that a step reads the cache and copies nothing:
//!
//! - keys by word, then by token: the words w of 16 tokens are adjacent;
//! - values by pairs of tokens (bfloat16) or by token (f32): word d holds number d of each.
//!
//! Other blocks hold their tokens one after the other, and are packed tile by tile.

use prefixcache_cpu::{Bf16, Element, Lanes, Rows, RowsMut};

use crate::Plan;

/// Keys of a tile.
pub(crate) const TILE: usize = 64;

/// Tokens that lie packed together.
pub(crate) const GROUP: usize = 16;

/// Whether blocks of this size hold packed groups.
#[inline(always)]
pub(crate) fn holds_groups(block_size: usize) -> bool {
    block_size.is_multiple_of(GROUP)
}

/// Writes each token's keys and values [T, K * D] to its slot, `block * block_size + offset`.
///
/// The tokens of a block are written in their order, by one call or by several.
///
/// # Panics
/// The shapes do not fit, or a slot lies outside the cache.
pub fn append<E: Element>(
    cache: &RowsMut<'_, E>,
    plan: &Plan,
    slots: &[i64],
    keys: Rows<'_, E>,
    values: Rows<'_, E>,
) {
    let (attention, block_size) = (plan.attention(), plan.block_size());
    let (heads, dims) = (attention.kv_heads(), attention.head_dim());
    let (page, shape) = (block_size * dims, (slots.len(), heads * dims));
    assert_eq!(cache.width(), 2 * heads * page, "width of the cache");
    assert_eq!(keys.shape(), shape, "shape of the keys");
    assert_eq!(values.shape(), shape, "shape of the values");
    for (token, &slot) in slots.iter().enumerate() {
        let slot = usize::try_from(slot).expect("slots are not negative");
        let (block, offset) = (slot / block_size, slot % block_size);
        let heads_of = |row| keys_and_values(keys.row(row), values.row(row), dims);
        for (head, (key, value)) in heads_of(token).enumerate() {
            // SAFETY: this thread alone writes, and the parts do not overlap.
            let (key_page, value_page) = unsafe {
                (
                    cache.part(block, head * page, page),
                    cache.part(block, (head + heads) * page, page),
                )
            };
            if holds_groups(block_size) {
                write_grouped_key(key_page, offset, key);
                write_grouped_value(value_page, offset, value);
            } else {
                key_page[offset * dims..][..dims].copy_from_slice(key);
                value_page[offset * dims..][..dims].copy_from_slice(value);
            }
        }
    }
}

fn keys_and_values<'a, E>(
    keys: &'a [E],
    values: &'a [E],
    dims: usize,
) -> impl Iterator<Item = (&'a [E], &'a [E])> {
    keys.chunks_exact(dims).zip(values.chunks_exact(dims))
}

fn write_grouped_key<E: Element>(page: &mut [E], offset: usize, key: &[E]) {
    let group = &mut page[offset / GROUP * GROUP * key.len()..][..GROUP * key.len()];
    let lines = group.chunks_exact_mut(GROUP * E::PER_WORD);
    let place = offset % GROUP * E::PER_WORD;
    for (line, word) in lines.zip(key.chunks_exact(E::PER_WORD)) {
        line[place..place + E::PER_WORD].copy_from_slice(word);
    }
}

/// Also zeroes what follows in the same words, which may be left from another sequence: a tile
/// reads whole words.
fn write_grouped_value<E: Element>(page: &mut [E], offset: usize, value: &[E]) {
    let line = E::PER_WORD * value.len();
    let words = page[offset / E::PER_WORD * line..][..line].chunks_exact_mut(E::PER_WORD);
    for (word, &number) in words.zip(value) {
        word[offset % E::PER_WORD] = number;
        word[offset % E::PER_WORD + 1..].fill(E::from_f32(0.0));
    }
}

/// A number type of the cache: how the values of neighbouring keys share words.
pub trait KvElement: Element {
    /// Packs the values of `PER_WORD` keys: word d holds number d of each. Null stands for zeros.
    ///
    /// # Safety
    /// `keys` holds `PER_WORD` rows, each null or readable for `dims` numbers, a multiple of 16;
    /// `to` is writable for `dims` words.
    unsafe fn pack_values<L: Lanes>(lanes: L, keys: &[*const Self], dims: usize, to: *mut u32);

    /// Words of the numbers that the codes at `from` are, and of those `line` bytes behind them, where a word holds two.
    ///
    /// # Safety
    /// `L::LANES` bytes are readable at each.
    unsafe fn join_codes<L: Lanes>(lanes: L, from: *const i8, line: usize) -> L::V;
}

impl KvElement for f32 {
    #[inline(always)]
    unsafe fn pack_values<L: Lanes>(lanes: L, keys: &[*const Self], dims: usize, to: *mut u32) {
        for d in (0..dims).step_by(L::LANES) {
            // SAFETY: `dims` is a multiple of LANES, so d + LANES stays within what the caller
            // vouches for.
            unsafe { lanes.store(to.add(d).cast(), load_or_zeros(lanes, keys[0], d)) }
        }
    }

    #[inline(always)]
    unsafe fn join_codes<L: Lanes>(lanes: L, from: *const i8, _: usize) -> L::V {
        // SAFETY: the caller's promise is the same.
        unsafe { lanes.load_i8(from) }
    }
}

impl KvElement for Bf16 {
    #[inline(always)]
    unsafe fn pack_values<L: Lanes>(lanes: L, keys: &[*const Self], dims: usize, to: *mut u32) {
        for d in (0..dims).step_by(L::LANES) {
            // SAFETY: as above.
            unsafe {
                let even = load_or_zeros(lanes, keys[0], d);
                let odd = load_or_zeros(lanes, keys[1], d);
                lanes.store(to.add(d).cast(), lanes.zip_upper(even, odd));
            }
        }
    }

    #[inline(always)]
    unsafe fn join_codes<L: Lanes>(lanes: L, from: *const i8, line: usize) -> L::V {
        // SAFETY: the caller vouches for both. Codes have at most 7 bits, so the lower halves are zero.
        unsafe { lanes.zip_upper(lanes.load_i8(from), lanes.load_i8(from.add(line))) }
    }
}

#[inline(always)]
unsafe fn load_or_zeros<E: Element, L: Lanes>(lanes: L, row: *const E, at: usize) -> L::V {
    match row.is_null() {
        true => lanes.splat(0.0),
        // SAFETY: the caller vouches for a vector of numbers at `at`.
        false => unsafe { E::load(lanes, row.add(at)) },
    }
}

/// Packs keys for scores: word w of key k stands at `to[(k / 16 * words + w) * 16 + k % 16]`.
///
/// # Safety
/// Each row is null or readable for `words` words; `to` is writable for `words * TILE` words.
#[inline(always)]
pub(crate) unsafe fn pack_keys<E: Element, L: Lanes>(
    lanes: L,
    keys: &[*const E; TILE],
    words: usize,
    to: *mut u32,
) {
    let (groups, _) = keys.as_chunks::<GROUP>();
    for (number, group) in groups.iter().enumerate() {
        if group.iter().all(|key| key.is_null()) {
            continue; // Out of every row's sight: whatever is there will be masked.
        }
        // SAFETY: as the caller vouches; a group takes `words` lines of 16 words.
        unsafe {
            let to = to.add(number * words * GROUP);
            lanes.transpose(&group.map(|key| key.cast()), words, to, GROUP);
        }
    }
}
