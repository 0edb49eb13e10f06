//! Time of the gated delta rule with the heads of Qwen3.5-0.8B, for all of its 18 layers, or of Mamba-2 with
//! those of granite-4.0-h-micro, for as many: `delta_speed [mamba] [tokens]...`, from a state that lies in a block.

use prefixcache_attention::{
    Attention, BlockTables, DeltaHeads, DeltaRule, Plan, StatePart, delta_rule,
};
use prefixcache_cpu::{Form, Rows, RowsMut, Team};

const LAYERS: usize = 18;
const BLOCK: usize = 64;

/// Time that the thread has computed, whatever else the machine did.
fn seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("a Linux system");
    let nanoseconds = stat.split_whitespace().next().expect("a number");
    nanoseconds.parse::<f64>().expect("a number") * 1e-9
}

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|one| one.parse().ok()).collect();
    let mut heads = DeltaHeads {
        key_heads: 16,
        value_heads: 16,
        key_dim: 128,
        value_dim: 128,
        taps: 4,
        tiled: false,
        alike: 1,
        corrects: true,
    };
    if std::env::args().any(|one| one == "mamba") {
        heads = DeltaHeads {
            key_heads: 8,
            value_heads: 64,
            value_dim: 64,
            alike: 8,
            corrects: false,
            ..heads
        };
    }
    let numbers = |count: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5).collect()
    };
    let (conv, small) = (numbers(4 * heads.channels()), numbers(128));
    let decay = [0.5; 64];
    let rule = DeltaRule {
        heads,
        conv: Rows::new(&conv, heads.channels()),
        conv_bias: None,
        decay: &decay[..heads.value_heads],
        time_bias: &small[..heads.value_heads],
        norm: &small,
        skip: &decay[..heads.value_heads],
        eps: 1e-6,
    };
    let (form, team) = (Form::detect(), Team::new(1).expect("a thread"));
    for tokens in if given.is_empty() { vec![1, 64, 512] } else { given } {
        let pages = tokens.div_ceil(BLOCK) + 1;
        let indices: Vec<i32> = (0..pages as i32).collect();
        let tables = BlockTables {
            qo_indptr: &[0, tokens as i32],
            kv_indptr: &[0, pages as i32],
            kv_indices: &indices,
            last_page_len: &[((tokens - 1) % BLOCK + 1) as i32],
            first_pages: None,
        };
        let attention = Attention::new(1, 1, 16, 1.0).expect("a shape that fits");
        let plan = Plan::new(tables, pages, BLOCK, &attention).expect("a sound step");
        let mut states: Vec<_> = (0..LAYERS).map(|_| numbers(pages * heads.state())).collect();
        let x = numbers(tokens * heads.inputs());
        let mut out = vec![0.0; tokens * heads.values()];
        let mut times = Vec::new();
        for _ in 0..5 {
            let begun = seconds();
            for state in &mut states {
                let part = StatePart { plan: &plan, pages: RowsMut::new(state, heads.state()) };
                let (x, out) =
                    (Rows::new(&x, heads.inputs()), RowsMut::new(&mut out, heads.values()));
                delta_rule(form, &team, &rule, &[part], &[], x, &out).expect("memory");
            }
            times.push((seconds() - begun) * 1e3);
        }
        times.sort_by(f64::total_cmp);
        println!("{tokens} tokens: {:.3} ms a token at best", times[0] / tokens as f64);
    }
}
