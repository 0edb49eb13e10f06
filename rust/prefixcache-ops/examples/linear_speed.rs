//! Time of `PackedLinear::forward` on the layers of a small model: `linear_speed [threads]`.

use std::time::Instant;

use prefixcache_cpu::{Bf16, Element, Form, Rows, RowsMut, Team, WeightMemory};
use prefixcache_ops::PackedLinear;

fn main() {
    let threads = std::env::args()
        .nth(1)
        .map_or(2, |n| n.parse().expect("a number of threads"));
    let team = Team::new(threads).expect("threads");
    for form in Form::available() {
        for (outputs, inputs) in [
            (960, 576),
            (576, 576),
            (3072, 576),
            (576, 1536),
            (49152, 576),
        ] {
            for rows in [1, 8, 64, 1024] {
                if form.name() == "portable" || (outputs > 40_000 && rows > 64) {
                    continue;
                }
                speed::<Bf16>(form, &team, outputs, inputs, rows);
                speed::<f32>(form, &team, outputs, inputs, rows);
            }
        }
    }
}

fn speed<E: Element>(form: Form, team: &Team, outputs: usize, inputs: usize, rows: usize) {
    let copies = (100_000_000 / (outputs * inputs * 2)).clamp(2, 30);
    let weight: Vec<E> = (0..outputs * inputs)
        .map(|i| E::from_f32((i % 97) as f32))
        .collect();
    let memory = WeightMemory::default();
    let layer = || {
        let mut layer = PackedLinear::new(inputs, &[outputs], false).expect("memory");
        let rows = Rows::new(&weight, inputs);
        layer.copy_rows(&memory, 0, rows).expect("memory");
        layer
    };
    let layers: Vec<_> = (0..copies).map(|_| layer()).collect();
    let x = vec![E::from_f32(1.0); rows * inputs];
    let mut out = vec![E::from_f32(0.0); rows * outputs];
    let mut best = f64::MAX;
    for _ in 0..if rows > 64 { 2 } else { 7 } {
        let start = Instant::now();
        for layer in &layers {
            let out = RowsMut::new(&mut out, outputs);
            layer
                .forward::<E>(form, team, Rows::new(&x, inputs), None, &out)
                .expect("memory");
        }
        best = best.min(start.elapsed().as_secs_f64() / copies as f64);
    }
    let bytes = (outputs * inputs * size_of::<E>()) as f64;
    let flops = (2 * rows * outputs * inputs) as f64;
    println!(
        "{form:?} {:>4} {outputs:>5}x{inputs:<4} rows {rows:>4}: {:>8.1} us {:>6.1} GB/s {:>6.1} Gflop/s",
        std::any::type_name::<E>()
            .rsplit("::")
            .next()
            .unwrap_or_default(),
        best * 1e6,
        bytes / best / 1e9,
        flops / best / 1e9
    );
}
