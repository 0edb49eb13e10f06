//! The paged cache: writing tokens to it, and packing a tile of it for the dot products.

use prefixcache_cpu::{Bf16, Element, Lanes, Rows, RowsMut};

/// Keys of a tile.
pub(crate) const TILE: usize = 64;

/// Writes each token's keys and values [T, K * D] to its slot, `block * block_size + offset`.
///
/// `cache` has a row of K * D numbers for each of P * 2 * B tokens.
///
/// # Panics
/// The shapes do not fit, or a slot lies outside the cache.
pub fn append<E: Element>(
    cache: &RowsMut<'_, E>,
    block_size: usize,
    slots: &[i64],
    keys: Rows<'_, E>,
    values: Rows<'_, E>,
) {
    assert_eq!(
        (keys.rows(), keys.width()),
        (slots.len(), cache.width()),
        "shape of the keys"
    );
    assert_eq!(
        (values.rows(), values.width()),
        (slots.len(), cache.width()),
        "shape of the values"
    );
    for (token, &slot) in slots.iter().enumerate() {
        let slot = usize::try_from(slot).expect("slots are not negative");
        let row = slot / block_size * 2 * block_size + slot % block_size;
        // SAFETY: this thread alone writes, and each part ends before the next is asked for.
        unsafe {
            cache
                .part(row, 0, cache.width())
                .copy_from_slice(keys.row(token));
            cache
                .part(row + block_size, 0, cache.width())
                .copy_from_slice(values.row(token));
        }
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
}

#[inline(always)]
unsafe fn load_or_zeros<E: Element, L: Lanes>(lanes: L, row: *const E, at: usize) -> L::V {
    match row.is_null() {
        true => lanes.splat(0.0),
        // SAFETY: the caller vouches for a vector of numbers at `at`.
        false => unsafe { E::load(lanes, row.add(at)) },
    }
}

/// Packs keys for scores: word w of key k stands at `to[w * TILE + k]`.
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
    let (groups, _) = keys.as_chunks::<16>();
    for (number, group) in groups.iter().enumerate() {
        if group.iter().all(|key| key.is_null()) {
            continue; // Out of every row's sight: whatever is there will be masked.
        }
        // SAFETY: as the caller vouches; 16 columns from `number * 16` stay inside a line.
        unsafe {
            lanes.transpose(
                &group.map(|key| key.cast()),
                words,
                to.add(number * 16),
                TILE,
            );
        }
    }
}
