//! Short convolutions against the obvious sum, and against themselves: the same bits for a row however
//! the tokens around it are cut into steps.

use prefixcache_attention::{Attention, KvElement, ShortConv, short_conv};
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team};
use proptest::prelude::*;

use crate::common::{self, Chunk, Guesses, page, plan};
use crate::noise::noise;

const PAGES: usize = 128;

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

impl<E: KvElement> common::Layer<E> for Layer<E> {
    const OF_F32: f64 = 1e-5;

    fn widths(&self) -> [usize; 2] {
        [3 * CHANNELS, CHANNELS]
    }

    fn step(
        &mut self,
        form: Form,
        team: &Team,
        sequences: &[Vec<E>],
        step: &[Chunk],
        _: &[Guesses],
    ) -> Vec<E> {
        let (mut bcx, mut slots) = (Vec::new(), Vec::new());
        let size = self.block_size;
        for &(sequence, from, to) in step {
            bcx.extend_from_slice(&sequences[sequence][from * 3 * CHANNELS..to * 3 * CHANNELS]);
            slots.extend((from..to).map(|position| {
                let page = page(PAGES, 0, sequence, position / size) as usize;
                (page * size + position % size) as i64
            }));
        }
        let mut window = Attention::new(1, 1, 16, 1.0).expect("a shape that fits");
        window.window_left = Some(self.taps - 1);
        let plan = plan((PAGES, size), &window, true, step, |place, index| {
            page(PAGES, 0, step[place].0, index)
        });
        let conv =
            ShortConv { weight: Rows::new(&self.weight, CHANNELS), bias: self.bias.as_deref() };
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
    fn reference(&self, bcx: &[E]) -> Vec<(usize, f64)> {
        let at = |row: usize, part: usize, channel: usize| {
            bcx[(row * 3 + part) * CHANNELS + channel].to_f32()
        };
        (0..bcx.len() / 3)
            .map(|number| {
                let (position, channel) = (number / CHANNELS, number % CHANNELS);
                let bias = (self.bias.as_ref()).map_or(0.0, |bias| bias[channel].to_f32());
                let term = |back: usize| {
                    let row = position - back;
                    let input = E::from_f32(at(row, 0, channel) * at(row, 2, channel)).to_f32();
                    let weight = self.weight[(self.taps - 1 - back) * CHANNELS + channel].to_f32();
                    f64::from(weight) * f64::from(input)
                };
                let sum: f64 = (0..self.taps.min(position + 1)).map(term).sum();
                let gate = f64::from(at(position, 1, channel));
                (number, gate * (sum + f64::from(bias)))
            })
            .collect()
    }
}

/// Every third chunk computes tokens of the one before again, up to as many as may be.
fn check<E: KvElement + PartialEq>(
    form: Form,
    shape: Shape,
    threads: usize,
    lengths: &[usize],
    chunks: &[usize],
) {
    let (mut chunks, mut again) = (chunks.iter().cycle(), (1..=shape.1).cycle());
    let mut turns = 0;
    let layer = || Layer::<E>::new(shape);
    common::check((form, threads), lengths, layer, &mut layer(), |done, length| {
        turns += 1;
        let back = if turns % 3 == 0 { again.next() } else { None };
        let to = length.min(done + chunks.next().expect("a cycle"));
        (done.saturating_sub(back.unwrap_or(0)), to, [0, 0])
    });
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
