//! The vocabulary in blocks of sixteen tokens, so that most of it is passed over at one look a block.
//!
//! A tile is 16 x 64 tokens in a row of the vocabulary; its column is a block: sixteen tokens, 64
//! apart, so that vector instructions take the maxima of many blocks side by side. What stands past
//! the end of the vocabulary counts as minus infinity.

use prefixcache_cpu::Lanes;

/// Tokens of a block.
pub const MEMBERS: usize = 16;
/// Blocks of a tile, and the distance of a block's tokens.
pub const WIDTH: usize = 64;
/// Tokens of a tile.
const TILE: usize = MEMBERS * WIDTH;

/// The token that is member `member` of a block.
#[inline(always)]
pub fn token_of(block: usize, member: usize) -> usize {
    block / WIDTH * TILE + member * WIDTH + block % WIDTH
}

/// Values by block.
#[derive(Clone, Copy)]
pub struct Blocks<'a> {
    /// One a token of the vocabulary.
    pub values: &'a [f32],
    /// The largest value of each block.
    pub best: &'a [f32],
    /// The largest of all.
    pub most: f32,
}

impl<'a> Blocks<'a> {
    /// Looks through the values; the maxima are kept in `best`. None where a value is NaN or the largest
    /// is not finite.
    #[inline(always)]
    pub fn new<L: Lanes>(lanes: L, values: &'a [f32], best: &'a mut Vec<f32>) -> Option<Self> {
        best.clear();
        let mut most = f32::NEG_INFINITY;
        let mut is_usable = true;
        let mut padded = [0.0; TILE];
        for start in (0..values.len()).step_by(TILE) {
            let column = Column::of(lanes, chunk_at(values, start, &mut padded));
            best.extend_from_slice(&column.best);
            most = larger(most, column.most);
            is_usable &= !column.is_unusable;
        }
        // Plus 0, which is never -0: a sign that the order of maxima decides.
        let most = most + 0.0;
        let blocks = Self { values, best, most };
        (most.is_finite() && is_usable).then_some(blocks)
    }

    /// The tokens of a block, and their values.
    #[inline(always)]
    pub fn members(self, block: usize) -> impl Iterator<Item = (usize, f32)> + 'a {
        let tokens = (0..MEMBERS).map(move |member| token_of(block, member));
        tokens.map_while(move |token| Some((token, *self.values.get(token)?)))
    }

    /// The tokens whose values are at least `floor`, in no order of use.
    #[inline(always)]
    pub fn tokens_from(self, floor: f32) -> impl Iterator<Item = (usize, f32)> + 'a {
        let blocks = self.best.iter().enumerate();
        let blocks = blocks.filter(move |&(_, &best)| best >= floor);
        let members = blocks.flat_map(move |(block, _)| self.members(block));
        members.filter(move |&(_, value)| value >= floor)
    }

    /// A value that at least `count` tokens reach and few others do.
    ///
    /// None of the `count` largest values lies outside of the `count` blocks with the largest maxima.
    pub fn reached_by(self, count: usize, spare: &mut Vec<f32>) -> f32 {
        if count >= self.best.len() {
            return f32::NEG_INFINITY;
        }
        spare.clear();
        spare.extend_from_slice(self.best);
        largest(spare, count)
    }
}

/// The `count`-th largest number, from 1; puts them in another order.
pub fn largest(numbers: &mut [f32], count: usize) -> f32 {
    let (_, found, _) = numbers.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
    *found
}

/// The token with the largest value, the first of equals; None where a value is NaN or the largest is
/// not finite.
#[inline(always)]
pub fn likeliest<L: Lanes>(lanes: L, values: &[f32]) -> Option<usize> {
    let (mut most, mut at) = (f32::NEG_INFINITY, 0);
    let mut is_usable = true;
    let mut padded = [0.0; TILE];
    for start in (0..values.len()).step_by(TILE) {
        let column = Column::of(lanes, chunk_at(values, start, &mut padded));
        is_usable &= !column.is_unusable;
        if column.most > most {
            (most, at) = (column.most, start);
        }
    }
    if !is_usable || !most.is_finite() {
        return None;
    }
    let place = values[at..].iter().position(|&value| value == most);
    place.map(|place| at + place)
}

/// What a look at a tile finds.
struct Column {
    /// The largest value of each block. A NaN does not count.
    best: [f32; WIDTH],
    most: f32,
    /// Whether a value is NaN or infinite.
    is_unusable: bool,
}

impl Column {
    #[inline(always)]
    fn of<L: Lanes>(lanes: L, tile: &[f32; TILE]) -> Self {
        const { assert!(WIDTH.is_multiple_of(L::LANES) && L::LANES >= 8) };
        let lowest = lanes.splat(f32::NEG_INFINITY);
        let (highest, zero, one) = (lanes.splat(f32::INFINITY), lanes.splat(0.0), lanes.splat(1.0));
        let mut best = [lowest; WIDTH / 8];
        let mut unusable = zero;
        for members in tile.chunks_exact(WIDTH) {
            for (best, values) in best.iter_mut().zip(members.chunks_exact(L::LANES)) {
                // SAFETY: the chunk has LANES numbers.
                let values = unsafe { lanes.load(values.as_ptr()) };
                *best = lanes.max(values, *best);
                unusable = lanes.max(unusable, lanes.select_less(values, highest, zero, one));
            }
        }
        let mut found = [0.0; WIDTH];
        let mut most = lowest;
        for (found, best) in found.chunks_exact_mut(L::LANES).zip(best) {
            // SAFETY: the chunk has LANES numbers.
            unsafe { lanes.store(found.as_mut_ptr(), best) };
            most = lanes.max(best, most);
        }
        Self {
            best: found,
            most: first_of(lanes, lanes.highest(most)),
            is_unusable: lanes.sum(unusable) > 0.0,
        }
    }
}

#[inline(always)]
fn first_of<L: Lanes>(lanes: L, v: L::V) -> f32 {
    let mut numbers = [0.0; 16];
    // SAFETY: the array has 16 numbers, and no form has more lanes.
    unsafe { lanes.store(numbers.as_mut_ptr(), v) };
    numbers[0]
}

/// The larger of two numbers. One instruction.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The `N` values from `start` on. Those past the end are minus infinity, in `padded`.
///
/// No closure over such chunks: it would be compiled without the instructions of a form.
#[inline(always)]
pub fn chunk_at<'a, const N: usize>(
    values: &'a [f32],
    start: usize,
    padded: &'a mut [f32; N],
) -> &'a [f32; N] {
    let rest = &values[start..];
    if let Some(chunk) = rest.first_chunk() {
        return chunk;
    }
    *padded = [f32::NEG_INFINITY; N];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}
