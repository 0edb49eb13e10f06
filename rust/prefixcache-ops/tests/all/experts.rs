//! A mixture of experts against the obvious computation, and against itself: the same bits for a row
//! whoever is computed with it.

use prefixcache_cpu::{Bf16, Element, Form, Rows, RowsMut, Team, WeightMemory};
use prefixcache_ops::experts::{Experts, Router, Scores, Scratch, SharedExpert};
use prefixcache_ops::rowwise::Gate;
use prefixcache_ops::{Activations, Format, PackedLinear};
use proptest::prelude::*;

use crate::cases::cases;
use crate::noise::noise;

const HIDDEN: usize = 64;
const WIDE: usize = 96;
const EXPERTS: usize = 7;
/// The size of the shared expert; more than a token's experts have together, where these are few.
const SHARED: usize = 160;

/// How rows are routed.
#[derive(Clone, Copy, Debug)]
struct Routing {
    scores: Scores,
    has_selection_bias: bool,
    top_k: usize,
    renormalise: Option<f32>,
    scale: f32,
    has_expert_scales: bool,
    shared: Shared,
}

/// The shared expert.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shared {
    None,
    Plain,
    Weighed,
}

fn routings() -> impl Strategy<Value = Routing> {
    let scores = prop::sample::select(vec![Scores::Softmax, Scores::Sigmoid]);
    let renormalise = prop::sample::select(vec![None, Some(0.0), Some(1e-6)]);
    let scale = prop::sample::select(vec![1.0_f32, 2.5]);
    let shared = prop::sample::select(vec![Shared::None, Shared::Plain, Shared::Weighed]);
    (scores, any::<[bool; 2]>(), 1..=EXPERTS, renormalise, scale, shared).prop_map(
        |(scores, has, top_k, renormalise, scale, shared)| Routing {
            scores,
            has_selection_bias: has[0],
            top_k,
            renormalise,
            scale,
            has_expert_scales: has[1],
            shared,
        },
    )
}

/// A layer whose weights are dense or blocks; the numbers that they stand for too.
struct Layer<E> {
    router: PackedLinear<E>,
    gate_up: PackedLinear<E>,
    down: PackedLinear<E>,
    selection_bias: Vec<f32>,
    expert_scales: Vec<f32>,
    shared_gate_up: PackedLinear<E>,
    shared_down: PackedLinear<E>,
    shared_weight: PackedLinear<E>,
}

impl<E: Element> Layer<E> {
    fn random(form: Form, format: Option<Format>, activations: Activations) -> Self {
        let linear = |seed, inputs: usize, parts: &[usize], format: Option<Format>| {
            let (memory, team) = (WeightMemory::default(), Team::new(1).expect("threads"));
            let layer = PackedLinear::new(inputs, parts, true).expect("memory");
            let mut layer = layer.with_activations(activations);
            let outputs: usize = parts.iter().sum();
            let weight = noise::<E>(seed, outputs * inputs);
            let mut first = 0;
            for (number, &rows) in parts.iter().enumerate() {
                match format {
                    // One expert is dense in a layer of blocks.
                    Some(format) if number > 1 => {
                        let blocks = blocks(seed + number as u64, format, inputs, rows);
                        let blocks = Rows::new(&blocks, format.row_bytes(inputs));
                        layer
                            .copy_blocks(&memory, form, &team, first, format, blocks)
                            .expect("sound blocks");
                    }
                    _ => {
                        let weight = &weight[first * inputs..][..rows * inputs];
                        let weight = Rows::new(weight, inputs);
                        layer.copy_rows(&memory, first, weight).expect("memory");
                    }
                }
                first += rows;
            }
            layer.copy_bias(0, &noise::<E>(seed + 50, outputs));
            layer
        };
        Self {
            router: linear(1, HIDDEN, &[EXPERTS], None),
            gate_up: linear(2, HIDDEN, &[WIDE; 2 * EXPERTS], format),
            down: linear(3, WIDE, &[HIDDEN; EXPERTS], format),
            selection_bias: noise(4, EXPERTS),
            expert_scales: noise(8, EXPERTS),
            shared_gate_up: linear(5, HIDDEN, &[SHARED; 2], None),
            shared_down: linear(6, SHARED, &[HIDDEN], None),
            shared_weight: linear(7, HIDDEN, &[1], None),
        }
    }

    fn experts(&self, routing: Routing) -> Experts<'_, E> {
        Experts {
            router: Router {
                linear: &self.router,
                scores: routing.scores,
                selection_bias: routing.has_selection_bias.then_some(&*self.selection_bias),
                top_k: routing.top_k,
                renormalise: routing.renormalise,
                scale: routing.scale,
                expert_scales: routing.has_expert_scales.then_some(&*self.expert_scales),
            },
            gate_up: &self.gate_up,
            gate: Gate::Silu,
            down: &self.down,
            shared: (routing.shared != Shared::None).then_some(SharedExpert {
                gate_up: &self.shared_gate_up,
                gate: Gate::Silu,
                down: &self.shared_down,
                weight: (routing.shared == Shared::Weighed).then_some(&self.shared_weight),
            }),
        }
    }
}

/// Random codes, with scales of a usual size.
fn blocks(seed: u64, format: Format, inputs: usize, rows: usize) -> Vec<u8> {
    let numbers = noise::<f32>(seed, rows * format.row_bytes(inputs));
    let mut bytes: Vec<u8> = numbers.iter().map(|x| (x * 128.0) as i8 as u8).collect();
    for block in bytes.chunks_exact_mut(format.bytes()) {
        block[1] = 0x28;
        if format == Format::Q4_1 {
            block[3] = 0x28;
        }
    }
    bytes
}

fn forward<E: Element>(
    experts: &Experts<'_, E>,
    form: Form,
    threads: usize,
    x: &[E],
    residual: Option<&[E]>,
) -> Vec<E> {
    let team = Team::new(threads).expect("threads");
    let mut out = vec![E::from_f32(f32::NAN); x.len()];
    let rows = x.len() / HIDDEN;
    let mut scratch = Scratch::new(rows, std::iter::once(experts)).expect("memory");
    let residual = residual.map(|residual| Rows::new(residual, HIDDEN));
    experts
        .forward(
            form,
            &team,
            Rows::new(x, HIDDEN),
            Rows::new(x, HIDDEN),
            residual,
            &RowsMut::new(&mut out, HIDDEN),
            &mut scratch,
        )
        .expect("memory");
    out
}

/// The numbers of a linear's rows, and its biases.
fn dense<E: Element>(linear: &PackedLinear<E>, bias_seed: u64) -> (Vec<Vec<f64>>, Vec<f64>) {
    let team = Team::new(1).expect("threads");
    let ids: Vec<usize> = (0..linear.outputs()).collect();
    let numbers = crate::read(linear, &team, &ids);
    let wide = |row: &[E]| row.iter().map(|x| f64::from(x.to_f32())).collect();
    let rows = numbers.chunks_exact(linear.inputs()).map(wide).collect();
    (rows, wide(&noise::<E>(bias_seed, linear.outputs())))
}

fn times(
    (rows, bias): &(Vec<Vec<f64>>, Vec<f64>),
    first: usize,
    count: usize,
    x: &[f64],
) -> Vec<f64> {
    let rows = rows.iter().zip(bias).skip(first).take(count);
    let dot = |row: &Vec<f64>| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
    rows.map(|(row, bias)| dot(row) + bias).collect()
}

/// A row's result, computed expert by expert in `f64`.
fn reference<E: Element>(layer: &Layer<E>, routing: Routing, x: &[f64]) -> Vec<f64> {
    let logits = times(&dense(&layer.router, 51), 0, EXPERTS, x);
    let scores: Vec<f64> = match routing.scores {
        Scores::Softmax => {
            let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
            logits.iter().map(|logit| logit.exp() / total).collect()
        }
        Scores::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
    };
    let bias = |expert: usize| match routing.has_selection_bias {
        true => f64::from(layer.selection_bias[expert]),
        false => 0.0,
    };
    let mut order: Vec<usize> = (0..EXPERTS).collect();
    order.sort_by(|&a, &b| (scores[b] + bias(b)).total_cmp(&(scores[a] + bias(a))));
    order.truncate(routing.top_k);
    let total = match routing.renormalise {
        Some(more) => order.iter().map(|&expert| scores[expert]).sum::<f64>() + f64::from(more),
        None => 1.0,
    };
    let (gate_up, down) = (dense(&layer.gate_up, 52), dense(&layer.down, 53));
    let mut sum = vec![0.0; HIDDEN];
    let mut add = |weight: f64, made: Vec<f64>| {
        sum.iter_mut().zip(made).for_each(|(sum, made)| *sum += weight * made);
    };
    for expert in order {
        let scale = match routing.has_expert_scales {
            true => routing.scale * layer.expert_scales[expert],
            false => routing.scale,
        };
        let weight = scores[expert] / total * f64::from(scale);
        let opened = opened(&times(&gate_up, 2 * WIDE * expert, 2 * WIDE, x));
        add(weight, times(&down, HIDDEN * expert, HIDDEN, &opened));
    }
    if routing.shared != Shared::None {
        let opened = opened(&times(&dense(&layer.shared_gate_up, 55), 0, 2 * SHARED, x));
        let made = times(&dense(&layer.shared_down, 56), 0, HIDDEN, &opened);
        let logit = times(&dense(&layer.shared_weight, 57), 0, 1, x)[0];
        let is_weighed = routing.shared == Shared::Weighed;
        let weight = if is_weighed { 1.0 / (1.0 + (-logit).exp()) } else { 1.0 };
        add(weight, made);
    }
    sum
}

/// What gates let pass.
fn opened(wide: &[f64]) -> Vec<f64> {
    let (gates, values) = wide.split_at(wide.len() / 2);
    let pairs = gates.iter().zip(values);
    pairs.map(|(gate, value)| gate / (1.0 + (-gate).exp()) * value).collect()
}

fn check_reference<E: Element>(form: Form, routing: Routing, format: Option<Format>) {
    let layer = Layer::<E>::random(form, format, Activations::Exact);
    let x = noise::<E>(9, 5 * HIDDEN);
    let got = forward(&layer.experts(routing), form, 2, &x, None);
    for (x, got) in x.chunks_exact(HIDDEN).zip(got.chunks_exact(HIDDEN)) {
        let x: Vec<f64> = x.iter().map(|x| f64::from(x.to_f32())).collect();
        let want = reference(&layer, routing, &x);
        let largest = want.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
        for (got, want) in got.iter().zip(want) {
            let error = (f64::from(got.to_f32()) - want).abs();
            assert!(
                error < 1e-4 * largest,
                "{form:?} {routing:?} {format:?}: off by {error} from {want}"
            );
        }
    }
}

fn check_companions<E: Element + PartialEq>(
    form: Form,
    routing: Routing,
    (format, activations): (Option<Format>, Activations),
    (rows, threads): (usize, usize),
) {
    let layer = Layer::<E>::random(form, format, activations);
    let experts = layer.experts(routing);
    let (x, residual) = (noise::<E>(9, rows * HIDDEN), noise::<E>(10, rows * HIDDEN));
    let together = forward(&experts, form, threads, &x, Some(&residual));
    for row in 0..rows {
        let own = row * HIDDEN..(row + 1) * HIDDEN;
        let alone = forward(&experts, form, 1, &x[own.clone()], Some(&residual[own.clone()]));
        assert!(
            alone == together[own],
            "{form:?} {routing:?} {format:?} {activations:?}: row {row} of {rows}"
        );
    }
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn a_row_does_not_depend_on_its_companions(
        form in prop::sample::select(Form::available()),
        routing in routings(),
        weights in prop::sample::select(vec![
            (None, Activations::Exact),
            (Some(Format::Q4_1), Activations::Exact),
            (Some(Format::Q8_0), Activations::Exact),
            (Some(Format::Q8_0), Activations::Int8),
        ]),
        shape in (1_usize..60, 1_usize..=2),
    ) {
        check_companions::<f32>(form, routing, weights, shape);
        check_companions::<Bf16>(form, routing, weights, shape);
    }

    #[test]
    fn near_the_reference(
        form in prop::sample::select(Form::available()),
        routing in routings(),
        format in prop::sample::select(vec![None, Some(Format::Q4_1), Some(Format::Q8_0)]),
    ) {
        check_reference::<f32>(form, routing, format);
    }
}

/// Rows that all go to one expert are more than a task's.
#[test]
fn one_expert_may_have_all_rows() {
    let routing = Routing {
        scores: Scores::Softmax,
        has_selection_bias: false,
        top_k: 1,
        renormalise: None,
        scale: 1.0,
        has_expert_scales: false,
        shared: Shared::None,
    };
    for form in Form::available() {
        let layer = Layer::<f32>::random(form, Some(Format::Q4_1), Activations::Exact);
        let experts = layer.experts(routing);
        let one = noise::<f32>(9, HIDDEN);
        let alone = forward(&experts, form, 1, &one, None);
        let many = forward(&experts, form, 2, &one.repeat(450), None);
        assert!(many.chunks_exact(HIDDEN).all(|row| row == alone), "{form:?}");
    }
}

/// Equal scores: the experts with the lower numbers, in their order.
#[test]
fn ties_go_to_the_lower_number() {
    let form = Form::available()[0];
    let mut layer = Layer::<f32>::random(form, None, Activations::Exact);
    layer.router = PackedLinear::new(HIDDEN, &[EXPERTS], true).expect("memory");
    let routing = |top_k| Routing {
        scores: Scores::Softmax,
        has_selection_bias: false,
        top_k,
        renormalise: Some(0.0),
        scale: 1.0,
        has_expert_scales: false,
        shared: Shared::None,
    };
    let x = noise::<f32>(9, HIDDEN);
    let forward = |layer: &Layer<f32>| forward(&layer.experts(routing(2)), form, 1, &x, None);
    let tied = forward(&layer);
    layer.router.copy_bias(0, &[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(forward(&layer), tied);
    layer.router.copy_bias(0, &[0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    assert_ne!(forward(&layer), tied);
}
