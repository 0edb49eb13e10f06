//! The kernel against the obvious computation, and against itself: the same bits for a row however
//! the tokens around it are cut into steps.

use prefixcache_attention::{Attention, KvElement};
use prefixcache_cpu::{Bf16, Form, Team};
use proptest::prelude::*;

use crate::cases::cases;
use crate::common::{Layer, Step, Tokens, reference};

fn attentions() -> impl Strategy<Value = Attention> {
    let heads = prop_oneof![
        Just((1, 1)),
        Just((3, 1)),
        Just((4, 2)),
        Just((6, 3)),
        Just((8, 1))
    ];
    let head_dim = prop::sample::select(vec![16, 32, 48, 64, 80, 96, 128, 256]);
    let window = prop::option::of(0_usize..150);
    let softcap = prop::option::of(1.0_f32..50.0);
    (heads, head_dim, window, softcap).prop_map(
        |((heads, kv_heads), dims, window_left, softcap)| {
            let scale = 2.0 / (dims as f32).sqrt();
            let attention = Attention::new(heads, kv_heads, dims, scale);
            let mut attention = attention.expect("a shape that fits");
            (attention.window_left, attention.softcap) = (window_left, softcap);
            attention
        },
    )
}

fn forms() -> impl Strategy<Value = Form> {
    prop::sample::select(Form::available())
}

/// Lengths of up to three sequences, and how they are cut into chunks.
fn schedules() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
    (
        prop::collection::vec(1_usize..230, 1..4),
        prop::collection::vec(1_usize..90, 1..12),
    )
}

/// Steps in which each sequence advances by the chunks in turn, all sequences together.
fn steps(lengths: &[usize], chunks: &[usize]) -> Vec<Step> {
    let mut done = vec![0; lengths.len()];
    let mut chunks = chunks.iter().cycle();
    let mut steps = Vec::new();
    while done != lengths {
        let mut step = Step::new();
        for number in 0..lengths.len() {
            let to = lengths[number].min(done[number] + chunks.next().expect("a cycle"));
            if to > done[number] {
                step.push((number, done[number], to));
                done[number] = to;
            }
        }
        steps.push(step);
    }
    steps
}

/// Output rows of each sequence, computed alone and at once.
fn cold<E: KvElement>(
    attention: Attention,
    form: Form,
    block_size: usize,
    sequences: &[Tokens<E>],
    lengths: &[usize],
) -> Vec<Vec<E>> {
    let team = Team::new(1).expect("threads");
    (0..lengths.len())
        .map(|number| {
            let mut layer = Layer::new(attention, form, &team, block_size);
            layer.step(sequences, &vec![(number, 0, lengths[number])])
        })
        .collect()
}

fn check_against_reference<E: KvElement>(attention: Attention, form: Form, length: usize) {
    let tokens = vec![Tokens::<E>::random(5, length, &attention)];
    let out = &cold(attention, form, 16, &tokens, &[length])[0];
    let tolerance = if size_of::<E>() == 4 { 1e-4 } else { 2e-2 };
    for position in [0, length / 2, length - 1] {
        for head in 0..attention.heads() {
            let want = reference(&attention, &tokens[0], position, head);
            let start = (position * attention.heads() + head) * attention.head_dim();
            for (got, want) in out[start..].iter().zip(want) {
                let error = (f64::from(got.to_f32()) - want).abs();
                assert!(
                    error < tolerance,
                    "{form:?} {attention:?} at {position}: off by {error}"
                );
            }
        }
    }
}

fn check_schedule<E: KvElement + PartialEq>(
    attention: Attention,
    form: Form,
    block_size: usize,
    threads: usize,
    leaves_out: bool,
    (lengths, chunks): &(Vec<usize>, Vec<usize>),
) {
    let sequences: Vec<_> = lengths
        .iter()
        .zip(0..)
        .map(|(&length, seed)| Tokens::<E>::random(seed, length, &attention))
        .collect();
    let want = cold(attention, form, block_size, &sequences, lengths);
    let team = Team::new(threads).expect("threads");
    let mut layer = Layer::new(attention, form, &team, block_size);
    layer.leaves_out = leaves_out;
    let width = attention.heads() * attention.head_dim();
    for step in steps(lengths, chunks) {
        let out = layer.step(&sequences, &step);
        let mut rows = out.chunks_exact(width);
        for &(number, from, to) in &step {
            for position in from..to {
                let want = &want[number][position * width..(position + 1) * width];
                let same = rows.next().is_some_and(|row| row == want);
                assert!(
                    same,
                    "{form:?} {attention:?}: {number} at {position} in {step:?}"
                );
            }
            layer.give_away_behind_window(number, to);
        }
    }
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn near_the_reference(attention in attentions(), form in forms(), length in 1_usize..200) {
        check_against_reference::<f32>(attention, form, length);
        check_against_reference::<Bf16>(attention, form, length);
    }

    #[test]
    fn the_same_bits_in_every_schedule(
        attention in attentions(),
        form in forms(),
        block_size in prop::sample::select(vec![1, 7, 16, 64]),
        threads in 1_usize..=2,
        leaves_out in any::<bool>(),
        schedule in schedules(),
    ) {
        // A page of one token leaves room for few of them.
        let block_size = if schedule.0.iter().sum::<usize>() > 200 { 16 } else { block_size };
        check_schedule::<f32>(attention, form, block_size, threads, leaves_out, &schedule);
        check_schedule::<Bf16>(attention, form, block_size, threads, leaves_out, &schedule);
    }
}

#[test]
fn a_token_that_sees_only_itself_returns_its_value() {
    for form in Form::available() {
        // Heads that have no sinks.
        let attention = Attention::new(3, 1, 64, 0.125).expect("a shape that fits");
        let tokens = vec![Tokens::<f32>::random(1, 1, &attention)];
        let out = &cold(attention, form, 16, &tokens, &[1])[0];
        assert!(out.chunks_exact(64).all(|head| head == tokens[0].values));
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    assert!(Attention::new(4, 3, 64, 1.0).is_err());
    assert!(Attention::new(0, 1, 64, 1.0).is_err());
    assert!(Attention::new(4, 2, 72, 1.0).is_err());
    assert!(Attention::new(1 << 60, 1, 64, 1.0).is_err());
}
