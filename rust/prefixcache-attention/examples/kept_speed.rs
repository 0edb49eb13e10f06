//! Time of attention over keys and values kept as numbers and as codes: `kept_speed [threads]`.
//!
//! The default model's heads. Each line has the time of each way, the best of several in turns, of steps that
//! write their tokens and read pages at random.

use prefixcache_attention::{Attention, BlockTables, KvElement, KvPagesMut, Plan, attend};
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team};
use std::time::Instant;

const BLOCK: usize = 16;
const QUERY_WIDTH: usize = 9 * 64;
const KEY_WIDTH: usize = 3 * 64;
const TURNS: usize = 5;

/// Sequences, tokens of each, those of them that a step computes, and layers.
const CASES: [(usize, usize, usize, usize); 4] =
    [(1, 1024, 1, 30), (1, 4096, 1, 30), (8, 4096, 1, 10), (1, 4096, 512, 2)];

fn main() {
    let threads = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(1);
    let team = Team::new(threads).expect("threads");
    for (sequences, context, new, layers) in CASES {
        let plan = plan(sequences, context, new);
        for form in Form::available().into_iter().filter(|form| form.name() != "portable") {
            let run = Run { form, team: &team, plan: &plan, layers };
            let mut best = [f64::MAX; 4];
            for _ in 0..TURNS {
                let times = [
                    run.time::<f32>(false),
                    run.time::<Bf16>(false),
                    run.time::<f32>(true),
                    run.time::<Bf16>(true),
                ];
                best = std::array::from_fn(|way| times[way].min(best[way]));
            }
            let [f32s, bf16s, of_f32, of_bf16] = best.map(|seconds| seconds * 1e3);
            println!(
                "{sequences} x {context}, {new} new, {layers} layers, {form:?}: float32 {f32s:.2} ms, bfloat16 \
                 {bf16s:.2}, codes with float32 {of_f32:.2}, with bfloat16 {of_bf16:.2}"
            );
        }
    }
}

/// A plan of sequences whose pages are in no order.
fn plan(sequences: usize, context: usize, new: usize) -> Plan {
    let attention = Attention::new(9, 3, 64, 0.125).expect("heads");
    let pages = context.div_ceil(BLOCK);
    let count = sequences * pages;
    let step = (0..).map(|i| count / 2 + 1 + i).find(|&step| gcd(step, count) == 1);
    let step = step.expect("a step without a common factor");
    let indices: Vec<i32> = (0..count).map(|i| (1 + i * step % count) as i32).collect();
    let offsets =
        |each: usize| -> Vec<i32> { (0..=sequences).map(|s| (s * each) as i32).collect() };
    let tables = BlockTables {
        qo_indptr: &offsets(new),
        kv_indptr: &offsets(pages),
        kv_indices: &indices,
        last_page_len: &vec![((context - 1) % BLOCK + 1) as i32; sequences],
        first_pages: None,
    };
    Plan::new(tables, count + 1, BLOCK, &attention).expect("a sound step")
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

struct Run<'a> {
    form: Form,
    team: &'a Team,
    plan: &'a Plan,
    layers: usize,
}

impl Run<'_> {
    /// Seconds of a step.
    fn time<E: KvElement>(&self, has_codes: bool) -> f64 {
        let (rows, pages) = (self.plan.num_queries(), self.plan.num_pages());
        let number = |i: usize| E::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0);
        let queries: Vec<E> = (0..rows * QUERY_WIDTH).map(number).collect();
        let keys: Vec<E> = (0..rows * KEY_WIDTH).map(number).collect();
        let mut out = queries.clone();
        let width = match has_codes {
            true => self.plan.attention().code_bytes(BLOCK),
            false => 2 * BLOCK * KEY_WIDTH,
        };
        // Codes and scales of zero: their values do not change how long it takes.
        let mut codes = vec![vec![0_u8; pages * width * usize::from(has_codes)]; self.layers];
        let mut numbers =
            vec![vec![number(3); pages * width * usize::from(!has_codes)]; self.layers];
        let slots: Vec<i64> = (0..rows).map(|row| (BLOCK + row) as i64).collect();
        let (keys, queries) = (Rows::new(&keys, KEY_WIDTH), Rows::new(&queries, QUERY_WIDTH));
        let begun = Instant::now();
        for (codes, numbers) in codes.iter_mut().zip(&mut numbers) {
            let mut kept = match has_codes {
                true => KvPagesMut::Codes(RowsMut::new(codes, width)),
                false => KvPagesMut::Numbers(RowsMut::new(numbers, width)),
            };
            kept.append(self.form, self.team, self.plan, &slots, keys, keys);
            let out = RowsMut::new(&mut out, QUERY_WIDTH);
            attend(self.form, self.team, self.plan, kept.read(), queries, None, &out)
                .expect("memory");
        }
        begun.elapsed().as_secs_f64()
    }
}
