//! Token hit rates of public traces, of each order of eviction and of the optimum, and the tokens that requests
//! compute at p50, p90 and p99, up to a thousandth: `cargo bench --package prefixcache-replay -- [trace].. [percent]..`,
//! a trace by its name or by the path of its file.
//!
//! With `--as-json` each row is one line of JSON as well, on standard output.

use std::error::Error;
use std::path::PathBuf;

use prefixcache_core::EvictionPolicy;
use prefixcache_replay::cache::CacheConfig;
use prefixcache_replay::history::History;
use prefixcache_replay::replay::{Replay, Simulation};
use prefixcache_replay::trace::Reader;
use serde::Serialize;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/traces");
const TRACES: [&str; 3] = ["mooncake_conv", "taubench", "weka64_A"];

/// Sizes of the pool, in percent of the blocks that a trace's prompts have.
const PERCENTS: [usize; 6] = [1, 2, 5, 10, 20, 50];

/// Percentiles of the tokens that requests compute.
const PERCENTILES: [u64; 3] = [50, 90, 99];

/// One order of eviction over one trace, at all sizes.
#[derive(Serialize)]
struct Row<'a> {
    trace: &'a str,
    order: &'a str,
    blocks: Vec<usize>,
    hit_percent: Vec<f64>,
    /// For each of [`PERCENTILES`], by size; of the optimum nothing.
    computed: [Vec<u64>; PERCENTILES.len()],
}

/// The orders of eviction.
const ORDERS: [(&str, EvictionPolicy); 2] =
    [("lru", EvictionPolicy::Lru), ("reuse-queue", EvictionPolicy::ReuseQueue)];

fn simulation(
    num_blocks: usize,
    eviction_policy: EvictionPolicy,
    block_size: usize,
) -> Result<Simulation, Box<dyn Error>> {
    let config = CacheConfig::new(num_blocks, eviction_policy);
    Ok(Simulation::new(&config, None, block_size)?)
}

fn run(mut replay: Replay) -> Result<Replay, Box<dyn Error>> {
    while replay.advance()? {}
    Ok(replay)
}

fn print_row(row: &Row, as_json: bool) -> Result<(), Box<dyn Error>> {
    let mut line = format!("{:14} {:12}", row.trace, row.order);
    line.extend(row.hit_percent.iter().map(|rate| format!("{rate:7.2}")));
    for computed in &row.computed {
        line.push_str("   |");
        line.extend(computed.iter().map(|tokens| format!("{tokens:8}")));
    }
    println!("{line}");
    if as_json {
        println!("{}", serde_json::to_string(row)?);
    }
    Ok(())
}

fn print_header(percents: &[usize]) {
    let columns = |width| -> String {
        let column = |percent| format!("{:>width$}", format!("{percent}%"));
        percents.iter().map(column).collect()
    };
    println!("token hit rate in percent | tokens computed at p50 | p90 | p99, by size of the pool");
    let computed = format!("   |{}", columns(8)).repeat(PERCENTILES.len());
    println!("{:27}{}{computed}", "", columns(7));
}

fn run_trace(name: &str, percents: &[usize], as_json: bool) -> Result<(), Box<dyn Error>> {
    let path = match name.ends_with(".ptt.gz") {
        true => PathBuf::from(name),
        false => PathBuf::from(FOLDER).join(format!("{name}.ptt.gz")),
    };
    let reader = Reader::open(&path)?;
    let block_size = reader.block_size();
    let noted = run(Replay::new(reader, Vec::new(), Some(History::new(block_size, false)), 1))?;
    let history = noted.history().ok_or("a history was given")?;
    let unique = history.num_unique_blocks();
    let blocks: Vec<usize> = percents.iter().map(|percent| unique * percent / 100).collect();
    for (order, policy) in ORDERS {
        let simulations = blocks
            .iter()
            .map(|&size| simulation(size, policy, block_size))
            .collect::<Result<_, _>>()?;
        let threads = std::thread::available_parallelism()?.get();
        let replay = run(Replay::new(Reader::open(&path)?, simulations, None, threads))?;
        let outcomes: Vec<_> = replay.simulations().iter().map(Simulation::outcome).collect();
        let row = Row {
            trace: replay.reader().name(),
            order,
            blocks: blocks.clone(),
            hit_percent: outcomes.iter().map(|outcome| 100.0 * outcome.hit_rate()).collect(),
            computed: PERCENTILES.map(|percentile| {
                let computed = outcomes.iter().map(|one| one.computed.at(percentile));
                computed.collect()
            }),
        };
        print_row(&row, as_json)?;
    }
    let share = |tokens| 100.0 * tokens as f64 / history.input_tokens() as f64;
    let optimum = history.optimum(&blocks);
    let row = Row {
        trace: noted.reader().name(),
        order: "optimum",
        hit_percent: optimum.iter().map(|hits| share(hits.tokens)).collect(),
        blocks,
        computed: PERCENTILES.map(|_| Vec::new()),
    };
    print_row(&row, as_json)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let as_json = arguments.iter().any(|argument| argument == "--as-json");
    let is_trace = |name: &&str| TRACES.contains(name) || name.ends_with(".ptt.gz");
    let named: Vec<&str> = arguments.iter().map(String::as_str).filter(is_trace).collect();
    let mut percents: Vec<usize> =
        arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    if percents.is_empty() {
        percents = PERCENTS.to_vec();
    }
    print_header(&percents);
    for name in if named.is_empty() { TRACES.to_vec() } else { named } {
        run_trace(name, &percents, as_json)?;
    }
    Ok(())
}
