//! Time of a step of the default model's shape with random weights, without Python:
//! `step_speed [threads] [turns] [activations] [steps]`.
//!
//! Layers are Q4_1 and the head is Q8_0, as in the file. Each line is a step, like 8x1@128: 8
//! sequences, one token of each, after 128 tokens. "GB/s" counts the weights, which are read once. One thread is
//! measured by its own time, so that other processes change little; more by the clock. "rounds" are the times
//! in a layer that the threads wait for each other; what one of two threads takes is said first.

use std::sync::atomic::{AtomicUsize, Ordering};

use prefixcache_attention::{Attention, BlockTables, KvPagesMut, Plan};
use prefixcache_cpu::{Form, Rows, RowsMut, Team, WeightMemory};
use prefixcache_decoder::{
    AttentionMixer, DecoderLayer, Dense, FeedForward, Group, Makes, Mixer, Rotation, Scratch, Step,
};
use prefixcache_ops::rowwise::{Gate, RmsNorm};
use prefixcache_ops::{Activations, Format, PackedLinear};

const HIDDEN: usize = 576;
const WIDE: usize = 1536;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const DIMS: usize = 64;
const LAYERS: usize = 30;
const VOCABULARY: usize = 49_152;
const BLOCK: usize = 16;

/// Sequences x tokens of each in the step @ tokens before them.
const STEPS: &str = "1x1@128,1x1@1024,8x1@128,8x1@1024,1x160@0,1x1056@0";

struct Linears {
    qkv: PackedLinear<f32>,
    out: PackedLinear<f32>,
    gate_up: PackedLinear<f32>,
    down: PackedLinear<f32>,
}

struct Model {
    form: Form,
    team: Team,
    memory: WeightMemory,
    activations: Activations,
}

impl Model {
    fn linear(&self, format: Format, inputs: usize, parts: &[usize]) -> PackedLinear<f32> {
        let layer = PackedLinear::new(inputs, parts, false).expect("memory");
        let mut layer = layer.with_activations(self.activations);
        let mut first = 0;
        for &outputs in parts {
            let blocks = blocks(format, inputs, outputs);
            let rows = Rows::new(&blocks, format.row_bytes(inputs));
            layer
                .copy_blocks(&self.memory, self.form, &self.team, first, format, rows)
                .expect("finite blocks");
            first += outputs;
        }
        layer
    }

    fn layer(&self) -> Linears {
        let (queries, keys) = (HEADS * DIMS, KV_HEADS * DIMS);
        let linear = |inputs, parts: &[usize]| self.linear(Format::Q4_1, inputs, parts);
        Linears {
            qkv: linear(HIDDEN, &[queries, keys, keys]),
            out: linear(queries, &[HIDDEN]),
            gate_up: linear(HIDDEN, &[WIDE, WIDE]),
            down: linear(WIDE, &[HIDDEN]),
        }
    }
}

/// Blocks of any codes; the second bytes of their scales are those of usual numbers.
fn blocks(format: Format, inputs: usize, outputs: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let bytes = (0..outputs * format.row_bytes(inputs)).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005);
        state = state.wrapping_add(1);
        (state >> 56) as u8
    });
    let mut bytes: Vec<u8> = bytes.collect();
    for block in bytes.chunks_exact_mut(format.bytes()) {
        block[1] = 0x20 | block[1] & 3;
        if format == Format::Q4_1 {
            block[3] = 0xa8 | block[3] & 3;
        }
    }
    bytes
}

/// The time so far, in seconds.
fn seconds(threads: usize) -> f64 {
    let clock = match threads {
        1 => libc::CLOCK_THREAD_CPUTIME_ID,
        _ => libc::CLOCK_MONOTONIC,
    };
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec.
    let failed = unsafe { libc::clock_gettime(clock, &raw mut now) };
    assert_eq!(failed, 0, "the clock");
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// Microseconds of a round in which two threads wait for each other and do nothing else: the best of a few.
fn round(team: &Team) -> f64 {
    const ROUNDS: usize = 10;
    let arrived = AtomicUsize::new(0);
    let times = (1..=300).map(|batch| {
        let begun = seconds(2);
        for round in 0..ROUNDS {
            let goal = 2 * ((batch - 1) * ROUNDS + round + 1);
            team.run(2, |_| {
                // Relaxed: the number alone counts.
                arrived.fetch_add(1, Ordering::Relaxed);
                while arrived.load(Ordering::Relaxed) < goal {
                    std::thread::yield_now();
                }
            });
        }
        (seconds(2) - begun) * 1e6 / ROUNDS as f64
    });
    times.fold(f64::MAX, f64::min)
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, usual| {
        let given = arguments.get(i);
        given.map_or(usual, |n| n.parse().expect("a number"))
    };
    let (threads, turns) = (number(0, 2), number(1, 9));
    for (name, activations) in [("exact", Activations::Exact), ("int8", Activations::Int8)] {
        if arguments.get(2).is_some_and(|only| !only.split(',').any(|only| only == name)) {
            continue;
        }
        let model = Model {
            form: Form::detect(),
            team: Team::new(threads).expect("threads"),
            memory: WeightMemory::default(),
            activations,
        };
        if threads == 2 {
            println!("a round of both threads: {:.2} us", round(&model.team));
        }
        let layers: Vec<Linears> = (0..LAYERS).map(|_| model.layer()).collect();
        let head = model.linear(Format::Q8_0, HIDDEN, &[VOCABULARY]);
        for step in arguments.get(3).map_or(STEPS, |steps| steps).split(',') {
            let numbers: Vec<usize> =
                step.split(['x', '@']).map(|n| n.parse().expect("a number")).collect();
            let [sequences, tokens, before] = numbers[..] else {
                panic!("steps are like {STEPS}");
            };
            measure(&model, &layers, &head, (sequences, tokens, before), turns);
        }
    }
}

fn measure(
    model: &Model,
    layers: &[Linears],
    head: &PackedLinear<f32>,
    (sequences, tokens, before): (usize, usize, usize),
    turns: usize,
) {
    let attention = Attention::new(HEADS, KV_HEADS, DIMS, 0.125).expect("heads");
    let pages = (before + tokens).div_ceil(BLOCK);
    let total = sequences * pages;
    // Neighbours are not adjacent.
    let indices: Vec<i32> = (0..total).map(|i| (i * 7919 % total) as i32).collect();
    let offsets =
        |each: usize| -> Vec<i32> { (0..=sequences).map(|i| (i * each) as i32).collect() };
    let tables = BlockTables {
        qo_indptr: &offsets(tokens),
        kv_indptr: &offsets(pages),
        kv_indices: &indices,
        last_page_len: &vec![((before + tokens - 1) % BLOCK + 1) as i32; sequences],
        first_pages: None,
    };
    let plan = Plan::new(tables, total, BLOCK, &attention).expect("tables");
    let rows = sequences * tokens;
    let slots = (0..rows).map(|row| {
        let (sequence, position) = (row / tokens, before + row % tokens);
        i64::from(indices[sequence * pages + position / BLOCK]) * BLOCK as i64
            + (position % BLOCK) as i64
    });
    let slots: Vec<i64> = slots.collect();
    let weight = [1.0; HIDDEN];
    let angles = vec![0.5; rows * DIMS / 2];
    let norm = RmsNorm { weight: &weight, offset: 0.0, group: HIDDEN, eps: 1e-5 };
    let decoder: Vec<_> = layers.iter().map(|one| decoder_layer(norm, one)).collect();
    let groups = [Group { plan: &plan, slots: &slots }];
    let angles = Rows::new(&angles, DIMS / 2);
    let rotations = [Rotation { cos: angles, sin: angles }];
    let step = Step {
        form: model.form,
        team: &model.team,
        groups: &groups,
        rotations: &rotations,
        guesses: &[],
    };
    let page = vec![0.1_f32; total * 2 * KV_HEADS * BLOCK * DIMS];
    let mut caches: Vec<Vec<f32>> = layers.iter().map(|_| page.clone()).collect();
    let mut scratch = Scratch::new(rows, HIDDEN, &decoder).expect("memory");
    let mut logits = vec![0.0_f32; sequences * VOCABULARY];
    let mut times = Vec::new();
    let (mut finite, mut rounds) = (true, 0);
    for _ in 0..turns {
        let mut x: Vec<f32> =
            (0..rows * HIDDEN).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        let begun = seconds(model.team.threads());
        let counted = model.team.rounds();
        let mut x = RowsMut::new(&mut x, HIDDEN);
        for (layer, cache) in decoder.iter().zip(&mut caches) {
            let cache = RowsMut::new(cache, 2 * KV_HEADS * BLOCK * DIMS);
            let mut cache = KvPagesMut::Numbers(cache);
            step.forward(layer, &mut cache, None, &mut x, &mut scratch).expect("memory");
        }
        rounds = model.team.rounds() - counted;
        let last = x.read().row(rows - 1).repeat(sequences);
        let to = RowsMut::new(&mut logits, VOCABULARY);
        head.forward(model.form, &model.team, Rows::new(&last, HIDDEN), None, &to).expect("memory");
        times.push(seconds(model.team.threads()) - begun);
        finite &= logits.iter().all(|x| x.is_finite());
    }
    times.sort_by(f64::total_cmp);
    let linears = |l: &Linears| [&l.qkv, &l.out, &l.gate_up, &l.down].map(|l| l.num_bytes());
    let bytes: usize = layers.iter().flat_map(linears).sum::<usize>() + head.num_bytes();
    let middle = times[turns / 2];
    println!(
        "{:?} {:?} {sequences} x {tokens} after {before}: median {:.2} ms, best {:.2}, {:.1} tokens/s, {:.1} GB/s, {} rounds{}",
        model.form,
        model.activations,
        middle * 1e3,
        times[0] * 1e3,
        rows as f64 / middle,
        bytes as f64 / middle / 1e9,
        rounds as usize / LAYERS,
        if finite { "" } else { ", not finite" },
    );
}

fn decoder_layer<'a>(norm: RmsNorm<'a, f32>, linears: &'a Linears) -> DecoderLayer<'a, f32> {
    DecoderLayer {
        input_norm: Some(norm),
        mixer: Mixer::Attention(AttentionMixer {
            qkv: &linears.qkv,
            makes: Makes::All,
            gated: false,
            qk_norm: None,
            key_norm: None,
            value_norm: None,
            sinks: None,
            out: &linears.out,
            group: 0,
            rope: 0,
            query_rope: 0,
        }),
        mixer_out_norm: None,
        mlp_norm: Some(norm),
        feed_forward: Some(FeedForward::Dense(Dense {
            gate_up: &linears.gate_up,
            gate: Gate::Silu,
            down: &linears.down,
        })),
        mlp_out_norm: None,
        own_input: None,
        scale: None,
    }
}
