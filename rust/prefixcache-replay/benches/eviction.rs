//! Token hit rates of public traces, of each order of eviction and of the optimum, and the tokens that requests
//! compute at p50, p90 and p99: `cargo bench --package prefixcache-replay -- [trace].. [percent]..`.
//!
//! With `--as-json` each row is one line of JSON as well, on standard output.

use std::error::Error;
use std::path::PathBuf;

use prefixcache_core::EvictionPolicy;
use prefixcache_replay::optimum::optimum;
use prefixcache_replay::replay::{Outcome, replay};
use prefixcache_replay::trace::Trace;
use serde::Serialize;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/traces");
const TRACES: [&str; 3] = ["mooncake_conv", "taubench", "weka64_A"];

/// Sizes of the pool, in percent of the blocks that a trace's prompts have.
const PERCENTS: [usize; 6] = [1, 2, 5, 10, 20, 50];

/// Percentiles of the tokens that requests compute.
const PERCENTILES: [usize; 3] = [50, 90, 99];

/// One order of eviction over one trace, at all sizes.
#[derive(Serialize)]
struct Row<'a> {
    trace: &'a str,
    order: &'a str,
    blocks: Vec<usize>,
    hit_percent: Vec<f64>,
    /// For each of [`PERCENTILES`], by size.
    computed: [Vec<usize>; PERCENTILES.len()],
}

type Replayed = Result<Outcome, Box<dyn Error>>;

fn measure<'a>(
    trace: &'a Trace,
    order: &'a str,
    percents: &[usize],
    run: impl Fn(usize) -> Replayed,
) -> Result<Row<'a>, Box<dyn Error>> {
    let unique = trace.num_prompt_blocks();
    let blocks: Vec<usize> = percents
        .iter()
        .map(|percent| unique * percent / 100)
        .collect();
    let outcomes = blocks
        .iter()
        .map(|&size| run(size))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Row {
        trace: &trace.name,
        order,
        blocks,
        hit_percent: outcomes
            .iter()
            .map(|outcome| 100.0 * outcome.hit_rate())
            .collect(),
        computed: PERCENTILES.map(|percentile| {
            let computed = outcomes.iter().map(|one| one.computed_at(percentile));
            computed.collect()
        }),
    })
}

fn print_row(row: &Row) {
    let mut line = format!("{:14} {:12}", row.trace, row.order);
    line.extend(row.hit_percent.iter().map(|rate| format!("{rate:7.2}")));
    for computed in &row.computed {
        line.push_str("   |");
        line.extend(computed.iter().map(|tokens| format!("{tokens:8}")));
    }
    println!("{line}");
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
    let trace = Trace::read(&PathBuf::from(FOLDER).join(format!("{name}.ptt.gz")))?;
    let run = |blocks, policy| Ok(replay(&trace, blocks, policy)?);
    let rows = [
        measure(&trace, "lru", percents, |blocks| {
            run(blocks, EvictionPolicy::Lru)
        })?,
        measure(&trace, "reuse-queue", percents, |blocks| {
            run(blocks, EvictionPolicy::ReuseQueue)
        })?,
        measure(&trace, "optimum", percents, |blocks| {
            Ok(optimum(&trace, blocks))
        })?,
    ];
    for row in &rows {
        print_row(row);
        if as_json {
            println!("{}", serde_json::to_string(row)?);
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let as_json = arguments.iter().any(|argument| argument == "--as-json");
    let named: Vec<&str> = TRACES
        .into_iter()
        .filter(|name| arguments.iter().any(|argument| argument == name))
        .collect();
    let mut percents: Vec<usize> = arguments
        .iter()
        .filter_map(|argument| argument.parse().ok())
        .collect();
    if percents.is_empty() {
        percents = PERCENTS.to_vec();
    }
    print_header(&percents);
    for name in if named.is_empty() {
        TRACES.to_vec()
    } else {
        named
    } {
        run_trace(name, &percents, as_json)?;
    }
    Ok(())
}
