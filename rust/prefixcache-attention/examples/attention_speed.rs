//! Time of `attend` on one layer of a small model: `attention_speed [threads]`.

use std::time::Instant;

use prefixcache_attention::{Attention, BlockTables, KvElement, Plan, attend};
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team};

const BLOCK: usize = 16;

fn main() {
    let threads = std::env::args()
        .nth(1)
        .map_or(1, |n| n.parse().expect("a number of threads"));
    let team = Team::new(threads).expect("threads");
    for form in Form::available() {
        if form.name() == "portable" {
            continue;
        }
        for (name, start, count) in [
            ("prefill", 0, 1024),
            ("chunk", 1024, 32),
            ("decode", 1023, 1),
        ] {
            speed::<Bf16>(form, &team, name, start, count);
            speed::<f32>(form, &team, name, start, count);
        }
    }
}

fn speed<E: KvElement>(form: Form, team: &Team, name: &str, start: usize, count: usize) {
    let attention = Attention::new(9, 3, 64, 0.125).expect("the heads of SmolLM2-135M");
    let pages = (start + count).div_ceil(BLOCK);
    let indices: Vec<i32> = (1..=pages as i32).collect();
    let tables = BlockTables {
        qo_indptr: &[0, count as i32],
        kv_indptr: &[0, pages as i32],
        kv_indices: &indices,
        last_page_len: &[((start + count - 1) % BLOCK + 1) as i32],
        first_pages: None,
    };
    let plan = Plan::new(tables, pages + 1, BLOCK, &attention).expect("sound tables");
    let number = |i: usize| E::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0);
    let cache: Vec<E> = (0..(pages + 1) * 2 * BLOCK * 192).map(number).collect();
    let queries: Vec<E> = (0..count * 576).map(number).collect();
    let mut out = queries.clone();
    let best = (0..if count > 100 { 12 } else { 200 })
        .map(|_| {
            let begun = Instant::now();
            let (cache, queries) = (Rows::new(&cache, 2 * BLOCK * 192), Rows::new(&queries, 576));
            attend(
                form,
                team,
                &plan,
                cache,
                queries,
                None,
                &RowsMut::new(&mut out, 576),
            )
            .expect("memory");
            begun.elapsed().as_secs_f64()
        })
        .fold(f64::MAX, f64::min);
    let keys: usize = (start + 1..=start + count).sum();
    println!(
        "{form:?} {name} {} bytes: {:.1} us, {:.1} Gflop/s",
        size_of::<E>(),
        best * 1e6,
        (keys * 9 * 64 * 4) as f64 / best / 1e9
    );
}
