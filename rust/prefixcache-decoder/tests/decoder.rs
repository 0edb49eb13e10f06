//! A stack of layers against the obvious computation in `f64`, and against itself: the same bits for
//! a token however the tokens around it are cut into steps.

#[path = "../../prefixcache-cpu/tests/common/noise.rs"]
mod noise;

use noise::noise;
use prefixcache_attention::{Attention, BlockTables, KvElement, Plan};
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team, WeightMemory};
use prefixcache_decoder::{DecoderLayer, Scratch, Step};
use prefixcache_ops::PackedLinear;

const HIDDEN: usize = 32;
const WIDE: usize = 48;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIMS: usize = 16;
const LAYERS: usize = 2;
const TOKENS: usize = 37;
const BLOCK: usize = 16;
const PAGES: usize = 5;
const EPS: f32 = 1e-5;

/// A linear's weight, a row an output; packed, too.
struct Linear<E> {
    weight: Vec<E>,
    packed: PackedLinear<E>,
}

impl<E: KvElement> Linear<E> {
    fn random(seed: u64, inputs: usize, outputs: usize) -> Self {
        let weight = noise::<E>(seed, inputs * outputs);
        let memory = WeightMemory::default();
        let mut packed = PackedLinear::zeroed(&memory, inputs, outputs, false).expect("memory");
        packed.copy_rows(0, Rows::new(&weight, inputs));
        Self { weight, packed }
    }

    fn reference(&self, x: &[f64]) -> Vec<f64> {
        let rows = self.weight.chunks_exact(x.len());
        rows.map(|row| row.iter().zip(x).map(|(&w, x)| number(w) * x).sum())
            .collect()
    }
}

fn number<E: KvElement>(value: E) -> f64 {
    f64::from(value.to_f32())
}

struct Layer<E> {
    input_norm: Vec<E>,
    qkv: Linear<E>,
    qk_norm: Option<Vec<E>>,
    out: Linear<E>,
    post_norm: Vec<E>,
    gate_up: Linear<E>,
    down: Linear<E>,
}

impl<E: KvElement> Layer<E> {
    fn random(seed: u64, with_qk_norm: bool) -> Self {
        let seed = 10 * seed;
        let turned = (HEADS + KV_HEADS) * DIMS;
        Self {
            input_norm: noise(seed + 1, HIDDEN),
            qkv: Linear::random(seed + 2, HIDDEN, (HEADS + 2 * KV_HEADS) * DIMS),
            qk_norm: with_qk_norm.then(|| noise(seed + 3, turned)),
            out: Linear::random(seed + 4, HEADS * DIMS, HIDDEN),
            post_norm: noise(seed + 5, HIDDEN),
            gate_up: Linear::random(seed + 6, HIDDEN, 2 * WIDE),
            down: Linear::random(seed + 7, WIDE, HIDDEN),
        }
    }

    fn borrowed(&self) -> DecoderLayer<'_, E> {
        DecoderLayer {
            input_norm: &self.input_norm,
            qkv: &self.qkv.packed,
            qk_norm: self.qk_norm.as_deref(),
            out: &self.out.packed,
            post_norm: &self.post_norm,
            gate_up: &self.gate_up.packed,
            down: &self.down.packed,
        }
    }

    /// The layer on a whole sequence, a row a token.
    fn reference(&self, x: &mut [Vec<f64>]) {
        let turned = (HEADS + KV_HEADS) * DIMS;
        let qkv: Vec<Vec<f64>> = x
            .iter()
            .enumerate()
            .map(|(position, x)| {
                let mut qkv = self.qkv.reference(&normed(x, &self.input_norm, HIDDEN));
                if let Some(weight) = &self.qk_norm {
                    let normed = normed(&qkv[..turned], weight, DIMS);
                    qkv[..turned].copy_from_slice(&normed);
                }
                qkv[..turned]
                    .chunks_exact_mut(DIMS)
                    .for_each(|head| turn(head, position));
                qkv
            })
            .collect();
        for (position, x) in x.iter_mut().enumerate() {
            let attended: Vec<f64> = (0..HEADS)
                .flat_map(|head| attend(&qkv[..=position], head))
                .collect();
            add(x, &self.out.reference(&attended));
            let gate_up = self.gate_up.reference(&normed(x, &self.post_norm, HIDDEN));
            let (gates, ups) = gate_up.split_at(WIDE);
            let silu = |gate: f64| gate / (1.0 + (-gate).exp());
            let opened: Vec<f64> = gates.iter().zip(ups).map(|(&g, u)| silu(g) * u).collect();
            add(x, &self.down.reference(&opened));
        }
    }
}

fn add(x: &mut [f64], more: &[f64]) {
    x.iter_mut().zip(more).for_each(|(x, more)| *x += more);
}

fn normed<E: KvElement>(x: &[f64], weight: &[E], group: usize) -> Vec<f64> {
    let groups = x.chunks_exact(group).zip(weight.chunks_exact(group));
    let norm = |(x, weight): (&[f64], &[E])| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / group as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        let scaled = x.iter().zip(weight).map(|(x, &w)| x * scale * number(w));
        scaled.collect::<Vec<_>>()
    };
    groups.flat_map(norm).collect()
}

fn angle(position: usize, pair: usize) -> f64 {
    position as f64 / 100_f64.powf(pair as f64 / (DIMS / 2) as f64)
}

fn turn(head: &mut [f64], position: usize) {
    for pair in 0..DIMS / 2 {
        let (sin, cos) = angle(position, pair).sin_cos();
        let (x, y) = (head[pair], head[pair + DIMS / 2]);
        head[pair] = x * cos - y * sin;
        head[pair + DIMS / 2] = y * cos + x * sin;
    }
}

/// What the last token's query head sees.
fn attend(qkv: &[Vec<f64>], head: usize) -> Vec<f64> {
    let kv_head = head / (HEADS / KV_HEADS);
    let at = |row: &[f64], head: usize| row[head * DIMS..][..DIMS].to_vec();
    let query = at(&qkv[qkv.len() - 1], head);
    let weight = |row: &Vec<f64>| {
        let key = at(row, HEADS + kv_head);
        let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
        (dot / (DIMS as f64).sqrt()).exp()
    };
    let weights: Vec<f64> = qkv.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let mut mean = vec![0.0; DIMS];
    for (row, weight) in qkv.iter().zip(&weights) {
        let value = at(row, HEADS + KV_HEADS + kv_head);
        let part: Vec<f64> = value.iter().map(|value| value * weight / total).collect();
        add(&mut mean, &part);
    }
    mean
}

fn attention() -> Attention {
    let scale = 1.0 / (DIMS as f32).sqrt();
    Attention::new(HEADS, KV_HEADS, DIMS, scale).expect("heads that fit")
}

/// The rows of a prompt after all layers, computed in steps of these lengths.
fn in_steps<E: KvElement>(
    layers: &[Layer<E>],
    form: Form,
    threads: usize,
    lengths: &[usize],
) -> Vec<E> {
    let (attention, team) = (attention(), Team::new(threads).expect("threads"));
    let page_width = BLOCK * DIMS;
    // What was never written is NaN, so that reading it shows.
    let empty = vec![E::from_f32(f32::NAN); PAGES * 2 * KV_HEADS * page_width];
    let mut caches = vec![empty; layers.len()];
    let mut x = noise::<E>(3, TOKENS * HIDDEN);
    let mut start = 0;
    for &length in lengths {
        let (positions, pages) = (start..start + length, (start + length).div_ceil(BLOCK));
        // Pages are handed out backwards: page 0 is none, and neighbours are not adjacent.
        let page = |position: usize| TOKENS.div_ceil(BLOCK) - position / BLOCK;
        let starts = (0..pages).map(|number| number * BLOCK);
        let indices: Vec<i32> = starts.map(|start| page(start) as i32).collect();
        let tables = BlockTables {
            qo_indptr: &[0, length as i32],
            kv_indptr: &[0, pages as i32],
            kv_indices: &indices,
            last_page_len: &[((positions.end - 1) % BLOCK + 1) as i32],
            first_pages: None,
        };
        let plan = Plan::new(tables, PAGES, BLOCK, &attention).expect("a sound step");
        let slot = |position| (page(position) * BLOCK + position % BLOCK) as i64;
        let slots: Vec<i64> = positions.clone().map(slot).collect();
        let angles = |of: fn(f64) -> f64| -> Vec<f32> {
            let pairs = |position| (0..DIMS / 2).map(move |pair| angle(position, pair));
            let angles = positions.clone().flat_map(pairs);
            angles.map(|angle| of(angle) as f32).collect()
        };
        let (cos, sin) = (angles(f64::cos), angles(f64::sin));
        let step = Step {
            form,
            team: &team,
            attention: &attention,
            eps: EPS,
            plan: &plan,
            slots: &slots,
            cos: Rows::new(&cos, DIMS / 2),
            sin: Rows::new(&sin, DIMS / 2),
        };
        let rows = &mut x[start * HIDDEN..(start + length) * HIDDEN];
        let mut rows = RowsMut::new(rows, HIDDEN);
        let first = layers[0].borrowed();
        let mut scratch = Scratch::new(length, &attention, &first).expect("memory");
        for (layer, cache) in layers.iter().zip(&mut caches) {
            let mut cache = RowsMut::new(cache, page_width);
            let layer = layer.borrowed();
            step.forward(&layer, &mut cache, &mut rows, &mut scratch)
                .expect("memory");
        }
        start += length;
    }
    assert_eq!(start, TOKENS);
    x
}

fn stack<E: KvElement>(with_qk_norm: bool) -> Vec<Layer<E>> {
    let layer = |number| Layer::random(number as u64 + 1, with_qk_norm);
    (0..LAYERS).map(layer).collect()
}

#[test]
fn near_the_reference() {
    for with_qk_norm in [false, true] {
        let layers = stack::<f32>(with_qk_norm);
        let mut want: Vec<Vec<f64>> = noise::<f32>(3, TOKENS * HIDDEN)
            .chunks_exact(HIDDEN)
            .map(|row| row.iter().map(|&x| f64::from(x)).collect())
            .collect();
        layers.iter().for_each(|layer| layer.reference(&mut want));
        for form in Form::available() {
            let got = in_steps(&layers, form, 2, &[TOKENS]);
            for (i, (got, want)) in got.iter().zip(want.iter().flatten()).enumerate() {
                let error = (f64::from(*got) - want).abs();
                let (token, column) = (i / HIDDEN, i % HIDDEN);
                assert!(
                    error < 1e-3 * want.abs().max(1.0),
                    "{form:?}: token {token}, column {column}: off by {error} from {want}"
                );
            }
        }
    }
}

fn check_steps<E: KvElement + PartialEq>(with_qk_norm: bool) {
    let layers = stack::<E>(with_qk_norm);
    for form in Form::available() {
        let whole = in_steps(&layers, form, 1, &[TOKENS]);
        assert!(whole.iter().all(|x| x.to_f32().is_finite()));
        for lengths in [&[1; TOKENS][..], &[16, 16, 5], &[20, 1, 1, 15], &[36, 1]] {
            for threads in [1, 2] {
                let parts = in_steps(&layers, form, threads, lengths);
                assert!(parts == whole, "{form:?} in steps of {lengths:?}");
            }
        }
    }
}

#[test]
fn the_same_bits_in_every_schedule() {
    for with_qk_norm in [false, true] {
        check_steps::<f32>(with_qk_norm);
        check_steps::<Bf16>(with_qk_norm);
    }
}
