//! Many replicas behind a router, over public traces: `cargo bench --package prefixcache-replay --bench replicas --
//! [trace].. [replicas]..`. With `--as-json` each row is one line of JSON as well, on standard output.
//!
//! All replicas have half of the blocks that the trace's prompts have. There is a copy of the trace, whose prompts are
//! all different from those of the others, for each 64 replicas (8 of taubench, which is small). A replica takes so long for a token that
//! a fleet which hits what one server with all the memory hits is busy for a share of the time, `busy=0.1` by default;
//! `balance=0.2` and the like change the weights of the choice, and a policy's first word runs it alone.

mod fleet;

use std::error::Error;
use std::path::PathBuf;

use prefixcache_core::EvictionPolicy;
use prefixcache_replay::cache::{Cache, CacheConfig, Outcome};
use prefixcache_replay::history::History;
use prefixcache_replay::server::PrefillTime;
use prefixcache_replay::trace::{Reader, Request};
use prefixcache_serving::routing::choice::Weights;
use serde::Serialize;

use fleet::{Fleet, FleetConfig, FleetOutcome, Policy, spread};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/traces");
const TRACES: [Trace; 3] = [
    Trace { name: "mooncake_conv", replicas_a_copy: 64, replicas: &[64, 1024] },
    Trace { name: "weka64_A", replicas_a_copy: 64, replicas: &[64] },
    Trace { name: "taubench", replicas_a_copy: 8, replicas: &[64] },
];

/// Requests of a file.
#[derive(Clone, Copy)]
struct Trace {
    name: &'static str,
    /// Replicas that one copy is for: few enough that the share of half of all blocks that each holds is some prompts.
    replicas_a_copy: usize,
    /// How many there are where nothing else is asked. Copies of a trace of many blocks take gigabytes.
    replicas: &'static [usize],
}

/// The cost that Dynamo's router has by default: tokens to compute. Its blocks of answers are no part of the model.
const DYNAMO: Weights = Weights {
    overlap_weight: 1.0,
    request_tokens: 0.0,
    window_tokens: 1e6,
    balance: 0.0,
    affinity: 0.0,
};

/// Between the beginnings of two copies.
const COPY_DELAY_MS: u64 = 3_700;

/// What the requests of one fleet found.
#[derive(Serialize)]
struct Row<'a> {
    trace: &'a str,
    policy: &'a str,
    replicas: usize,
    /// How busy a fleet is that hits what one server with all the memory hits.
    busy: f64,
    requests: usize,
    blocks_a_replica: usize,
    hit_percent: f64,
    computed_tokens: u64,
    /// The most of a replica over the mean of all.
    spread_of_tokens: f64,
    spread_of_requests: f64,
    ttft_ms: [f64; 2],
    /// Microseconds of the router a request, at the median and at p99.
    choice_us: [f64; 2],
    index_blocks: usize,
}

/// A trace in memory, some copies of it in parallel.
struct Load {
    name: String,
    block_size: usize,
    requests: Vec<Request>,
    blocks_a_replica: usize,
}

impl Load {
    fn read(trace: Trace, replicas: usize) -> Result<Self, Box<dyn Error>> {
        let path = PathBuf::from(FOLDER).join(format!("{}.ptt.gz", trace.name));
        let mut reader = Reader::open(&path)?;
        let block_size = reader.block_size();
        let requests = reader.by_ref().collect::<Result<Vec<_>, _>>()?;
        let mut history = History::new(block_size, false);
        requests.iter().for_each(|request| history.push(request));
        Ok(Self {
            name: reader.name().into(),
            block_size,
            requests: copies(&requests, replicas.div_ceil(trace.replicas_a_copy)),
            blocks_a_replica: history.num_unique_blocks() / 2 / trace.replicas_a_copy,
        })
    }

    fn duration_ms(&self) -> f64 {
        let times = self.requests.first().zip(self.requests.last());
        times.map_or(0.0, |(first, last)| (last.time_ms - first.time_ms) as f64)
    }
}

fn copies(requests: &[Request], count: usize) -> Vec<Request> {
    let copy = |request: &Request, number: u64| Request {
        time_ms: request.time_ms + number * COPY_DELAY_MS,
        // Keys are spread over all of their bits, so that no two copies have one in common.
        blocks: request.blocks.iter().map(|key| key.wrapping_add(number << 40)).collect(),
        ..request.clone()
    };
    let numbers = 0..count as u64;
    let mut all: Vec<Request> = numbers
        .flat_map(|number| requests.iter().map(move |request| copy(request, number)))
        .collect();
    all.sort_by_key(|request| request.time_ms);
    all
}

fn cache(num_blocks: usize) -> CacheConfig {
    CacheConfig::new(num_blocks, EvictionPolicy::Lru)
}

/// One server with the memory of all, which answers each request as it arrives.
fn one_server(load: &Load, replicas: usize) -> Result<FleetOutcome, Box<dyn Error>> {
    let config = cache(load.blocks_a_replica * replicas);
    let mut server = Cache::new(&config, load.block_size)?;
    for request in &load.requests {
        let waiting = server.prepare(request)?;
        server.run(waiting, std::time::Duration::from_millis(request.time_ms))?;
    }
    let Outcome { requests, input_tokens, hit_tokens, .. } = server.outcome();
    Ok(FleetOutcome {
        input_tokens,
        hit_tokens,
        computed_tokens: vec![input_tokens - hit_tokens],
        requests: vec![requests],
        ..FleetOutcome::default()
    })
}

fn run_fleet(
    load: &Load,
    replicas: usize,
    policy: Policy,
    ms_per_token: f64,
) -> Result<FleetOutcome, Box<dyn Error>> {
    let config = FleetConfig {
        num_replicas: replicas,
        cache: cache(load.blocks_a_replica),
        prefill: PrefillTime { ms_per_request: 0.0, ms_per_token },
        policy,
        seed: 1,
    };
    let mut fleet = Fleet::new(config, load.block_size)?;
    for request in &load.requests {
        fleet.push(request)?;
    }
    fleet.finish()
}

fn row<'a>(
    load: &'a Load,
    policy: &'a str,
    replicas: usize,
    busy: f64,
    outcome: &FleetOutcome,
) -> Row<'a> {
    let thousandths = |of: &prefixcache_replay::quantiles::Quantiles| {
        [50, 99].map(|percentile| of.at(percentile) as f64 / 1e3)
    };
    Row {
        trace: &load.name,
        policy,
        replicas,
        busy,
        requests: load.requests.len(),
        blocks_a_replica: load.blocks_a_replica,
        hit_percent: 100.0 * outcome.hit_tokens as f64 / outcome.input_tokens.max(1) as f64,
        computed_tokens: outcome.computed_tokens.iter().sum(),
        spread_of_tokens: spread(&outcome.computed_tokens),
        spread_of_requests: spread(&outcome.requests),
        ttft_ms: thousandths(&outcome.ttft_us),
        choice_us: thousandths(&outcome.choice_ns),
        index_blocks: outcome.index_blocks,
    }
}

fn print_row(row: &Row, as_json: bool) -> Result<(), Box<dyn Error>> {
    let [p50, p99] = row.ttft_ms.map(|ms| ms / 1e3);
    let [choice, choice99] = row.choice_us;
    println!(
        "{:14} {:>5} {:14} {:6.2} % | {:5.2} {:5.2} | {p50:9.2} {p99:9.2} s | {choice:6.1} {choice99:6.1} us | \
         {:9} blocks",
        row.trace,
        row.replicas,
        row.policy,
        row.hit_percent,
        row.spread_of_tokens,
        row.spread_of_requests,
        row.index_blocks,
    );
    if as_json {
        println!("{}", serde_json::to_string(row)?);
    }
    Ok(())
}

/// The weights and how busy the fleet is, changed by words such as `balance=0.2`.
fn settings(words: &[String]) -> Result<(Weights, f64), Box<dyn Error>> {
    let (mut weights, mut busy) = (Weights::default(), 0.1);
    for (name, value) in words.iter().filter_map(|word| word.split_once('=')) {
        let field = match name {
            "overlap_weight" => &mut weights.overlap_weight,
            "request_tokens" => &mut weights.request_tokens,
            "window_tokens" => &mut weights.window_tokens,
            "balance" => &mut weights.balance,
            "busy" => &mut busy,
            _ => return Err(format!("no such setting: {name}").into()),
        };
        *field = value.parse()?;
    }
    Ok((weights, busy))
}

fn run(trace: Trace, replicas: usize, words: &[String]) -> Result<(), Box<dyn Error>> {
    let as_json = words.iter().any(|word| word == "--as-json");
    let (weights, busy) = settings(words)?;
    let load = Load::read(trace, replicas)?;
    let bound = one_server(&load, replicas)?;
    print_row(&row(&load, "one server", replicas, busy, &bound), as_json)?;
    let computed = bound.computed_tokens[0] as f64;
    let ms_per_token = busy * load.duration_ms() * replicas as f64 / computed;
    let policies = [
        ("round robin", Policy::RoundRobin),
        ("power of two", Policy::PowerOfTwo),
        ("prefix", Policy::Prefix(weights)),
        ("cost of Dynamo", Policy::Prefix(DYNAMO)),
    ];
    let is_named = |policy: &str| words.iter().any(|word| policy.starts_with(word.as_str()));
    let any_named = policies.iter().any(|(policy, _)| is_named(policy));
    for (policy, of) in policies {
        if !any_named || is_named(policy) {
            let outcome = run_fleet(&load, replicas, of, ms_per_token)?;
            print_row(&row(&load, policy, replicas, busy, &outcome), as_json)?;
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let is_named = |trace: &Trace| words.iter().any(|word| word == trace.name);
    let any_named = TRACES.iter().any(is_named);
    let counts: Vec<usize> = words.iter().filter_map(|word| word.parse().ok()).collect();
    println!(
        "hit rate | most tokens and requests of a replica over the mean | TTFT p50, p99 | choice p50, p99"
    );
    for trace in TRACES {
        if any_named && !is_named(&trace) {
            continue;
        }
        let counts = if counts.is_empty() { trace.replicas } else { &counts };
        for &replicas in counts {
            run(trace, replicas, &words)?;
        }
    }
    Ok(())
}
