//! The layers against the obvious computation, and against themselves: the same bits for a row
//! however many rows are computed with it.

use prefixcache_cpu::{Bf16, Element, Form, Rows, RowsMut, Team, WeightMemory};
use prefixcache_ops::PackedLinear;
use prefixcache_ops::rowwise::{Gate, RmsNorm, gated, open, rms_norm, rotate};
use proptest::prelude::*;

use crate::cases::cases;
use crate::forward;
use crate::noise::noise;

fn assert_near<E: Element>(got: &[E], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    let unit = if E::PER_WORD == 1 { 2e-6 } else { 4e-3 };
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got.to_f32()) - want).abs();
        assert!(error <= unit * want.abs().max(4.0), "number {i}: off by {error} from {want}");
    }
}

/// Calls `layer(rows of x, out)` on all rows at once and on each alone; returns the former.
fn alone_and_together<E: Element + PartialEq + std::fmt::Debug>(
    x: &[E],
    width: usize,
    out_width: usize,
    layer: impl Fn(&[E], &mut [E], usize),
) -> Vec<E> {
    let rows = x.len() / width;
    let mut together = vec![E::from_f32(f32::NAN); rows * out_width];
    layer(x, &mut together, 0);
    for row in 0..rows {
        let mut alone = vec![E::from_f32(f32::NAN); out_width];
        layer(&x[row * width..(row + 1) * width], &mut alone, row);
        assert_eq!(alone, together[row * out_width..(row + 1) * out_width], "row {row}");
    }
    together
}

fn check_linear<E: Element + PartialEq + std::fmt::Debug>(
    form: Form,
    threads: usize,
    (rows, inputs, outputs): (usize, usize, usize),
    (with_bias, with_residual): (bool, bool),
) {
    let (weight, x) = (noise::<E>(1, inputs * outputs), noise::<E>(2, rows * inputs));
    let (bias, residual) = (noise::<E>(3, outputs), noise::<E>(4, rows * outputs));
    let team = Team::new(threads).expect("threads");
    let mut layer = PackedLinear::new(inputs, &[outputs], with_bias).expect("memory");
    let half = outputs / 2;
    let memory = WeightMemory::default();
    for (first, rows) in [(half, &weight[half * inputs..]), (0, &weight[..half * inputs])] {
        let rows = Rows::new(rows, inputs);
        layer.copy_rows(&memory, first, rows).expect("memory");
    }
    if with_bias {
        layer.copy_bias(0, &bias);
    }
    let out = alone_and_together(&x, inputs, outputs, |x, out, first| {
        let residual = &residual[first * outputs..][..out.len()];
        let residual = with_residual.then_some(residual);
        out.copy_from_slice(&forward(&layer, form, &team, x, residual));
    });
    let number = |e: E| f64::from(e.to_f32());
    let want: Vec<f64> = (0..rows * outputs)
        .map(|i| {
            let (row, output) = (i / outputs, i % outputs);
            let pairs = x[row * inputs..][..inputs].iter().zip(&weight[output * inputs..]);
            let dot: f64 = pairs.map(|(&a, &b)| number(a) * number(b)).sum();
            let bias = if with_bias { number(bias[output]) } else { 0.0 };
            dot + bias + if with_residual { number(residual[i]) } else { 0.0 }
        })
        .collect();
    assert_near(&out, &want);
}

fn check_norm<E: Element + PartialEq + std::fmt::Debug>(
    form: Form,
    threads: usize,
    rows: usize,
    (group, groups): (usize, usize),
    offset: f32,
) {
    let (team, width) = (Team::new(threads).expect("threads"), group * groups);
    let (x, residual) = (noise::<E>(1, rows * width), noise::<E>(3, rows * width));
    for weight_width in [group, width] {
        let weight = noise::<E>(2, weight_width);
        let norm = RmsNorm { weight: &weight, offset, group, eps: 1e-5 };
        let out = alone_and_together(&x, width, width, |x, out, _| {
            let out = RowsMut::new(out, width);
            rms_norm(form, &team, norm, Rows::new(x, width), None, &out);
        });
        let number = |e: &E| f64::from(e.to_f32());
        let weights = weight.iter().cycle();
        let want: Vec<f64> = x
            .chunks_exact(group)
            .flat_map(|x| {
                let mean = x.iter().map(|x| number(x).powi(2)).sum::<f64>() / group as f64;
                x.iter().map(move |x| number(x) / (mean + 1e-5).sqrt())
            })
            .zip(weights)
            .map(|(x, w)| x * (number(w) + f64::from(offset)))
            .collect();
        assert_near(&out, &want);

        let added = alone_and_together(&x, width, width, |x, out, first| {
            let residual = Rows::new(&residual[first * width..][..out.len()], width);
            let (x, out) = (Rows::new(x, width), RowsMut::new(out, width));
            rms_norm(form, &team, norm, x, Some(residual), &out);
        });
        let sum = |(norm, residual): (&E, &E)| E::from_f32(residual.to_f32() + norm.to_f32());
        let sums: Vec<E> = out.iter().zip(&residual).map(sum).collect();
        assert_eq!(added, sums, "the norm and the sum are rounded one by one");
    }
}

fn check_gated<E: Element + PartialEq + std::fmt::Debug>(
    form: Form,
    threads: usize,
    rows: usize,
    width: usize,
    gate: Gate,
) {
    let wide = gate.width() * width;
    let x: Vec<E> =
        noise::<E>(1, rows * wide).iter().map(|e| E::from_f32(e.to_f32() * 9.0)).collect();
    let team = Team::new(threads).expect("threads");
    let out = alone_and_together(&x, wide, width, |x, out, _| {
        gated(form, &team, gate, Rows::new(x, wide), &RowsMut::new(out, width));
    });
    let open = |x: f64| match gate {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + u.tanh())
        }
        Gate::SquaredRelu => x.max(0.0),
        Gate::ClampedSwiglu => x.min(7.0) / (1.0 + (-1.702 * x.min(7.0)).exp()),
    };
    let passed = |x: f64| match gate {
        Gate::ClampedSwiglu => x.clamp(-7.0, 7.0) + 1.0,
        Gate::Silu | Gate::GeluTanh | Gate::SquaredRelu => x,
    };
    let want: Vec<f64> = (0..rows * width)
        .map(|i| {
            let row = &x[i / width * wide..];
            let up = f64::from(row[wide - width + i % width].to_f32());
            open(f64::from(row[i % width].to_f32())) * passed(up)
        })
        .collect();
    assert_near(&out, &want);
}

/// Gates that are opened as their columns are made, against a gate that follows its layer; the rounds that
/// the threads took.
fn check_forward_gated<E: Element + PartialEq + std::fmt::Debug>(
    form: Form,
    rows: usize,
    width: usize,
    is_one_part: bool,
    gate: Gate,
) -> u64 {
    let (inputs, wide) = (6, gate.width() * width);
    let parts = if is_one_part { vec![wide] } else { vec![width; gate.width()] };
    let mut layer = PackedLinear::new(inputs, &parts, false).expect("memory");
    let (weight, x) = (noise::<E>(1, inputs * wide), noise::<E>(2, rows * inputs));
    let (weight, x) = (Rows::new(&weight, inputs), Rows::new(&x, inputs));
    layer.copy_rows(&WeightMemory::default(), 0, weight).expect("memory");
    let room =
        || (vec![E::from_f32(f32::NAN); rows * wide], vec![E::from_f32(f32::NAN); rows * width]);
    let (mut made, mut want) = room();
    let mut made = RowsMut::new(&mut made, wide);
    let team = Team::new(3).expect("threads");
    layer.forward(form, &team, x, None, &made).expect("memory");
    gated(form, &team, gate, made.read(), &RowsMut::new(&mut want, width));
    let (mut made, mut out) = room();
    let (mut made, passed) = (RowsMut::new(&mut made, wide), RowsMut::new(&mut out, width));
    let rounds = team.rounds();
    layer.forward_gated(form, &team, x, gate, &mut made, &passed).expect("memory");
    assert_eq!(out, want);
    team.rounds() - rounds
}

fn check_rotate<E: Element + PartialEq + std::fmt::Debug>(
    form: Form,
    threads: usize,
    rows: usize,
    (half, copied): (usize, usize),
    heads: usize,
) {
    let head = 2 * half + copied;
    let width = head * heads;
    let x = noise::<E>(1, rows * width);
    let (cos, sin) = (noise::<f32>(2, rows * half), noise::<f32>(3, rows * half));
    let team = Team::new(threads).expect("threads");
    let out = alone_and_together(&x, width, width, |x, out, first| {
        let angles = first * half..(first + out.len() / width) * half;
        let (cos, sin) = (Rows::new(&cos[angles.clone()], half), Rows::new(&sin[angles], half));
        rotate(form, &team, cos, sin, head, Rows::new(x, width), &RowsMut::new(out, width));
    });
    let number = |i: usize| f64::from(x[i].to_f32());
    let want: Vec<f64> = (0..rows * width)
        .map(|i| {
            let at = i % width % head;
            if at >= 2 * half {
                return number(i);
            }
            let angle = i / width * half + at % half;
            let (c, s) = (f64::from(cos[angle]), f64::from(sin[angle]));
            match at < half {
                true => number(i) * c - number(i + half) * s,
                false => number(i) * c + number(i - half) * s,
            }
        })
        .collect();
    assert_near(&out, &want);
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn linear(
        form in prop::sample::select(Form::available()),
        threads in 1_usize..=2,
        rows in 1_usize..60,
        half_inputs in 1_usize..70,
        outputs in 1_usize..200,
        extras in any::<(bool, bool)>(),
    ) {
        check_linear::<f32>(form, threads, (rows, 2 * half_inputs, outputs), extras);
        check_linear::<Bf16>(form, threads, (rows, 2 * half_inputs, outputs), extras);
    }

    #[test]
    fn rowwise(
        form in prop::sample::select(Form::available()),
        threads in 1_usize..=2,
        rows in 1_usize..40,
        half in 1_usize..80,
        copied in prop_oneof![Just(0), 1_usize..40],
        heads in 1_usize..5,
        gate in prop::sample::select(vec![
            Gate::Silu,
            Gate::GeluTanh,
            Gate::ClampedSwiglu,
            Gate::SquaredRelu,
        ]),
        offset in prop::sample::select(vec![0.0, 1.0]),
    ) {
        check_norm::<f32>(form, threads, rows, (half, heads), offset);
        check_norm::<Bf16>(form, threads, rows, (half, heads), offset);
        check_gated::<f32>(form, threads, rows, half, gate);
        check_gated::<Bf16>(form, threads, rows, half, gate);
        for width in [64 * heads, half] {
            check_forward_gated::<f32>(form, rows, width, copied == 0, gate);
            check_forward_gated::<Bf16>(form, 5 * rows, width, copied == 0, gate);
        }
        check_rotate::<f32>(form, threads, rows, (half, copied), heads);
        check_rotate::<Bf16>(form, threads, rows, (half, copied), heads);
    }
}

#[test]
fn many_rows_are_cut_into_tasks_without_a_trace() {
    for form in Form::available() {
        check_linear::<Bf16>(form, 2, (431, 64, 130), (true, true));
        check_norm::<Bf16>(form, 2, 300, (64, 3), 1.0);
    }
}

#[test]
fn gates_of_few_rows_are_opened_in_the_round_of_their_layer() {
    for (rows, rounds) in [(24, 1), (25, 2)] {
        let found = check_forward_gated::<f32>(Form::detect(), rows, 576, false, Gate::Silu);
        assert_eq!(found, rounds, "{rows} rows");
    }
}

/// What a gate lets pass of 1, for each of these numbers.
fn opened(form: Form, gate: Gate, numbers: &[f32]) -> Vec<f32> {
    let x = [numbers, &vec![1.0; numbers.len()]].concat();
    let mut out = vec![f32::NAN; numbers.len()];
    gated(
        form,
        &Team::new(1).expect("threads"),
        gate,
        Rows::new(&x, x.len()),
        &RowsMut::new(&mut out, numbers.len()),
    );
    out
}

#[test]
fn gelu_is_as_exact_as_the_exponential() {
    let numbers: Vec<f32> = (-12_000..12_000).map(|i| i as f32 / 1000.0).collect();
    for form in Form::available() {
        for (&x, got) in numbers.iter().zip(opened(form, Gate::GeluTanh, &numbers)) {
            let (wide, root) = (f64::from(x), (2.0 / std::f64::consts::PI).sqrt());
            let tanh = (root * (wide + 0.044715 * wide.powi(3))).tanh();
            let want = 0.5 * wide * (1.0 + tanh);
            let error = (f64::from(got) - want).abs();
            assert!(error < 5e-7 * want.abs() + 1e-7, "{form:?}: gelu({x}) = {got}, want {want}");
        }
    }
}

#[test]
fn gates_at_the_extremes() {
    for form in Form::available() {
        for gate in [Gate::Silu, Gate::GeluTanh] {
            let got = opened(form, gate, &[-1e20, -100.0, 0.0, 100.0, 1e20, f32::NAN]);
            assert_eq!(&got[2..5], &[0.0, 100.0, 1e20], "{form:?}, {gate:?}");
            let closed = got[..2].iter().all(|y| y.abs() < 1e-15);
            assert!(closed && got[5].is_nan(), "{form:?}, {gate:?}: {got:?}");
        }
    }
}

#[test]
fn a_gate_that_multiplies_is_a_sigmoid_wherever_it_stands() {
    let gates = [&[-1e20, -100.0, 0.0, 100.0, 1e20], &noise::<f32>(2, 72)[..]].concat();
    let x = noise::<f32>(1, gates.len());
    let opened = |form, gates: &[f32], x: &[f32]| {
        let mut out = vec![f32::NAN; x.len()];
        let [gates, x] = [gates, x].map(|numbers| Rows::new(numbers, numbers.len()));
        let out_rows = RowsMut::new(&mut out, x.width());
        open(form, &Team::new(1).expect("threads"), gates, x, &out_rows);
        out
    };
    for form in Form::available() {
        let all = opened(form, &gates, &x);
        let numbers = x.iter().zip(&gates);
        let want: Vec<f64> =
            numbers.map(|(&x, &gate)| f64::from(x) / (1.0 + f64::from(-gate).exp())).collect();
        assert_near(&all, &want);
        for (i, got) in all.iter().enumerate() {
            let alone = opened(form, &gates[i..=i], &x[i..=i])[0];
            assert_eq!(alone.to_bits(), got.to_bits(), "{form:?}");
        }
    }
}

#[test]
fn gates_do_not_depend_on_the_place_in_a_row() {
    let numbers = noise::<f32>(1, 77);
    for form in Form::available() {
        for gate in [Gate::Silu, Gate::GeluTanh] {
            let all = opened(form, gate, &numbers);
            for (i, &number) in numbers.iter().enumerate() {
                let alone = opened(form, gate, &[number])[0];
                assert_eq!(alone.to_bits(), all[i].to_bits(), "{form:?}, {gate:?}");
            }
        }
    }
}

#[test]
fn a_norm_without_an_offset_leaves_its_weights_as_they_are() {
    let weight = [-0.0, 0.0, 1.0, f32::MIN_POSITIVE];
    for form in Form::available() {
        let norm = RmsNorm { weight: &weight, offset: 0.0, group: 4, eps: 0.0 };
        let (x, mut out) = ([1.0; 4], [f32::NAN; 4]);
        let team = Team::new(1).expect("threads");
        let (x, rows) = (Rows::new(&x, 4), RowsMut::new(&mut out, 4));
        rms_norm(form, &team, norm, x, None, &rows);
        assert_eq!(out.map(f32::to_bits), weight.map(f32::to_bits), "{form:?}");
    }
}

#[test]
fn logits_leave_a_bf16_layer_in_f32() {
    let (weight, x) = (noise::<Bf16>(1, 64 * 100), noise::<Bf16>(2, 64));
    let mut layer = PackedLinear::new(64, &[100], false).expect("memory");
    let (memory, rows) = (WeightMemory::default(), Rows::new(&weight, 64));
    layer.copy_rows(&memory, 0, rows).expect("memory");
    let team = Team::new(1).expect("threads");
    let out: Vec<f32> = forward(&layer, Form::detect(), &team, &x, None);
    let want: Vec<f64> = weight
        .chunks_exact(64)
        .map(|w| w.iter().zip(&x).map(|(w, x)| f64::from(w.to_f32()) * f64::from(x.to_f32())).sum())
        .collect();
    assert_near(&out, &want);
}
