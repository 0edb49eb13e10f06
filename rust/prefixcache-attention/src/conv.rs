//! Short convolutions over the last tokens of a sequence, out of the paged cache.
//!
//! A token's input is B * x. Its output is C times a weighted sum, channel by channel, of its own input
//! and those of the `taps - 1` tokens before it. Those before the step stand in the cache, of which a
//! block keeps the inputs of its last `kept` tokens alone: number p of a block stands in row `p % kept`.
//! With `taps - 1 + n` of them the last n tokens of a sequence may be computed again.
//!
//! Inputs are rounded to the type of the cache before they are added, wherever they come from, and the
//! sum goes from the oldest token to the newest in `f32`: a row is the same, bit for bit, whichever tokens
//! are computed with it.

use std::ops::Range;

use prefixcache_cpu::lanes::vectors;
use prefixcache_cpu::{Element, Form, Kernel, Lanes, Rows, RowsMut, Team};

use crate::Plan;

/// The most tokens that an output is made of.
pub const MAX_TAPS: usize = 8;

/// A convolution over the last tokens, each channel on its own.
#[derive(Clone, Copy)]
pub struct ShortConv<'a, E> {
    /// [taps, channels], the oldest token's first: from 1 to [`MAX_TAPS`] of them.
    pub weight: Rows<'a, E>,
    /// Added to each channel's sum.
    pub bias: Option<&'a [E]>,
}

/// Writes each token's output to `out` [T, channels], then its input to the cache.
///
/// `bcx` is [T, 3 * channels]: B, C and x. B * x takes the place of B. The cache has a row for each page,
/// of a multiple of `channels` numbers: the inputs that a block keeps, of at least `taps - 1` tokens or of
/// all. `slots` say where the tokens go, as for [`crate::append`]. The plan's window is that of the taps.
///
/// # Panics
/// The shapes do not fit each other or the plan, there are too many taps, or the plan's window is shorter.
pub fn short_conv<E: Element>(
    form: Form,
    team: &Team,
    (plan, slots): (&Plan, &[i64]),
    conv: &ShortConv<'_, E>,
    cache: &mut RowsMut<'_, E>,
    bcx: &mut RowsMut<'_, E>,
    out: &RowsMut<'_, E>,
) {
    let (taps, channels) = conv.weight.shape();
    let rows = plan.num_queries();
    let seen = plan.attention().window_left.unwrap_or(usize::MAX);
    assert!((1..=MAX_TAPS).contains(&taps), "taps");
    assert!(seen >= taps - 1, "window of the plan");
    assert_eq!(bcx.shape(), (rows, 3 * channels), "shape of bcx");
    assert_eq!(out.shape(), (rows, channels), "shape of out");
    assert_eq!(slots.len(), rows, "number of slots");
    assert!(cache.rows() >= plan.num_pages(), "rows of the cache");
    if channels == 0 {
        return;
    }
    let kept = cache.width() / channels;
    assert_eq!(cache.width(), kept * channels, "width of the cache");
    assert!(kept >= (taps - 1).min(plan.block_size()) && kept > 0, "kept tokens");
    let inputs = &*bcx;
    team.run_rows(rows, channels, |rows| form.run(Inputs { bcx: inputs, rows }));
    let (bcx, before) = (bcx.read(), cache.read());
    team.run_rows(rows, channels, |rows| {
        form.run(Outputs { plan, conv, before, bcx, out, rows });
    });
    keep(plan, slots, kept, bcx.columns(0..channels), cache);
}

/// Writes the inputs to the cache: of each block those of the step's last tokens there.
fn keep<E: Element>(
    plan: &Plan,
    slots: &[i64],
    kept: usize,
    inputs: Rows<'_, E>,
    cache: &RowsMut<'_, E>,
) {
    let (size, channels) = (plan.block_size(), inputs.width());
    for (row, &slot) in slots.iter().enumerate() {
        let slot = usize::try_from(slot).expect("slots are not negative");
        let (page, offset) = (slot / size, slot % size);
        // A later token of the step takes its place.
        if offset + kept < size && row + kept < plan.end_of(row) {
            continue;
        }
        // SAFETY: this thread alone uses the cache now.
        let place = unsafe { cache.part(page, offset % kept * channels, channels) };
        place.copy_from_slice(inputs.row(row));
    }
}

/// Makes B * x of rows.
struct Inputs<'a, E> {
    bcx: &'a RowsMut<'a, E>,
    rows: Range<usize>,
}

impl<E: Element> Kernel for Inputs<'_, E> {
    type Output = ();

    const HAS_BF16: bool = E::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let channels = self.bcx.width() / 3;
        for row in self.rows {
            // SAFETY: a row belongs to one task.
            let row = unsafe { self.bcx.part(row, 0, 3 * channels) };
            let (b, cx) = row.split_at_mut(channels);
            let x = &cx[channels..];
            for (at, count) in vectors::<L>(channels) {
                let product = lanes.mul(load(lanes, b, at, count), load(lanes, x, at, count));
                // SAFETY: `count` numbers stand at `at`.
                unsafe { E::store_some(lanes, b[at..].as_mut_ptr(), product, count) };
            }
        }
    }
}

/// Makes the outputs of rows.
struct Outputs<'a, E> {
    plan: &'a Plan,
    conv: &'a ShortConv<'a, E>,
    /// The cache.
    before: Rows<'a, E>,
    bcx: Rows<'a, E>,
    out: &'a RowsMut<'a, E>,
    rows: Range<usize>,
}

impl<E: Element> Kernel for Outputs<'_, E> {
    type Output = ();

    const HAS_BF16: bool = E::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let channels = self.out.width();
        for row in self.rows.clone() {
            let mut inputs: [&[E]; MAX_TAPS] = [&[]; MAX_TAPS];
            let first = self.find(row, &mut inputs);
            let inputs = &inputs[first..self.conv.weight.rows()];
            let c = &self.bcx.row(row)[channels..2 * channels];
            // SAFETY: a row belongs to one task.
            let out = unsafe { self.out.part(row, 0, channels) };
            for (at, count) in vectors::<L>(channels) {
                let mut sum = match self.conv.bias {
                    Some(bias) => load(lanes, bias, at, count),
                    None => lanes.splat(0.0),
                };
                for (tap, input) in inputs.iter().enumerate() {
                    let weight = load(lanes, self.conv.weight.row(first + tap), at, count);
                    sum = lanes.mul_add(weight, load(lanes, input, at, count), sum);
                }
                let gated = lanes.mul(load(lanes, c, at, count), sum);
                // SAFETY: `count` numbers stand at `at`.
                unsafe { E::store_some(lanes, out[at..].as_mut_ptr(), gated, count) };
            }
        }
    }
}

impl<'a, E: Element> Outputs<'a, E> {
    /// Finds the input of each tap, the oldest first; the first tap that has one.
    #[inline(always)]
    fn find(&self, row: usize, inputs: &mut [&'a [E]; MAX_TAPS]) -> usize {
        let (taps, channels) = self.conv.weight.shape();
        let kept = self.before.width() / channels;
        let (sequence, position, own) = self.plan.row(row);
        let first = (taps - 1).saturating_sub(position);
        for (tap, input) in inputs.iter_mut().enumerate().take(taps).skip(first) {
            let back = taps - 1 - tap;
            *input = if back <= own {
                &self.bcx.row(row - back)[..channels]
            } else {
                let (page, offset) = self.plan.place(sequence, position - back);
                &self.before.row(page)[offset % kept * channels..][..channels]
            };
        }
        first
    }
}

/// `count` of the numbers, from `at` on.
#[inline(always)]
fn load<E: Element, L: Lanes>(lanes: L, numbers: &[E], at: usize, count: usize) -> L::V {
    let from = numbers[at..at + count].as_ptr();
    // SAFETY: as many stand there.
    unsafe { E::load_some(lanes, from, count) }
}
