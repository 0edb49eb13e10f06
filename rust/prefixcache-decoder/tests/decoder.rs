//! A stack of layers against the obvious computation in `f64`, and against itself: the same bits for
//! a token however the tokens around it are cut into steps.

#[path = "../../prefixcache-cpu/tests/common/noise.rs"]
mod noise;

use std::ops::Range;

use noise::noise;
use prefixcache_attention::{Attention, BlockTables, KvElement, KvPagesMut, Plan};
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team, WeightMemory};
use prefixcache_decoder::{
    AttentionMixer, DecoderLayer, Dense, FeedForward, Group, Makes, Mixer, OwnInput, Rotation,
    Scratch, Step,
};
use prefixcache_ops::PackedLinear;
use prefixcache_ops::rowwise::{Gate, RmsNorm};

const HIDDEN: usize = 32;
const WIDE: usize = 48;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIMS: usize = 16;
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
        let mut packed = PackedLinear::new(inputs, &[outputs], false).expect("memory");
        let rows = Rows::new(&weight, inputs);
        packed.copy_rows(&memory, 0, rows).expect("memory");
        Self { weight, packed }
    }

    fn reference(&self, x: &[f64]) -> Vec<f64> {
        let rows = self.weight.chunks_exact(x.len());
        rows.map(|row| row.iter().zip(x).map(|(&w, x)| number(w) * x).sum()).collect()
    }
}

fn number<E: KvElement>(value: E) -> f64 {
    f64::from(value.to_f32())
}

/// A kind of decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Family {
    Llama,
    Qwen3,
    /// Layer 1 sees all keys, the others a window and other angles.
    Gemma3,
    /// Values of layer 1 are its keys, layer 2 reads the keys and values of layer 1, and each layer has
    /// an input of its own.
    Gemma4,
}

use Family::{Gemma3, Gemma4, Llama, Qwen3};

/// Shorter than a block.
const WINDOW: usize = 11;

impl Family {
    /// Numbers by which what heads make is multiplied: in Qwen3's place those of Qwen3-Next.
    fn gates(self) -> usize {
        if self == Qwen3 { HEADS * DIMS } else { 0 }
    }

    fn norm_offset(self) -> f32 {
        if self == Gemma3 { 1.0 } else { 0.0 }
    }

    fn gate(self) -> Gate {
        if matches!(self, Gemma3 | Gemma4) { Gate::GeluTanh } else { Gate::Silu }
    }

    /// The window of each group of layers.
    fn windows(self) -> &'static [Option<usize>] {
        if self == Gemma3 { &[None, Some(WINDOW)] } else { &[None] }
    }

    /// The group of each layer, and its rotation.
    fn layers(self) -> &'static [(usize, usize)] {
        match self {
            Gemma3 => &[(1, 1), (0, 0), (1, 1)],
            Llama | Qwen3 => &[(0, 0), (0, 0)],
            Gemma4 => &[(0, 0), (0, 1), (0, 1)],
        }
    }

    fn makes(self, layer: usize) -> Makes {
        match (self, layer) {
            (Gemma4, 1) => Makes::QueriesAndKeys,
            (Gemma4, 2) => Makes::Queries,
            _ => Makes::All,
        }
    }

    /// The layer whose keys and values a layer reads.
    fn owner(self, layer: usize) -> usize {
        layer - usize::from(self.makes(layer) == Makes::Queries)
    }

    fn norm<E: KvElement>(self, weight: &[E], group: usize) -> RmsNorm<'_, E> {
        RmsNorm { weight, offset: self.norm_offset(), group, eps: EPS }
    }
}

struct Layer<E> {
    family: Family,
    group: usize,
    rope: usize,
    input_norm: Vec<E>,
    qkv: Linear<E>,
    qk_norm: Vec<E>,
    out: Linear<E>,
    mixer_out_norm: Vec<E>,
    mlp_norm: Vec<E>,
    gate_up: Linear<E>,
    down: Linear<E>,
    mlp_out_norm: Vec<E>,
    makes: Makes,
    own_gate: Linear<E>,
    own_out: Linear<E>,
    own_norm: Vec<E>,
    value_norm: Vec<E>,
}

/// Numbers of a token that a layer alone has.
const OWN: usize = 6;

/// What the stream is multiplied by after each layer that has an input of its own.
const SCALE: f32 = 0.75;

/// The inputs of a layer alone, a row a token.
fn own_inputs<E: KvElement>(layer: usize) -> Vec<E> {
    noise(100 + layer as u64, TOKENS * OWN)
}

impl<E: KvElement> Layer<E> {
    fn random(seed: u64, family: Family, (group, rope): (usize, usize)) -> Self {
        let makes = family.makes(seed as usize - 1);
        let seed = 20 * seed;
        let kv_heads = if makes == Makes::Queries { 0 } else { KV_HEADS };
        let turned = (HEADS + kv_heads) * DIMS;
        let values = if makes == Makes::All { KV_HEADS * DIMS } else { 0 };
        Self {
            family,
            group,
            rope,
            input_norm: noise(seed + 1, HIDDEN),
            qkv: Linear::random(seed + 2, HIDDEN, family.gates() + turned + values),
            qk_norm: noise(seed + 3, turned),
            out: Linear::random(seed + 4, HEADS * DIMS, HIDDEN),
            mixer_out_norm: noise(seed + 8, HIDDEN),
            mlp_norm: noise(seed + 5, HIDDEN),
            gate_up: Linear::random(seed + 6, HIDDEN, 2 * WIDE),
            down: Linear::random(seed + 7, WIDE, HIDDEN),
            mlp_out_norm: noise(seed + 9, HIDDEN),
            makes,
            own_gate: Linear::random(seed + 10, HIDDEN, OWN),
            own_out: Linear::random(seed + 11, OWN, HIDDEN),
            own_norm: noise(seed + 12, HIDDEN),
            value_norm: noise(seed + 13, KV_HEADS * DIMS),
        }
    }

    fn stack(family: Family) -> Vec<Self> {
        let layers = family.layers().iter().zip(1..);
        layers.map(|(&place, seed)| Self::random(seed, family, place)).collect()
    }

    fn borrowed(&self) -> DecoderLayer<'_, E> {
        let family = self.family;
        let norm = |weight| family.norm(weight, HIDDEN);
        let out_norm = |weight| (family == Gemma3).then(|| norm(weight));
        let own_input = || OwnInput {
            gate: &self.own_gate.packed,
            activation: family.gate(),
            out: &self.own_out.packed,
            norm: norm(&self.own_norm),
        };
        DecoderLayer {
            input_norm: Some(norm(&self.input_norm)),
            mixer: Mixer::Attention(AttentionMixer {
                qkv: &self.qkv.packed,
                makes: self.makes,
                gated: family.gates() > 0,
                qk_norm: (family != Llama).then(|| family.norm(&self.qk_norm, DIMS)),
                key_norm: None,
                value_norm: (family == Gemma4).then(|| family.norm(&self.value_norm, DIMS)),
                sinks: None,
                out: &self.out.packed,
                group: self.group,
                rope: self.rope,
                query_rope: self.query_rope(),
            }),
            mixer_out_norm: out_norm(&self.mixer_out_norm),
            mlp_norm: Some(norm(&self.mlp_norm)),
            feed_forward: Some(FeedForward::Dense(Dense {
                gate_up: &self.gate_up.packed,
                gate: family.gate(),
                down: &self.down.packed,
            })),
            mlp_out_norm: out_norm(&self.mlp_out_norm),
            own_input: (family == Gemma4).then(own_input),
            scale: (family == Gemma4).then_some(SCALE),
        }
    }

    /// Queries of Qwen3 are turned as its keys are not, which no model of it does.
    fn query_rope(&self) -> usize {
        if self.family == Qwen3 { 1 } else { self.rope }
    }

    /// The layer on a whole sequence, a row a token. `before` are the queries, keys and values of the
    /// layer before, and those of this one come back.
    fn reference(&self, number: usize, x: &mut [Vec<f64>], before: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let queries = HEADS * DIMS;
        let turned = (self.qkv.packed.outputs()).min(queries + KV_HEADS * DIMS);
        let normed = |x: &[f64], weight: &[E], group| {
            normed(x, weight, f64::from(self.family.norm_offset()), group)
        };
        let out_normed = |x: Vec<f64>, weight: &[E]| match self.family {
            Gemma3 => normed(&x, weight, HIDDEN),
            Llama | Qwen3 | Gemma4 => x,
        };
        let projected: Vec<(Vec<f64>, Vec<f64>)> = x
            .iter()
            .enumerate()
            .map(|(position, x)| {
                let mut gates = self.qkv.reference(&normed(x, &self.input_norm, HIDDEN));
                let mut qkv = gates.split_off(self.family.gates());
                if self.makes == Makes::QueriesAndKeys {
                    qkv.extend_from_within(queries..);
                }
                if self.family == Gemma4 && self.makes != Makes::Queries {
                    let normed = normed(&qkv[turned..], &self.value_norm, DIMS);
                    qkv[turned..].copy_from_slice(&normed);
                }
                if self.family != Llama {
                    let normed = normed(&qkv[..turned], &self.qk_norm, DIMS);
                    qkv[..turned].copy_from_slice(&normed);
                }
                let heads = qkv[..turned].chunks_exact_mut(DIMS);
                heads.enumerate().for_each(|(number, head)| {
                    let of_queries = number < HEADS;
                    let rope = if of_queries { self.query_rope() } else { self.rope };
                    turn(head, rope, position);
                });
                if self.makes == Makes::Queries {
                    qkv.extend(&before[position][queries..]);
                }
                (gates, qkv)
            })
            .collect();
        let (gates, qkv): (Vec<_>, Vec<_>) = projected.into_iter().unzip();
        let window = self.family.windows()[self.group].unwrap_or(TOKENS);
        for (position, x) in x.iter_mut().enumerate() {
            let seen = (position + 1).saturating_sub(window)..=position;
            let mut attended: Vec<f64> =
                (0..HEADS).flat_map(|head| attend(&qkv[seen.clone()], head)).collect();
            for (x, gate) in attended.iter_mut().zip(&gates[position]) {
                *x *= opened(Gate::Silu, *gate) / gate;
            }
            let attended = self.out.reference(&attended);
            add(x, &out_normed(attended, &self.mixer_out_norm));
            let gate_up = self.gate_up.reference(&normed(x, &self.mlp_norm, HIDDEN));
            let (gates, ups) = gate_up.split_at(WIDE);
            let opened: Vec<f64> = gates
                .iter()
                .zip(ups)
                .map(|(&gate, up)| opened(self.family.gate(), gate) * up)
                .collect();
            let down = self.down.reference(&opened);
            add(x, &out_normed(down, &self.mlp_out_norm));
            if self.family == Gemma4 {
                let own = &own_inputs::<E>(number)[position * OWN..][..OWN];
                let gates = self.own_gate.reference(x);
                let opened: Vec<f64> = (gates.iter().zip(own))
                    .map(|(&gate, &own)| self::opened(Gate::GeluTanh, gate) * self::number(own))
                    .collect();
                let added = self.own_out.reference(&opened);
                add(x, &normed(&added, &self.own_norm, HIDDEN));
                x.iter_mut().for_each(|x| *x *= f64::from(SCALE));
            }
        }
        qkv
    }
}

fn opened(gate: Gate, x: f64) -> f64 {
    match gate {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::ClampedSwiglu | Gate::SquaredRelu => unreachable!("no family here has it"),
        Gate::GeluTanh => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            0.5 * x * (1.0 + (root * (x + 0.044715 * x.powi(3))).tanh())
        }
    }
}

fn add(x: &mut [f64], more: &[f64]) {
    x.iter_mut().zip(more).for_each(|(x, more)| *x += more);
}

fn normed<E: KvElement>(x: &[f64], weight: &[E], offset: f64, group: usize) -> Vec<f64> {
    let groups = x.chunks_exact(group).zip(weight.chunks_exact(group));
    let norm = |(x, weight): (&[f64], &[E])| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / group as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        let weights = weight.iter().map(|&w| number(w) + offset);
        let scaled = x.iter().zip(weights).map(|(x, w)| x * scale * w);
        scaled.collect::<Vec<_>>()
    };
    groups.flat_map(norm).collect()
}

/// Of the rotation `rope`.
fn angle(rope: usize, position: usize, pair: usize) -> f64 {
    let base = [100_f64, 20.0][rope];
    position as f64 / base.powf(pair as f64 / (DIMS / 2) as f64)
}

fn turn(head: &mut [f64], rope: usize, position: usize) {
    for pair in 0..DIMS / 2 {
        let (sin, cos) = angle(rope, position, pair).sin_cos();
        let (x, y) = (head[pair], head[pair + DIMS / 2]);
        head[pair] = x * cos - y * sin;
        head[pair + DIMS / 2] = y * cos + x * sin;
    }
}

/// What the last token's query head sees of these tokens.
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

fn attention(window: Option<usize>) -> Attention {
    let scale = 1.0 / (DIMS as f32).sqrt();
    let mut attention = Attention::new(HEADS, KV_HEADS, DIMS, scale).expect("heads that fit");
    attention.window_left = window.map(|window| window - 1);
    attention
}

/// The page of a group's block: page 0 is none, neighbours are not adjacent, groups differ.
fn page(group: usize, block: usize) -> usize {
    let blocks = TOKENS.div_ceil(BLOCK);
    blocks - (block + group) % blocks
}

/// The plan and the slots of a step that computes these positions.
fn plan(group: usize, attention: &Attention, positions: Range<usize>) -> (Plan, Vec<i64>) {
    let pages = positions.end.div_ceil(BLOCK);
    let indices: Vec<i32> = (0..pages).map(|block| page(group, block) as i32).collect();
    let tables = BlockTables {
        qo_indptr: &[0, positions.len() as i32],
        kv_indptr: &[0, pages as i32],
        kv_indices: &indices,
        last_page_len: &[((positions.end - 1) % BLOCK + 1) as i32],
        first_pages: None,
    };
    let plan = Plan::new(tables, PAGES, BLOCK, attention).expect("a sound step");
    let slot = |position| (page(group, position / BLOCK) * BLOCK + position % BLOCK) as i64;
    (plan, positions.map(slot).collect())
}

/// Cosines and sines of a rotation at these positions.
fn angles(rope: usize, positions: Range<usize>) -> [Vec<f32>; 2] {
    [f64::cos, f64::sin].map(|of| {
        let pairs = |position| (0..DIMS / 2).map(move |pair| angle(rope, position, pair));
        let angles = positions.clone().flat_map(pairs);
        angles.map(|angle| of(angle) as f32).collect()
    })
}

/// The rows of a prompt after all layers, computed in steps of these lengths.
fn in_steps<E: KvElement>(
    layers: &[Layer<E>],
    form: Form,
    threads: usize,
    lengths: &[usize],
) -> Vec<E> {
    let windows = layers[0].family.windows();
    let attentions: Vec<Attention> = windows.iter().map(|&window| attention(window)).collect();
    let team = Team::new(threads).expect("threads");
    let page_width = 2 * KV_HEADS * BLOCK * DIMS;
    // What was never written is NaN, so that reading it shows.
    let empty = vec![E::from_f32(f32::NAN); PAGES * page_width];
    let mut caches = vec![empty; layers.len()];
    let mut x = noise::<E>(3, TOKENS * HIDDEN);
    let mut start = 0;
    for &length in lengths {
        let positions = start..start + length;
        let plans: Vec<_> = attentions
            .iter()
            .enumerate()
            .map(|(group, attention)| plan(group, attention, positions.clone()))
            .collect();
        let groups: Vec<_> = plans.iter().map(|(plan, slots)| Group { plan, slots }).collect();
        let angles = [0, 1].map(|rope| angles(rope, positions.clone()));
        let rotations = angles.each_ref().map(|[cos, sin]| Rotation {
            cos: Rows::new(cos, DIMS / 2),
            sin: Rows::new(sin, DIMS / 2),
        });
        let step = Step { form, team: &team, groups: &groups, rotations: &rotations, guesses: &[] };
        let rows = &mut x[start * HIDDEN..(start + length) * HIDDEN];
        let mut rows = RowsMut::new(rows, HIDDEN);
        let family = layers[0].family;
        let layers: Vec<_> = layers.iter().map(Layer::borrowed).collect();
        let mut scratch = Scratch::new(length, HIDDEN, &layers).expect("memory");
        for (number, layer) in layers.iter().enumerate() {
            let cache = RowsMut::new(&mut caches[family.owner(number)], page_width);
            let mut cache = KvPagesMut::Numbers(cache);
            let own = own_inputs::<E>(number);
            let own = Rows::new(&own[start * OWN..(start + length) * OWN], OWN);
            let own = layer.own_input.is_some().then_some(own);
            step.forward(layer, &mut cache, own, &mut rows, &mut scratch).expect("memory");
        }
        start += length;
    }
    assert_eq!(start, TOKENS);
    x
}

#[test]
fn near_the_reference() {
    for family in [Llama, Qwen3, Gemma3, Gemma4] {
        let layers = Layer::<f32>::stack(family);
        let mut want: Vec<Vec<f64>> = noise::<f32>(3, TOKENS * HIDDEN)
            .chunks_exact(HIDDEN)
            .map(|row| row.iter().map(|&x| f64::from(x)).collect())
            .collect();
        let mut qkv = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            qkv = layer.reference(number, &mut want, &qkv);
        }
        for form in Form::available() {
            let got = in_steps(&layers, form, 2, &[TOKENS]);
            for (i, (got, want)) in got.iter().zip(want.iter().flatten()).enumerate() {
                let error = (f64::from(*got) - want).abs();
                let (token, column) = (i / HIDDEN, i % HIDDEN);
                assert!(
                    error < 1e-3 * want.abs().max(1.0),
                    "{family:?}, {form:?}: token {token}, column {column}: off by {error} from {want}"
                );
            }
        }
    }
}

fn check_steps<E: KvElement + PartialEq>(family: Family) {
    let layers = Layer::<E>::stack(family);
    for form in Form::available() {
        let whole = in_steps(&layers, form, 1, &[TOKENS]);
        assert!(whole.iter().all(|x| x.to_f32().is_finite()));
        for lengths in [&[1; TOKENS][..], &[16, 16, 5], &[20, 1, 1, 15], &[36, 1]] {
            for threads in [1, 2] {
                let parts = in_steps(&layers, form, threads, lengths);
                assert!(parts == whole, "{family:?}, {form:?} in steps of {lengths:?}");
            }
        }
    }
}

#[test]
fn the_same_bits_in_every_schedule() {
    for family in [Llama, Qwen3, Gemma3, Gemma4] {
        check_steps::<f32>(family);
        check_steps::<Bf16>(family);
    }
}
