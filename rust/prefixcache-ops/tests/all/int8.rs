//! Linears over activations in eight bits, against their plain definition: the same bits in every
//! form, for every number of rows.

use prefixcache_cpu::{Bf16, ByteForm, Element, Form, Rows, Team, WeightMemory};
use prefixcache_ops::int8::{Int8Weight, QuantizedRows};
use prefixcache_ops::quant::blocks::Block;
use prefixcache_ops::{Activations, Format, PackedLinear};
use proptest::prelude::*;

use crate::blocks::halves;
use crate::cases::cases;
use crate::noise::noise;
use crate::{forward, read};

/// Outputs of a panel.
const PANEL: usize = 64;

/// A number of half precision, exact.
fn half(bits: u16) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

/// Blocks whose scales and minimums are any finite numbers, the largest and denormal ones included.
fn random_blocks(format: Format, seed: u64, count: usize) -> Vec<u8> {
    let numbers: Vec<f32> = noise(seed, count * format.bytes());
    let bytes = numbers.iter().map(|x| ((x + 1.0) * 127.99) as u8);
    let mut bytes: Vec<u8> = bytes.collect();
    for block in bytes.chunks_exact_mut(format.bytes()) {
        if format == Format::MXFP4 {
            block[0] = block[0].min(252);
        }
        for &at in halves(format) {
            let is_finite = block[at + 1] & 0x7c != 0x7c;
            block[at + 1] &= if is_finite { 0xff } else { 0xbf };
        }
    }
    bytes
}

/// A block of activations: codes, scale, and the scale times the sum of the codes.
type Quantized = ([i32; 32], f32, f32);

fn quantized(x: &[f32]) -> Quantized {
    if x.iter().any(|x| !x.is_finite()) {
        return ([0; 32], f32::NAN, f32::NAN);
    }
    let highest = x.iter().fold(0.0_f32, |highest, x| highest.max(x.abs()));
    let scale = highest / 127.0;
    if scale < f32::MIN_POSITIVE {
        return ([0; 32], 0.0, 0.0);
    }
    let code = |i: usize| (x[i] * (127.0 / highest)).round_ties_even() as i32;
    let codes: [i32; 32] = std::array::from_fn(code);
    assert!(codes.iter().all(|code| code.abs() <= 127), "{codes:?}");
    (codes, scale, scale * codes.iter().sum::<i32>() as f32)
}

/// An output's sum: in `f64`, which is exact, up to wherever it is rounded.
fn sum(weights: &[Block], x: &[Quantized]) -> f32 {
    let mut acc = 0.0_f32;
    for (i, (codes, scale, scaled_sum)) in x.iter().enumerate() {
        let blocks = weights[0].format.block() / 32;
        let (weight, first) = (&weights[i / blocks], i % blocks * 32);
        let product = |k: usize| {
            let sixteens = [Format::Q2K, Format::Q3K, Format::Q6K];
            let group = if sixteens.contains(&weight.format) { 16 } else { 32 };
            let factor = f64::from(weight.scales.factors[(first + k) / group]);
            factor * f64::from(weight.codes[first + k]) * f64::from(codes[k])
        };
        let products: f64 = (0..32).map(product).sum();
        let scale_of_block = match weight.format {
            Format::MXFP4 => 2f64.powi(i32::from(weight.scales.d) - 128),
            _ => half(weight.scales.d),
        };
        acc = ((scale_of_block * products) as f32).mul_add(*scale, acc);
        if weight.format == Format::Q2K {
            let minimum = |k: usize| f64::from(weight.scales.minimums[(first + k) / 16]);
            let minimums: f64 = (0..32).map(|k| minimum(k) * f64::from(codes[k])).sum();
            acc = ((half(weight.scales.m) * -minimums) as f32).mul_add(*scale, acc);
        } else if let Some(minimum) = weight.offset(first) {
            acc = minimum.mul_add(*scaled_sum, acc);
        }
    }
    acc
}

fn assert_bits(got: f32, want: f32, what: impl std::fmt::Display) {
    let equal = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
    assert!(equal, "{what}: {got:e}, want {want:e}");
}

/// A weight of some format, its sums with rows of x by the definition.
struct Case {
    format: Format,
    inputs: usize,
    outputs: usize,
    blocks: Vec<u8>,
    x: Vec<f32>,
    want: Vec<f32>,
}

impl Case {
    fn new(format: Format, seed: u64, (units, outputs): (usize, usize), x: Vec<f32>) -> Self {
        let inputs = units * format.block();
        let blocks = random_blocks(format, seed, outputs * units);
        let weights: Vec<Block> =
            blocks.chunks_exact(format.bytes()).map(|bytes| Block::read(format, bytes)).collect();
        let want = x.chunks_exact(inputs).flat_map(|x| {
            let x: Vec<Quantized> = x.chunks_exact(32).map(quantized).collect();
            let sums = weights.chunks_exact(units).map(|weights| sum(weights, &x));
            sums.collect::<Vec<f32>>()
        });
        Self { format, inputs, outputs, want: want.collect(), blocks, x }
    }

    fn rows(&self) -> usize {
        self.x.len() / self.inputs
    }

    fn blocks(&self) -> Rows<'_, u8> {
        Rows::new(&self.blocks, self.format.row_bytes(self.inputs))
    }

    /// The kernel alone, in every form of it.
    fn check_forms(&self) {
        let (team, memory) = (Team::new(1).expect("threads"), WeightMemory::default());
        let weight = Int8Weight::new(&memory, self.format, self.inputs, self.outputs);
        let mut weight = weight.expect("memory");
        weight.pack(&team, self.blocks());
        for form in ByteForm::available() {
            let x = Rows::new(&self.x, self.inputs);
            let x = QuantizedRows::new(form, &team, x).expect("memory");
            for panel in 0..self.outputs.div_ceil(PANEL) {
                let mut sums = vec![[f32::NAN; PANEL]; self.rows()];
                weight.multiply(form, panel, &x, 0, &mut sums);
                for (row, sums) in sums.iter().enumerate() {
                    for (output, &sum) in (panel * PANEL..self.outputs).zip(sums) {
                        let want = self.want[row * self.outputs + output];
                        let what = format!("{form:?}, {}, row {row} of {output}", self.format);
                        assert_bits(sum, want, what);
                    }
                }
            }
        }
    }

    /// A layer with bias and residual, in every form, its rows at once and one by one.
    fn check_layer<E: Element>(&self, threads: usize, dense: usize) {
        let x: Vec<E> = self.x.iter().map(|&x| E::from_f32(x)).collect();
        assert!(x.iter().zip(&self.x).all(|(e, x)| e.to_f32().to_bits() == x.to_bits()));
        let width = self.outputs + dense;
        let bias: Vec<E> = noise(1, width);
        let residual: Vec<E> = noise(2, self.rows() * width);
        let team = Team::new(threads).expect("threads");
        let memory = WeightMemory::default();
        let layer = PackedLinear::<E>::new(self.inputs, &[dense, self.outputs], true);
        let mut layer = layer.expect("memory").with_activations(Activations::Int8);
        let weight: Vec<E> = noise(3, dense * self.inputs);
        layer.copy_rows(&memory, 0, Rows::new(&weight, self.inputs)).expect("memory");
        layer
            .copy_blocks(&memory, Form::detect(), &team, dense, self.format, self.blocks())
            .expect("blocks");
        layer.copy_bias(0, &bias);
        for form in Form::available() {
            let plain = self.plain(form, &team, &weight, (&bias, &residual));
            for at_once in [1, self.rows()] {
                let chunks = x.chunks(at_once * self.inputs).zip(residual.chunks(at_once * width));
                let out = chunks
                    .flat_map(|(x, residual)| forward(&layer, form, &team, x, Some(residual)));
                for (i, got) in out.enumerate() {
                    let (row, output) = (i / width, i % width);
                    let want = match output.checked_sub(dense) {
                        None => plain[row * dense + output],
                        Some(output) => {
                            self.want[row * self.outputs + output]
                                + bias[dense + output].to_f32()
                                + residual[i].to_f32()
                        }
                    };
                    let what =
                        format!("{form:?}, {at_once} rows at once, {}, number {i}", self.format);
                    assert_bits(got.to_f32(), E::from_f32(want).to_f32(), what);
                }
            }
        }
    }

    /// What the dense part gives in a layer of its own.
    fn plain<E: Element>(
        &self,
        form: Form,
        team: &Team,
        weight: &[E],
        (bias, residual): (&[E], &[E]),
    ) -> Vec<f32> {
        let dense = weight.len() / self.inputs;
        let width = self.outputs + dense;
        let mut layer = PackedLinear::<E>::new(self.inputs, &[dense], true).expect("memory");
        let memory = WeightMemory::default();
        layer.copy_rows(&memory, 0, Rows::new(weight, self.inputs)).expect("memory");
        layer.copy_bias(0, &bias[..dense]);
        let x: Vec<E> = self.x.iter().map(|&x| E::from_f32(x)).collect();
        let residual = residual.chunks_exact(width).map(|row| &row[..dense]);
        let residual = residual.collect::<Vec<_>>().concat();
        let out = forward(&layer, form, team, &x, Some(&residual));
        out.into_iter().map(E::to_f32).collect()
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn outputs_are_those_of_the_definition(
        seed in 0_u64..1_000_000,
        format in prop::sample::select(Format::ALL.to_vec()),
        threads in 1_usize..=2,
        rows in 1_usize..8,
        units in 1_usize..4,
        outputs in 1_usize..150,
        dense in 1_usize..70,
        exponents in prop::collection::vec(-140_i32..120, 1..4),
    ) {
        let x: Vec<f32> = noise(seed + 3, rows * units * format.block());
        // Rows of all magnitudes; some blocks are zeros.
        let x = x.iter().enumerate().map(|(i, x)| match i / 32 % 5 {
            0 => 0.0,
            block => Bf16::from_f32(x * 2f32.powi(exponents[block % exponents.len()])).to_f32(),
        });
        let case = Case::new(format, seed, (units, outputs), x.collect());
        case.check_forms();
        case.check_layer::<Bf16>(threads, dense);
        case.check_layer::<f32>(threads, dense);
    }
}

#[test]
fn many_rows_are_cut_into_tasks_without_a_trace() {
    let x: Vec<Bf16> = noise(1, 211 * 64);
    let x = x.iter().map(|x| x.to_f32()).collect();
    Case::new(Format::Q4_1, 5, (2, 70), x).check_layer::<Bf16>(2, 3);
}

#[test]
fn tiles_of_rows_are_those_of_the_definition() {
    for format in Format::ALL {
        // More than the kernel sums at once, and a row that is left over.
        let mut x: Vec<f32> = noise(6, 103 * format.block());
        x[..format.block()].fill(1.0);
        Case::new(format, 7, (1, 70), x).check_forms();
    }
}

#[test]
fn what_is_no_number_spoils_its_row_alone() {
    for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for format in Format::ALL {
            let mut x = vec![1.0; 3 * format.block()];
            x[format.block() + 7] = number;
            let case = Case::new(format, 3, (1, 20), x);
            let is_nan =
                |row: usize| case.want[20 * row..20 * (row + 1)].iter().all(|y| y.is_nan());
            assert_eq!([0, 1, 2].map(is_nan), [false, true, false], "{format}");
            case.check_forms();
            case.check_layer::<Bf16>(1, 1);
        }
    }
}

#[test]
fn rows_are_read_back_as_they_were_written() {
    let (team, memory) = (Team::new(2).expect("threads"), WeightMemory::default());
    for format in Format::ALL {
        let (inputs, outputs) = (2 * format.block(), 81);
        let blocks = random_blocks(format, 9, 2 * outputs);
        let mut layers = [Activations::Exact, Activations::Int8].map(|activations| {
            let layer = PackedLinear::<Bf16>::new(inputs, &[outputs], false).expect("memory");
            layer.with_activations(activations)
        });
        let ids: Vec<usize> = (0..outputs).rev().collect();
        let [exact, int8] = layers.each_mut().map(|layer| {
            let rows = Rows::new(&blocks, format.row_bytes(inputs));
            layer.copy_blocks(&memory, Form::detect(), &team, 0, format, rows).expect("blocks");
            read(layer, &team, &ids)
        });
        assert!(exact == int8, "{format}");
        // Whole units of 16 outputs; the factors of the K formats take a byte each.
        let bytes = format.row_bytes(inputs) * outputs.next_multiple_of(16);
        let kept = layers[1].num_bytes();
        assert!((bytes..=bytes * 104 / 100).contains(&kept), "{format}: {kept} for {bytes}");
    }
}
