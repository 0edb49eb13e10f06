//! The linears' own rates, with weights in the cache and in memory.

use prefixcache_cpu::{Bf16, ByteForm, Element, Form, Rows, RowsMut, Team, WeightMemory};
use prefixcache_ops::int8::QuantizedRows;
use prefixcache_ops::quant::packed::{Line, PackedBlocks};
use prefixcache_ops::{Activations, Format, PackedLinear};

use crate::best;

pub const INPUTS: usize = 768;

/// Outputs of a layer that the second cache holds, even in bfloat16.
const FEW_OUTPUTS: usize = 256;

const OUTPUTS: usize = 3072;

/// Bytes of weights that no cache holds.
const COLD: usize = 96 << 20;

/// What a panel has of outputs.
pub const PANEL: usize = 64;

const TURNS: usize = 15;

struct Bench {
    form: Form,
    team: Team,
    memory: WeightMemory,
}

pub fn measure() {
    let bench = Bench {
        form: Form::detect(),
        team: Team::new(1).expect("a thread"),
        memory: WeightMemory::default(),
    };
    println!("form {}", bench.form.name());
    for format in Format::ALL {
        bench.few_rows(format, OUTPUTS, "memory");
        bench.few_rows(format, FEW_OUTPUTS, "cache");
        bench.many_rows(format);
        bench.dequantizing(format);
    }
    for rows in [1, 8, 1024] {
        bench.quantizing(rows);
    }
}

impl Bench {
    /// A layer of each way.
    fn layers(&self, format: Format, outputs: usize) -> [(&'static str, PackedLinear<Bf16>); 3] {
        let weight = vec![Bf16::from_f32(0.5); outputs * INPUTS];
        let mut dense = PackedLinear::new(INPUTS, &[outputs], false).expect("memory");
        let rows = Rows::new(&weight, INPUTS);
        dense.copy_rows(&self.memory, 0, rows).expect("memory");
        let blocks = blocks(format, outputs);
        let of_blocks = |activations| {
            let layer = PackedLinear::new(INPUTS, &[outputs], false).expect("memory");
            let mut layer = layer.with_activations(activations);
            let blocks = Rows::new(&blocks, format.row_bytes(INPUTS));
            let copied = layer.copy_blocks(&self.memory, self.form, &self.team, 0, format, blocks);
            copied.expect("finite blocks");
            layer
        };
        [
            ("bfloat16", dense),
            ("exact", of_blocks(Activations::Exact)),
            ("int8", of_blocks(Activations::Int8)),
        ]
    }

    fn few_rows(&self, format: Format, outputs: usize, place: &str) {
        let layers = self
            .layers(format, outputs)
            .map(|(way, _)| (way, Vec::new()));
        let mut layers: [(&str, Vec<_>); 3] = layers;
        let copies = match place {
            "memory" => COLD.div_ceil(format.row_bytes(INPUTS) * outputs),
            _ => 1,
        };
        for _ in 0..copies {
            for ((_, to), (_, layer)) in layers.iter_mut().zip(self.layers(format, outputs)) {
                // As many bytes of each way.
                if to.iter().map(PackedLinear::num_bytes).sum::<usize>() < COLD {
                    to.push(layer);
                }
            }
        }
        for rows in [1, 2, 4, 8] {
            self.rates(format, rows, outputs, place, &layers);
        }
    }

    fn many_rows(&self, format: Format) {
        let layers = self.layers(format, OUTPUTS);
        let layers = layers.map(|(way, layer)| (way, vec![layer]));
        self.rates(format, 1024, OUTPUTS, "cache", &layers);
    }

    fn rates(
        &self,
        format: Format,
        rows: usize,
        outputs: usize,
        place: &str,
        layers: &[(&str, Vec<PackedLinear<Bf16>>)],
    ) {
        let x = vec![Bf16::from_f32(0.25); rows * INPUTS];
        // Enough for a time of a millisecond.
        let passes =
            (10_000_000_usize.div_ceil(rows * outputs * INPUTS * layers[0].1.len())).max(1);
        let mut ways: Vec<Box<dyn FnMut()>> = Vec::new();
        for (_, layers) in layers {
            let mut out = vec![Bf16::from_f32(0.0); rows * outputs];
            let x = &x;
            ways.push(Box::new(move || {
                for layer in layers.iter().cycle().take(passes * layers.len()) {
                    let out = RowsMut::new(&mut out, outputs);
                    let x = Rows::new(x, INPUTS);
                    let done = layer.forward::<Bf16>(self.form, &self.team, x, None, &out);
                    done.expect("memory");
                }
            }));
        }
        let seconds = best(TURNS, &mut ways);
        for ((way, layers), seconds) in layers.iter().zip(seconds) {
            let products = (passes * layers.len() * rows * outputs * INPUTS) as f64;
            let name = format.name();
            println!(
                "kernel {way} {name} {rows} {place} {:.2}",
                products / seconds / 1e9
            );
        }
    }

    /// Dequantizing to panels, which exact products with five rows and more begin with.
    fn dequantizing(&self, format: Format) {
        let made = PackedBlocks::new(&self.memory, self.form, format, INPUTS, FEW_OUTPUTS);
        let mut packed = made.expect("memory");
        let blocks = blocks(format, FEW_OUTPUTS);
        packed.pack(&self.team, Rows::new(&blocks, format.row_bytes(INPUTS)));
        let mut lines = [Line::UNWRITTEN; INPUTS / Bf16::PER_WORD];
        let passes = 50;
        let seconds = best(
            TURNS,
            &mut [Box::new(|| {
                for panel in (0..FEW_OUTPUTS / PANEL)
                    .cycle()
                    .take(passes * FEW_OUTPUTS / PANEL)
                {
                    packed.dequantize::<Bf16>(self.form, panel, 0, &mut lines);
                }
            })],
        );
        let rate = (passes * FEW_OUTPUTS * INPUTS) as f64 / seconds[0] / 1e9;
        println!("part dequantize {} 0 {rate:.2}", format.name());
    }

    /// Quantizing activations, in numbers of `x`.
    fn quantizing(&self, rows: usize) {
        let x = vec![Bf16::from_f32(0.25); rows * INPUTS];
        let passes = 2_000_usize.div_ceil(rows);
        let form = ByteForm::of(self.form);
        let seconds = best(
            TURNS,
            &mut [Box::new(|| {
                for _ in 0..passes {
                    let made = QuantizedRows::new(form, &self.team, Rows::new(&x, INPUTS));
                    std::hint::black_box(made.expect("memory"));
                }
            })],
        );
        let rate = (passes * rows * INPUTS) as f64 / seconds[0] / 1e9;
        println!("part quantize all {rows} {rate:.2}");
    }
}

/// Blocks of any codes; the second bytes of their scales are those of usual numbers.
pub fn blocks(format: Format, outputs: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let bytes = (0..outputs * format.row_bytes(INPUTS)).map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    });
    let mut bytes: Vec<u8> = bytes.collect();
    let scales: &[usize] = match format {
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[1, 3],
        Format::Q6K => &[209],
        Format::Q2K => &[81, 83],
        Format::Q3K => &[109],
        Format::MXFP4 => &[0],
        _ => &[1],
    };
    for block in bytes.chunks_exact_mut(format.bytes()) {
        for &at in scales {
            block[at] = 0x20 | block[at] & 3;
        }
    }
    bytes
}
