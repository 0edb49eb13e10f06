//! Short convolutions against the obvious sum, and against themselves: the same bits for a row however
//! the tokens around it are cut into steps.

#[path = "common/steps.rs"]
mod steps;

use prefixcache_attention::{KvElement, ShortConv, short_conv};
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team};
use proptest::prelude::*;
use steps::{Chunk, PAGES, noise, page, plan, rows_of};

/// Not whole vectors.
const CHANNELS: usize = 53;

/// Taps, tokens that may be computed again, tokens of a block, and whether there is a bias.
type Shape = (usize, usize, usize, bool);

/// A layer of one convolution.
struct Layer<E> {
    taps: usize,
    /// Tokens of a block whose inputs are kept.
    kept: usize,
    block_size: usize,
    weight: Vec<E>,
    bias: Option<Vec<E>>,
    cache: Vec<E>,
    /// Numbers from a page to the next: other layers stand between.
    stride: usize,
}

impl<E: KvElement> Layer<E> {
    fn new((taps, refused, block_size, has_bias): Shape) -> Self {
        let kept = (taps - 1 + refused).min(block_size);
        let stride = kept * CHANNELS + 7;
        Self {
            taps,
            kept,
            block_size,
            weight: noise(91, taps * CHANNELS),
            bias: has_bias.then(|| noise(92, CHANNELS)),
            cache: vec![E::from_f32(f32::NAN); PAGES * stride],
            stride,
        }
    }
}

impl<E: KvElement> steps::Layer<E> for Layer<E> {
    fn inputs(&self) -> usize {
        3 * CHANNELS
    }

    fn outputs(&self) -> usize {
        CHANNELS
    }

    fn step(&mut self, form: Form, team: &Team, sequences: &[Vec<E>], step: &[Chunk]) -> Vec<E> {
        let mut bcx = rows_of(sequences, step, 3 * CHANNELS);
        let size = self.block_size;
        let of_chunk = |&(sequence, from, to): &Chunk| {
            (from..to).map(move |position| {
                let page = page(0, sequence, position / size) as usize;
                (page * size + position % size) as i64
            })
        };
        let slots: Vec<_> = step.iter().flat_map(of_chunk).collect();
        let plan = plan(step, size, self.taps - 1, 0);
        let conv = ShortConv {
            weight: Rows::new(&self.weight, CHANNELS),
            bias: self.bias.as_deref(),
        };
        let width = self.kept * CHANNELS;
        let mut cache = RowsMut::new(&mut self.cache, self.stride);
        let mut out = vec![E::from_f32(f32::NAN); slots.len() * CHANNELS];
        short_conv(
            form,
            team,
            (&plan, &slots),
            &conv,
            &mut cache.columns(3..3 + width),
            &mut RowsMut::new(&mut bcx, 3 * CHANNELS),
            &RowsMut::new(&mut out, CHANNELS),
        );
        out
    }

    /// Of inputs rounded as the kernel rounds them.
    fn reference(&self, bcx: &[E]) -> Vec<f64> {
        let at = |row: usize, part: usize, channel: usize| {
            bcx[(row * 3 + part) * CHANNELS + channel].to_f32()
        };
        let one = |index: usize| {
            let (position, channel) = (index / CHANNELS, index % CHANNELS);
            let bias = self.bias.as_ref();
            let bias = bias.map_or(0.0, |bias| bias[channel].to_f32());
            let tap = |back: usize| {
                let row = position - back;
                let input = E::from_f32(at(row, 0, channel) * at(row, 2, channel)).to_f32();
                let weight = self.weight[(self.taps - 1 - back) * CHANNELS + channel].to_f32();
                f64::from(weight) * f64::from(input)
            };
            let sum: f64 = (0..self.taps.min(position + 1)).map(tap).sum();
            f64::from(at(position, 1, channel)) * (sum + f64::from(bias))
        };
        (0..bcx.len() / 3).map(one).collect()
    }
}

fn check<E: KvElement + PartialEq>(
    form: Form,
    shape: Shape,
    threads: usize,
    lengths: &[usize],
    chunks: &[usize],
) {
    let tolerance = if size_of::<E>() == 4 { 1e-5 } else { 1e-2 };
    let layer = || Layer::<E>::new(shape);
    steps::check(form, layer, threads, (lengths, chunks), shape.1, tolerance);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_obvious_sum_and_the_same_bits_in_every_schedule(
        form in prop::sample::select(Form::available()),
        taps in 1_usize..=5,
        refused in 1_usize..=4,
        block_size in prop::sample::select(vec![1, 2, 3, 7, 16]),
        has_bias: bool,
        threads in 1_usize..=2,
        lengths in prop::collection::vec(1_usize..40, 1..4),
        chunks in prop::collection::vec(1_usize..20, 1..8),
    ) {
        let shape = (taps, refused, block_size, has_bias);
        check::<f32>(form, shape, threads, &lengths, &chunks);
        check::<Bf16>(form, shape, threads, &lengths, &chunks);
    }
}

/// Sequences of 1, 2 and 3 tokens, one by one and across the end of a block.
#[test]
fn the_first_tokens_see_no_more_than_there_is() {
    for form in Form::available() {
        for block_size in [1, 2, 3, 16] {
            check::<f32>(form, (3, 1, block_size, false), 1, &[1, 2, 3], &[1]);
            check::<Bf16>(form, (3, 1, block_size, true), 1, &[3, 17, 33], &[1, 2, 16]);
        }
    }
}
