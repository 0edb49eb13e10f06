//! Short convolutions against the obvious sum, and against themselves: the same bits for a row however
//! the tokens around it are cut into steps.

use prefixcache_attention::{Attention, BlockTables, KvElement, Plan, ShortConv, short_conv};
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team};
use proptest::prelude::*;

use crate::noise::noise;

const PAGES: usize = 128;
/// Not whole vectors.
const CHANNELS: usize = 53;

/// Taps, tokens that may be computed again, tokens of a block, and whether there is a bias.
type Shape = (usize, usize, usize, bool);

/// A layer of one convolution. What was never written is NaN, so that reading it shows.
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

    /// Pages of each sequence, scattered.
    fn page(&self, sequence: usize, index: usize) -> i32 {
        (1 + (sequence * 40 + index) * 37 % (PAGES - 1)) as i32
    }

    /// Computes tokens `from..to` of each sequence, of which `bcx` has all rows.
    fn step(
        &mut self,
        form: Form,
        team: &Team,
        sequences: &[Vec<E>],
        step: &[(usize, usize, usize)],
    ) -> Vec<E> {
        let (mut bcx, mut slots) = (Vec::new(), Vec::new());
        let (mut qo_indptr, mut kv_indptr) = (vec![0], vec![0]);
        let (mut kv_indices, mut last_page_len) = (Vec::new(), Vec::new());
        let mut first_pages = Vec::new();
        let size = self.block_size;
        for &(sequence, from, to) in step {
            bcx.extend_from_slice(&sequences[sequence][from * 3 * CHANNELS..to * 3 * CHANNELS]);
            slots.extend((from..to).map(|position| {
                let page = self.page(sequence, position / size) as usize;
                (page * size + position % size) as i64
            }));
            // Pages behind the convolution are left out.
            let first = (from + 1).saturating_sub(self.taps) / size;
            let pages = first..to.div_ceil(size);
            kv_indices.extend(pages.map(|index| self.page(sequence, index)));
            first_pages.push(first as i32);
            kv_indptr.push(kv_indices.len() as i32);
            qo_indptr.push(slots.len() as i32);
            last_page_len.push(((to - 1) % size + 1) as i32);
        }
        let tables = BlockTables {
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            last_page_len: &last_page_len,
            first_pages: Some(&first_pages),
        };
        let mut window = Attention::new(1, 1, 16, 1.0).expect("a shape that fits");
        window.window_left = Some(self.taps - 1);
        let plan = Plan::new(tables, PAGES, size, &window).expect("a sound step");
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

    /// One number in `f64`, of inputs rounded as the kernel rounds them.
    fn reference(&self, bcx: &[E], position: usize, channel: usize) -> f64 {
        let at = |row: usize, part: usize| bcx[(row * 3 + part) * CHANNELS + channel].to_f32();
        let bias = self
            .bias
            .as_ref()
            .map_or(0.0, |bias| bias[channel].to_f32());
        let sum: f64 = (0..self.taps.min(position + 1))
            .map(|back| {
                let input = E::from_f32(at(position - back, 0) * at(position - back, 2)).to_f32();
                let weight = self.weight[(self.taps - 1 - back) * CHANNELS + channel].to_f32();
                f64::from(weight) * f64::from(input)
            })
            .sum();
        f64::from(at(position, 1)) * (sum + f64::from(bias))
    }
}

fn check<E: KvElement + PartialEq>(
    form: Form,
    shape: Shape,
    threads: usize,
    lengths: &[usize],
    chunks: &[usize],
) {
    let sequences: Vec<Vec<E>> = (0..lengths.len())
        .map(|number| noise(number as u64, lengths[number] * 3 * CHANNELS))
        .collect();
    let layer = || Layer::<E>::new(shape);
    let alone = Team::new(1).expect("threads");
    let want: Vec<Vec<E>> = (0..lengths.len())
        .map(|number| layer().step(form, &alone, &sequences, &[(number, 0, lengths[number])]))
        .collect();
    let tolerance = if size_of::<E>() == 4 { 1e-5 } else { 1e-2 };
    for (number, rows) in want.iter().enumerate() {
        for (index, got) in rows.iter().enumerate() {
            let (position, channel) = (index / CHANNELS, index % CHANNELS);
            let exact = layer().reference(&sequences[number], position, channel);
            let error = (f64::from(got.to_f32()) - exact).abs();
            assert!(
                error <= tolerance * exact.abs().max(1.0),
                "{position}: {error}"
            );
        }
    }
    let team = Team::new(threads).expect("threads");
    let (mut many, mut done) = (layer(), vec![0; lengths.len()]);
    let mut chunks = chunks.iter().cycle();
    let (mut again, mut steps) = ((1..=shape.1).cycle(), 0);
    while done != lengths {
        let mut step = Vec::new();
        steps += 1;
        for number in 0..lengths.len() {
            // Every third step computes tokens of the one before again, up to as many as may be.
            let back = if steps % 3 == 0 { again.next() } else { None };
            let from = done[number].saturating_sub(back.unwrap_or(0));
            let to = lengths[number].min(done[number] + chunks.next().expect("a cycle"));
            if to > done[number] {
                step.push((number, from, to));
                done[number] = to;
            }
        }
        let out = many.step(form, &team, &sequences, &step);
        let mut rows = out.chunks_exact(CHANNELS);
        for &(number, from, to) in &step {
            for position in from..to {
                let want = &want[number][position * CHANNELS..][..CHANNELS];
                let same = rows.next().is_some_and(|row| row == want);
                assert!(same, "{form:?}: {number} at {position} of {step:?}");
            }
        }
    }
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
