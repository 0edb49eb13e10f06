//! Where the last tokens of a text were seen before: a table of buckets for each number of tokens.
//!
//! A bucket has the [`WAYS`] places that were put into it last, so a text that fills one pushes out its own places,
//! and a text made of different tokens throughout pushes out others by chance. The hash is a polynomial over a secret
//! point, so which tokens share a bucket cannot be known from outside. A place may be stale or of other tokens: the
//! reader compares the text.

use std::collections::TryReserveError;
use std::hash::{BuildHasher, RandomState};

use crate::mix::mix;

/// Who may read a text: a hash of 122 bits.
pub(crate) type Scope = u128;

/// The numbers of tokens that places are found by. With 8 between them, or 3 or 4 in place of 2, recorded chats and
/// edits are guessed no better.
pub(crate) const ORDERS: [usize; 2] = [2, 32];

/// Places of a bucket, 32 bytes: half a cache line.
pub(crate) const WAYS: usize = 8;

/// Bits of an entry that are the place; the others are bits of the hash.
pub(crate) const PLACE_BITS: u32 = 24;

const LONGEST: usize = ORDERS[ORDERS.len() - 1];
const PRIME: u64 = (1 << 61) - 1;

fn mul(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    let sum = (product as u64 & PRIME) + (product >> 61) as u64;
    if sum >= PRIME { sum - PRIME } else { sum }
}

/// Hashes of the last tokens of a text, one for each of [`ORDERS`].
#[derive(Clone)]
pub(crate) struct Rolling {
    recent: [u32; LONGEST],
    count: usize,
    hashes: [u64; ORDERS.len()],
}

impl Rolling {
    pub(crate) fn new() -> Self {
        Self { recent: [0; LONGEST], count: 0, hashes: [0; ORDERS.len()] }
    }
}

type Bucket = [u32; WAYS];

/// The tables.
pub(crate) struct Grams {
    tables: [Vec<Bucket>; ORDERS.len()],
    /// The secret point, and its power for each of [`ORDERS`].
    point: u64,
    powers: [u64; ORDERS.len()],
    key: u64,
    scope_points: [u64; 2],
}

/// A bucket and the bits of the hash that its entries have.
struct Spot {
    bucket: usize,
    tag: u32,
}

impl Grams {
    /// Tables for a ring of `num_places` places. They have half as much room again: a bucket gets more than its share.
    pub(crate) fn new(num_places: usize, secret: u64) -> Result<Self, TryReserveError> {
        let mut tables = [const { Vec::new() }; ORDERS.len()];
        let num_buckets = (num_places * 3 / 2).div_ceil(WAYS);
        for table in &mut tables {
            table.try_reserve_exact(num_buckets)?;
            table.resize(num_buckets, [0; WAYS]);
        }
        let [point, low, high] = [0, 1, 2].map(|i| mix(secret.wrapping_add(i)) % (PRIME - 2) + 2);
        let power = |order: usize| (0..order).fold(1, |power, _| mul(power, point));
        Ok(Self {
            tables,
            point,
            powers: ORDERS.map(power),
            key: mix(secret.wrapping_add(3)),
            scope_points: [low, high],
        })
    }

    /// A number that nobody outside knows.
    pub(crate) fn secret() -> u64 {
        RandomState::new().hash_one(0)
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.tables.iter().map(|table| size_of_val(&table[..])).sum()
    }

    /// The scope of that name; of one stream alone if it has a number. No one outside can make two that are the same,
    /// and none is 0.
    pub(crate) fn scope(&self, name: &[u8], of_one: Option<u64>) -> Scope {
        let number = of_one.map(u64::to_le_bytes);
        let bytes = name.iter().chain(number.iter().flatten());
        let hash = |point| {
            let first = 1 + u64::from(of_one.is_some());
            bytes
                .clone()
                .fold(first, |hash, &byte| (mul(hash, point) + u64::from(byte) + 1) % PRIME)
        };
        let [low, high] = self.scope_points.map(hash);
        (u128::from(high) << 64 | u128::from(low)).max(1)
    }

    /// Adds a token to the text.
    pub(crate) fn roll(&self, text: &mut Rolling, token: u32) {
        for (i, order) in ORDERS.into_iter().enumerate() {
            let mut hash = mul(text.hashes[i], self.point) + u64::from(token) + 1;
            if text.count >= order {
                let left = text.recent[(text.count - order) % LONGEST];
                hash += PRIME - mul(self.powers[i], u64::from(left) + 1);
            }
            text.hashes[i] = hash % PRIME;
        }
        text.recent[text.count % LONGEST] = token;
        text.count += 1;
    }

    /// None while the text has fewer tokens than that order.
    fn spot(&self, text: &Rolling, scope: Scope, order: usize) -> Option<Spot> {
        let salted = text.hashes[order] ^ self.key ^ (scope as u64);
        let hash = mix(salted.wrapping_add(order as u64));
        let buckets = self.tables[order].len() as u64;
        (text.count >= ORDERS[order]).then(|| Spot {
            bucket: ((u128::from(hash) * u128::from(buckets)) >> 64) as usize,
            tag: (hash as u32) << PLACE_BITS,
        })
    }

    /// Puts the place of the text's last token into the tables.
    pub(crate) fn put(&mut self, text: &Rolling, scope: Scope, place: usize) {
        for order in 0..ORDERS.len() {
            let Some(spot) = self.spot(text, scope, order) else {
                return;
            };
            let bucket = &mut self.tables[order][spot.bucket];
            bucket.copy_within(..WAYS - 1, 1);
            bucket[0] = spot.tag | place as u32;
        }
    }

    /// Places where the last tokens of the text may have been seen, the latest first.
    pub(crate) fn places(
        &self,
        text: &Rolling,
        scope: Scope,
        order: usize,
    ) -> impl Iterator<Item = usize> {
        let spot = self.spot(text, scope, order);
        let of = move |spot: Spot| {
            let has_tag = move |entry: &u32| entry >> PLACE_BITS == spot.tag >> PLACE_BITS;
            let places = self.tables[order][spot.bucket].into_iter().filter(has_tag);
            places.map(|entry| (entry & ((1 << PLACE_BITS) - 1)) as usize)
        };
        spot.into_iter().flat_map(of)
    }
}
