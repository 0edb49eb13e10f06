//! The vocabulary in blocks of sixteen tokens, so that most of it is passed over at one look a block.
//!
//! A tile is 16 x 64 tokens in a row of the vocabulary; its column is a block: sixteen tokens, 64
//! apart, so that vector instructions take the maxima of many blocks side by side. What stands past
//! the end of the vocabulary counts as minus infinity.

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
    pub fn new(values: &'a [f32], best: &'a mut Vec<f32>) -> Option<Self> {
        best.clear();
        let mut most = f32::NEG_INFINITY;
        let mut has_nan = false;
        each_padded::<TILE>(values, |_, tile| {
            let column = Column::of(tile);
            best.extend_from_slice(&column.best);
            most = larger(most, column.most());
            has_nan |= column.has_nan;
        });
        let blocks = Self { values, best, most };
        (most.is_finite() && !has_nan).then_some(blocks)
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
pub fn likeliest(values: &[f32]) -> Option<usize> {
    let (mut most, mut at) = (f32::NEG_INFINITY, 0);
    let mut has_nan = false;
    each_padded::<TILE>(values, |start, tile| {
        let column = Column::of(tile);
        has_nan |= column.has_nan;
        let of_tile = column.most();
        if of_tile > most {
            (most, at) = (of_tile, start);
        }
    });
    if has_nan || !most.is_finite() {
        return None;
    }
    let place = values[at..].iter().position(|&value| value == most);
    place.map(|place| at + place)
}

/// What a look at a tile finds.
struct Column {
    best: [f32; WIDTH],
    has_nan: bool,
}

impl Column {
    #[inline(always)]
    fn of(tile: &[f32; TILE]) -> Self {
        let mut best = [f32::NEG_INFINITY; WIDTH];
        let mut nan = [false; WIDTH];
        for members in tile.chunks_exact(WIDTH) {
            for i in 0..WIDTH {
                best[i] = larger(best[i], members[i]);
                nan[i] |= members[i].is_nan();
            }
        }
        let has_nan = nan.iter().fold(false, |any, &one| any | one);
        Self { best, has_nan }
    }

    #[inline(always)]
    fn most(&self) -> f32 {
        let mut best = self.best;
        let mut half = WIDTH / 2;
        while half > 0 {
            for i in 0..half {
                best[i] = larger(best[i], best[i + half]);
            }
            half /= 2;
        }
        best[0]
    }
}

/// The larger of two numbers: `a` where `b` is NaN. One instruction.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// Calls `work` with each `N` values and the place of the first; minus infinity fills the last ones up.
#[inline(always)]
pub fn each_padded<const N: usize>(values: &[f32], mut work: impl FnMut(usize, &[f32; N])) {
    let (chunks, rest) = values.as_chunks::<N>();
    for (i, chunk) in chunks.iter().enumerate() {
        work(i * N, chunk);
    }
    if !rest.is_empty() {
        let mut padded = [f32::NEG_INFINITY; N];
        padded[..rest.len()].copy_from_slice(rest);
        work(values.len() - rest.len(), &padded);
    }
}
