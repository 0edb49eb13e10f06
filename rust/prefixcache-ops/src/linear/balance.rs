//! How evenly the tasks of real layers go to many threads, without running any.

use super::Split;
use crate::panel::PANEL;

/// A product, or the attention of a step, that threads share.
struct Shared {
    name: &'static str,
    /// Of each task.
    costs: Vec<usize>,
}

/// The tasks of `rows` rows of a layer.
fn linear(name: &'static str, rows: usize, outputs: usize, threads: usize) -> Shared {
    let split = Split::new(rows, outputs.div_ceil(PANEL), threads);
    let costs = (0..split.tasks()).map(|task| split.task(task).1.len());
    Shared { name, costs: costs.collect() }
}

/// Tasks of one row, all alike.
fn alike(name: &'static str, tasks: usize) -> Shared {
    Shared { name, costs: vec![1; tasks] }
}

fn layers(threads: usize) -> Vec<Shared> {
    let one = |name, outputs| linear(name, 1, outputs, threads);
    let many = |name, outputs| linear(name, 160, outputs, threads);
    vec![
        one("135M qkv", 960),
        one("135M out, down", 576),
        one("135M gate and up", 3_072),
        one("1.1B qkv", 2_560),
        one("1.1B out, down", 2_048),
        one("1.1B gate and up", 11_264),
        one("30B-A3B qkv", 5_120),
        alike("30B-A3B 8 experts, gate and up", 8 * 1_536 / PANEL),
        alike("30B-A3B 8 experts, down", 8 * 2_048 / PANEL),
        alike("135M attention, 1 sequence", 3),
        alike("135M attention, 8 sequences", 8 * 3),
        alike("1.1B attention, 8 sequences", 8 * 4),
        many("135M qkv, 160 rows", 960),
        many("135M out, 160 rows", 576),
        many("1.1B out, 160 rows", 2_048),
    ]
}

/// The cost of the busiest thread over the mean, where each takes the next task once it is free.
fn imbalance(costs: &[usize], threads: usize) -> f64 {
    let mut busy = vec![0; threads];
    for cost in costs {
        let free = busy.iter_mut().min().expect("a thread");
        *free += cost;
    }
    let busiest = busy.iter().max().expect("a thread");
    (busiest * threads) as f64 / costs.iter().sum::<usize>() as f64
}

#[test]
fn many_threads_share_the_layers_of_real_models() {
    for threads in [2, 4, 8, 16, 32, 64] {
        for Shared { name, costs } in layers(threads) {
            let found = imbalance(&costs, threads);
            println!("{name} | {threads} | {} | {found:.2}", costs.len());
            // With fewer tasks than that a thread with one more is far from the mean.
            let has_enough = costs.len() >= 2 * threads || name.ends_with("rows");
            let most = if has_enough { 1.35 } else { f64::MAX };
            assert!(found <= most, "{name}, {threads} threads: {found}");
        }
    }
}
