//! The gated delta rule and Mamba-2 against the obvious sums, and against itself: the same bits for a row however the tokens
//! around it are cut into steps, from states that other sequences left too, after guesses of any kind.

use std::slice::from_ref;

use prefixcache_attention::{
    Attention, DeltaHeads, DeltaRule, KvElement, NO_PAGE, Plan, StatePart, delta_rule,
    replay_delta_rule,
};
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team};
use proptest::prelude::*;

use crate::common::{self, Chunk, Guesses, Layer as _, page, plan};
use crate::noise::noise;

const PAGES: usize = 128;

/// A layer.
struct Layer {
    heads: DeltaHeads,
    block_size: usize,
    conv: Vec<f32>,
    /// Of Mamba-2 alone, as `skip`.
    conv_bias: Option<Vec<f32>>,
    decay: Vec<f32>,
    time_bias: Vec<f32>,
    norm: Vec<f32>,
    skip: Vec<f32>,
    /// Of each part the pages, and how many numbers of each are the layer's.
    parts: Vec<(Vec<f32>, usize)>,
    /// Whether only the pages that a step has to have are there.
    has_gaps: bool,
}

/// Numbers of a page that are of another layer.
const OTHERS: usize = 5;

impl Layer {
    fn new(heads: DeltaHeads, block_size: usize) -> Self {
        let state = heads.state();
        let widths = [state / 3, state / 7, state - state / 3 - state / 7];
        let pages = |width| vec![f32::NAN; PAGES * (width + OTHERS)];
        let decay: Vec<f32> = noise(93, heads.value_heads);
        Self {
            heads,
            block_size,
            conv: noise(91, heads.taps * heads.channels()),
            conv_bias: (!heads.corrects).then(|| noise(92, heads.channels())),
            decay: decay.iter().map(|x| 0.1 + 3.0 * x.abs()).collect(),
            time_bias: noise(94, heads.value_heads),
            norm: noise(95, heads.value_dim),
            skip: noise(96, heads.value_heads),
            parts: widths.map(|width| (pages(width), width)).into(),
            has_gaps: false,
        }
    }

    fn plan(&self, part: usize, step: &[Chunk], guesses: &[Guesses]) -> Plan {
        let size = self.block_size;
        let guesses = |place: usize| guesses.get(place).copied().unwrap_or_default();
        let with_wrong: Vec<Chunk> = (step.iter().enumerate())
            .map(|(place, &(sequence, from, to))| (sequence, from, to + guesses(place)[1]))
            .collect();
        let mut window = Attention::new(1, 1, 16, 1.0).expect("a shape that fits");
        window.window_left = Some(1);
        plan((PAGES, size), &window, true, &with_wrong, |place, index| {
            let (sequence, from, to) = step[place];
            // Where it reads, where its last certain token is, and all of guesses.
            let is_read = from > 0 && index == (from - 1) / size;
            let certain = (to - guesses(place)[0]).saturating_sub(1) / size;
            match !self.has_gaps || index >= certain || is_read {
                true => page(PAGES, part, sequence, index),
                false => NO_PAGE as i32,
            }
        })
    }
}

impl<E: KvElement> common::Layer<E> for Layer {
    const OF_F32: f64 = 1e-4;

    fn widths(&self) -> [usize; 2] {
        [self.heads.inputs(), self.heads.values()]
    }

    fn step(
        &mut self,
        form: Form,
        team: &Team,
        sequences: &[Vec<E>],
        step: &[Chunk],
        guesses: &[Guesses],
    ) -> Vec<E> {
        let inputs = self.heads.inputs();
        let (mut x, mut wrong) = (Vec::new(), Vec::new());
        for (number, &(sequence, from, to)) in step.iter().enumerate() {
            x.extend_from_slice(&sequences[sequence][from * inputs..to * inputs]);
            wrong.resize(x.len() / inputs, false);
            let refused = guesses.get(number).map_or(0, |one| one[1]);
            x.extend(noise::<E>(71, refused * inputs));
            wrong.resize(x.len() / inputs, true);
        }
        let plans: Vec<_> = (0..3).map(|part| self.plan(part, step, guesses)).collect();
        let rule = DeltaRule {
            heads: self.heads,
            conv: Rows::new(&self.conv, self.heads.channels()),
            conv_bias: self.conv_bias.as_deref(),
            decay: &self.decay,
            time_bias: &self.time_bias,
            norm: &self.norm,
            skip: &self.skip,
            eps: 1e-5,
        };
        let parts = self.parts.iter_mut().zip(&plans);
        let parts: Vec<_> = parts
            .map(|((pages, width), plan)| {
                let first = pages[3..].as_mut_ptr();
                // SAFETY: PAGES rows of `width` numbers, with those of others between.
                let pages = unsafe { RowsMut::from_raw(first, PAGES, *width, *width + OTHERS) };
                StatePart { plan, pages }
            })
            .collect();
        let width = self.heads.values();
        let mut out = vec![E::from_f32(f32::NAN); x.len() / inputs * width];
        let rows = RowsMut::new(&mut out, width);
        let x = Rows::new(&x, inputs);
        let counts: Vec<_> = guesses.iter().map(|one| one[0] + one[1]).collect();
        delta_rule(form, team, &rule, &parts, &counts, x, &rows).expect("memory");
        let kept: Vec<_> =
            plans[0].guessed_rows(&counts).flat_map(|row| x.row(row).to_vec()).collect();
        let (kept, accepted) =
            (Rows::new(&kept, inputs), guesses.iter().map(|one| one[0]).collect::<Vec<_>>());
        replay_delta_rule(form, team, &rule, &parts, (&counts, &accepted), kept).expect("memory");
        let rows = out.chunks_exact(width).zip(wrong);
        let right = rows.filter_map(|(row, wrong)| (!wrong).then_some(row));
        right.flatten().copied().collect()
    }

    fn reference(&self, x: &[E]) -> Vec<(usize, f64)> {
        let DeltaHeads { key_heads, value_heads, key_dim, value_dim, taps, tiled, alike, corrects } =
            self.heads;
        let (inputs, channels) = (self.heads.inputs(), self.heads.channels());
        let at = |row: usize, column: usize| f64::from(x[row * inputs + column].to_f32());
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let convolved = |row: usize, channel: usize| {
            let sum = (0..taps.min(row + 1)).map(|back| {
                let weight = self.conv[(taps - 1 - back) * channels + channel];
                f64::from(weight) * at(row - back, channel)
            });
            let bias = (self.conv_bias.as_ref()).map_or(0.0, |bias| bias[channel].into());
            silu(sum.sum::<f64>() + bias)
        };
        let keys = key_heads / alike * key_dim;
        let mut states = vec![vec![0.0; key_dim * value_dim]; value_heads];
        let mut out = Vec::new();
        for row in 0..x.len() / inputs {
            for (head, state) in states.iter_mut().enumerate() {
                let key_head =
                    if tiled { head % key_heads } else { head / (value_heads / key_heads) / alike };
                let of_length = |first: usize| {
                    let all: Vec<_> = (0..key_dim)
                        .map(|i| convolved(row, first + key_head * key_dim + i))
                        .collect();
                    let squares = all.iter().map(|x| x * x).sum::<f64>() + 1e-6;
                    let length = if corrects { squares.sqrt() } else { 1.0 };
                    all.into_iter().map(move |x| x / length).collect::<Vec<_>>()
                };
                let (q, k) = (of_length(0), of_length(keys));
                let scale = if corrects { (key_dim as f64).sqrt() } else { 1.0 };
                let rates = channels + value_heads * value_dim;
                let a = at(row, inputs - value_heads + head) + f64::from(self.time_bias[head]);
                let time = (1.0 + a.exp()).ln();
                let decay = (-f64::from(self.decay[head]) * time).exp();
                let rate =
                    if corrects { 1.0 / (1.0 + (-at(row, rates + head)).exp()) } else { time };
                let mut read = vec![0.0; value_dim];
                for (j, read) in read.iter_mut().enumerate() {
                    let known: f64 = (0..key_dim).map(|i| k[i] * state[i * value_dim + j]).sum();
                    let known = if corrects { known } else { 0.0 };
                    let v = convolved(row, 2 * keys + head * value_dim + j);
                    let change = rate * (v - decay * known);
                    for i in 0..key_dim {
                        let s = &mut state[i * value_dim + j];
                        *s = *s * decay + k[i] * change;
                        *read += q[i] * *s / scale;
                    }
                    if !corrects {
                        *read += f64::from(self.skip[head]) * v;
                    }
                }
                let mean = read.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
                for (j, read) in read.iter().enumerate() {
                    let z = silu(at(row, channels + head * value_dim + j));
                    let norm = f64::from(self.norm[j]) / (mean + 1e-5).sqrt();
                    out.push((out.len(), read * if corrects { norm } else { 1.0 } * z));
                }
            }
        }
        out
    }
}

fn heads(
    (key_heads, group, key_dim, value_dim, taps): (usize, usize, usize, usize, usize),
) -> DeltaHeads {
    DeltaHeads {
        key_heads,
        value_heads: group * key_heads,
        key_dim,
        value_dim,
        taps,
        tiled: value_dim == 48,
        alike: 1,
        corrects: true,
    }
}

/// The same shape of Mamba-2, in which all key heads have the same queries and keys.
fn mamba(heads: DeltaHeads) -> DeltaHeads {
    DeltaHeads { tiled: false, alike: heads.key_heads, corrects: false, ..heads }
}

fn check<E: KvElement + PartialEq>(
    form: Form,
    (heads, block_size): (DeltaHeads, usize),
    threads: usize,
    lengths: &[usize],
    chunks: &[usize],
    guesses: &[Guesses],
) {
    let (mut chunks, mut guesses) = (chunks.iter().cycle(), guesses.iter().cycle());
    let layer = || Layer::new(heads, block_size);
    let mut many = layer();
    many.has_gaps = threads == 2;
    common::check::<E, _>((form, threads), lengths, layer, &mut many, |done, length| {
        let to = length.min(done + chunks.next().expect("a cycle"));
        let [accepted, refused] = guesses.next().copied().unwrap_or_default();
        (done, to, [accepted.min(to - done), refused])
    });
    for (pages, width) in &many.parts {
        assert!(pages[..width + OTHERS].iter().all(|x| x.is_nan()), "the null block is written");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_obvious_sums_and_the_same_bits_in_every_schedule(
        form in prop::sample::select(Form::available()),
        shape in (
            1_usize..=3,
            1_usize..=3,
            prop::sample::select(vec![16, 32, 48]),
            prop::sample::select(vec![16, 32, 48, 64]),
            1_usize..=5,
        ),
        block_size in prop::sample::select(vec![1, 2, 3, 7, 16, 50]),
        threads in 1_usize..=2,
        lengths in prop::collection::vec(1_usize..36, 1..4),
        chunks in prop::collection::vec(1_usize..20, 1..8),
        guesses in prop::collection::vec([0_usize..8, 0..5], 0..5),
    ) {
        for heads in [heads(shape), mamba(heads(shape))] {
            let shape = (heads, block_size);
            check::<f32>(form, shape, threads, &lengths, &chunks, &guesses);
            check::<Bf16>(form, shape, threads, &lengths, &chunks, &guesses);
        }
    }
}

/// The heads of the real models, in the chunks that schedulers make.
#[test]
fn a_row_knows_no_chunk() {
    for form in Form::available() {
        for chunks in [[1, 1], [7, 64], [3, 200]] {
            let (delta, mamba) = (heads((2, 2, 128, 128, 4)), mamba(heads((2, 2, 128, 64, 4))));
            check::<f32>(form, (delta, 64), 2, &[130], &chunks, &[]);
            check::<f32>(form, (mamba, 64), 2, &[130], &chunks, &[]);
        }
    }
}

/// Sequences of 1, 2 and 3 tokens, one by one and across the end of a block.
#[test]
fn the_first_tokens_have_nothing_before_them() {
    for form in Form::available() {
        for block_size in [1, 2, 3, 16] {
            check::<f32>(form, (heads((1, 1, 16, 16, 4)), block_size), 1, &[1, 2, 3], &[1], &[]);
            check::<Bf16>(
                form,
                (heads((1, 2, 16, 32, 4)), block_size),
                1,
                &[3, 17],
                &[1, 2, 16],
                &[],
            );
        }
    }
}

/// Sequences that hit the same full block read one state, and write none of its pages: also one that a guess filled.
#[test]
fn a_full_block_is_never_written_again() {
    for (form, guesses) in
        Form::available().into_iter().flat_map(|form| [(form, [0, 0]), (form, [11, 3])])
    {
        let heads = heads((2, 2, 32, 32, 4));
        let team = Team::new(2).expect("threads");
        let sequence: Vec<f32> = noise(1, 12 * heads.inputs());
        let mut layer = Layer::new(heads, 4);
        let whole = layer.step(form, &team, from_ref(&sequence), &[(0, 0, 12)], from_ref(&guesses));
        let page = page(PAGES, 0, 0, 1) as usize;
        let width = layer.parts[0].1 + OTHERS;
        let kept = layer.parts[0].0[page * width..][..width].to_vec();
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for chunk in [(0, 8, 12), (0, 8, 9), (0, 4, 8)] {
            let again = layer.step(form, &team, from_ref(&sequence), &[chunk], &[]);
            assert_eq!(again, whole[chunk.1 * heads.values()..][..again.len()]);
            assert_eq!(bits(&layer.parts[0].0[page * width..][..width]), bits(&kept));
        }
    }
}
