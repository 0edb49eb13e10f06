//! The running softmax of a row, and the buffers of a task.

use prefixcache_cpu::memory::{OutOfMemory, filled};
use prefixcache_cpu::tile::MAX_HEIGHT;
use prefixcache_cpu::{AlignedWords, Element, Lanes};

use crate::Attention;
use crate::paged::{GROUP, TILE};

/// What a task keeps while it goes through the tiles; all are words of 4 bytes.
pub(crate) struct Workspace {
    /// `[TILE / 16, D / numbers a word, 16]`: keys of a tile whose blocks hold no packed groups of numbers.
    pub(crate) keys: AlignedWords,
    /// `[TILE / numbers a word, D]`: values of such a tile.
    pub(crate) values: AlignedWords,
    /// `[2, TILE]`: scales of the keys and of the values, where they are codes.
    pub(crate) scales: AlignedWords,
    /// A packed group of zeros, for those behind a window.
    pub(crate) zeros: AlignedWords,
    /// `[MAX_HEIGHT, TILE]`: scores, in `f32`.
    pub(crate) scores: AlignedWords,
    /// `[MAX_HEIGHT, TILE]`: probabilities, in the type of the cache.
    pub(crate) probabilities: AlignedWords,
    /// `[rows, D]`: weighted sums of values, in `f32`.
    pub(crate) sums: AlignedWords,
    /// One a row.
    pub(crate) softmax: Vec<Softmax>,
}

impl Workspace {
    /// `in_place`: the cache holds packed groups of numbers.
    pub(crate) fn new(rows: usize, head_dim: usize, in_place: bool) -> Result<Self, OutOfMemory> {
        let (packed, hidden) = if in_place { (0, GROUP) } else { (TILE, 0) };
        Ok(Self {
            keys: AlignedWords::zeroed(head_dim * packed)?,
            values: AlignedWords::zeroed(head_dim * packed)?,
            scales: AlignedWords::zeroed(2 * TILE)?,
            zeros: AlignedWords::zeroed(head_dim * hidden)?,
            scores: AlignedWords::zeroed(MAX_HEIGHT * TILE)?,
            probabilities: AlignedWords::zeroed(MAX_HEIGHT * TILE)?,
            sums: AlignedWords::zeroed(rows.checked_mul(head_dim).ok_or(OutOfMemory)?)?,
            softmax: filled(Softmax::default(), rows, 1)?,
        })
    }
}

/// The running softmax of one row; each number in all lanes of a vector.
#[derive(Clone, Copy)]
pub(crate) struct Softmax {
    highest: [f32; 16],
    /// The factor for what was summed before the last tile.
    factor: [f32; 16],
    /// Sums of the probabilities, by the key's number modulo the lanes.
    totals: [f32; 16],
}

impl Default for Softmax {
    fn default() -> Self {
        Self { highest: [f32::NEG_INFINITY; 16], factor: [0.0; 16], totals: [0.0; 16] }
    }
}

/// Keys of a tile that a row sees: from..to, as numbers within the tile.
#[derive(Clone, Copy)]
pub(crate) struct Sight {
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl Softmax {
    /// Takes in the first `vectors` vectors of a row's dot products and turns them into
    /// probabilities. `scales`, where there are some, are those of the keys and of the values: a value's multiplies its
    /// probability, after that is added to the total.
    ///
    /// # Safety
    /// `scores` is writable and `probabilities` writable for `vectors * LANES` numbers, and scales are readable for as
    /// many.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "a kernel's operands")]
    pub(crate) unsafe fn advance<E: Element, L: Lanes>(
        &mut self,
        lanes: L,
        attention: &Attention,
        sight: Sight,
        vectors: usize,
        scales: Option<[*const f32; 2]>,
        scores: *mut f32,
        probabilities: *mut E,
    ) {
        // SAFETY: the three arrays hold 16 numbers, at least LANES.
        let (before, totals) =
            unsafe { (lanes.load(self.highest.as_ptr()), lanes.load(self.totals.as_ptr())) };
        let mut highest = before;
        for v in 0..vectors {
            // SAFETY: v is below `vectors`.
            unsafe {
                let at = scores.add(v * L::LANES);
                let mut dot = lanes.load(at);
                if let Some([keys, _]) = scales {
                    dot = lanes.mul(dot, lanes.load(keys.add(v * L::LANES)));
                }
                let score = scaled(lanes, attention, dot);
                let seen = mask(lanes, sight, v * L::LANES, score);
                lanes.store(at, seen);
                highest = lanes.max(highest, seen);
            }
        }
        let highest = lanes.highest(highest);
        // A row that has seen nothing yet must not compute infinity minus infinity.
        let nothing = lanes.splat(f32::MIN);
        let base = lanes.select_less(highest, nothing, lanes.splat(0.0), highest);
        let factor = lanes.exp(lanes.sub(before, base));
        let mut totals = lanes.mul(totals, factor);
        for v in 0..vectors {
            // SAFETY: v is below `vectors`.
            unsafe {
                let score = lanes.load(scores.add(v * L::LANES));
                let p = lanes.exp(lanes.sub(score, base));
                totals = lanes.add(totals, p);
                let mut weight = p;
                if let Some([_, values]) = scales {
                    let zero = lanes.splat(0.0);
                    let scaled = lanes.mul(p, lanes.load(values.add(v * L::LANES)));
                    // Out of sight a scale may be anything.
                    weight = lanes.select_less(zero, p, scaled, zero);
                }
                E::store(lanes, probabilities.add(v * L::LANES), weight);
            }
        }
        // SAFETY: as above.
        unsafe {
            lanes.store(self.highest.as_mut_ptr(), highest);
            lanes.store(self.factor.as_mut_ptr(), factor);
            lanes.store(self.totals.as_mut_ptr(), totals);
        }
    }

    /// The factor for what was summed before the last tile, in every lane.
    #[inline(always)]
    pub(crate) fn factor<L: Lanes>(&self, lanes: L) -> L::V {
        // SAFETY: `factor` holds 16 numbers, at least LANES.
        unsafe { lanes.load(self.factor.as_ptr()) }
    }

    /// What a score has become at the side of those that were taken in, in every lane. Infinity where it
    /// is so much higher that they count for nothing.
    #[inline(always)]
    pub(crate) fn probability<L: Lanes>(&self, lanes: L, score: f32) -> L::V {
        // SAFETY: `highest` holds 16 numbers, at least LANES.
        let highest = unsafe { lanes.load(self.highest.as_ptr()) };
        lanes.exp(lanes.sub(lanes.splat(score), highest))
    }

    /// The sum of all probabilities.
    #[inline(always)]
    pub(crate) fn total<L: Lanes>(&self, lanes: L) -> f32 {
        // SAFETY: `totals` holds 16 numbers, at least LANES.
        lanes.sum(unsafe { lanes.load(self.totals.as_ptr()) })
    }
}

#[inline(always)]
fn scaled<L: Lanes>(lanes: L, attention: &Attention, dot: L::V) -> L::V {
    let score = lanes.mul(dot, lanes.splat(attention.scale));
    match attention.softcap {
        None => score,
        Some(cap) => {
            let cap = lanes.splat(cap);
            lanes.mul(cap, lanes.tanh(lanes.div(score, cap)))
        }
    }
}

/// Puts minus infinity where the key is out of sight; lane i is key `first + i` of the tile.
#[inline(always)]
fn mask<L: Lanes>(lanes: L, sight: Sight, first: usize, score: L::V) -> L::V {
    if sight.from <= first && first + L::LANES <= sight.to {
        return score;
    }
    let hidden = lanes.splat(f32::NEG_INFINITY);
    let key = lanes.add(lanes.iota(), lanes.splat(first as f32));
    let seen = lanes.select_less(key, lanes.splat(sight.to as f32), score, hidden);
    lanes.select_less(key, lanes.splat(sight.from as f32), hidden, seen)
}
