//! Many servers, each with a cache and a queue of its own, behind a router: a model, not a measurement.
//!
//! A server computes one prompt after the other, in the order of arrival. The router learns what a server has cached
//! from what the cache reports: evicted blocks as the prompt that takes their place begins, stored ones as it ends.

use std::collections::VecDeque;
use std::error::Error;
use std::time::{Duration, Instant};

use prefixcache_core::WithReaders;
use prefixcache_core::evictions::{EvictedBlock, Eviction};
use prefixcache_replay::cache::{Cache, CacheConfig, Waiting};
use prefixcache_replay::quantiles::Quantiles;
use prefixcache_replay::server::PrefillTime;
use prefixcache_replay::trace::Request;
use prefixcache_serving::mix::mix;
use prefixcache_serving::routing::choice::{Chooser, Prompt, Weights};
use prefixcache_serving::routing::index::ReplicaIndex;
use prefixcache_serving::routing::replica::ReplicaId;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Which server gets a request.
#[derive(Clone, Copy, Debug)]
pub enum Policy {
    /// One after the other.
    RoundRobin,
    /// Of two drawn at random, the one with fewer requests.
    PowerOfTwo,
    /// The one with the lowest cost, as [`Chooser`] counts it.
    Prefix(Weights),
}

/// Servers that are all alike.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// How many there are.
    pub num_replicas: usize,
    /// The cache of each.
    pub cache: CacheConfig,
    /// How long each takes for a prompt.
    pub prefill: PrefillTime,
    /// Which of them gets a request.
    pub policy: Policy,
    /// What draws at random.
    pub seed: u64,
}

/// What became of the requests, and what routing them took.
#[derive(Clone, Debug, Default)]
pub struct FleetOutcome {
    /// Tokens of all prompts.
    pub input_tokens: u64,
    /// Those that hit.
    pub hit_tokens: u64,
    /// Tokens that each server computed.
    pub computed_tokens: Vec<u64>,
    /// Requests that each server got.
    pub requests: Vec<u64>,
    /// Microseconds from a request's arrival to the end of its prefill.
    pub ttft_us: Quantiles,
    /// Nanoseconds in which the router chose for a request and noted its choice.
    pub choice_ns: Quantiles,
    /// Different blocks that it knows of.
    pub index_blocks: usize,
}

/// The most of a server over the mean of all; 1 is even.
pub fn spread(loads: &[u64]) -> f64 {
    let most = loads.iter().max().copied().unwrap_or(0) as f64;
    let sum: u64 = loads.iter().sum();
    most * loads.len() as f64 / sum.max(1) as f64
}

/// A request that was sent to a server.
struct Job {
    arrival_ms: f64,
    input_tokens: usize,
    hashes: Vec<u64>,
    expected: Expected,
}

/// What the router takes a server to compute for a prompt.
#[derive(Clone, Copy)]
struct Expected {
    tokens: usize,
    /// The first block.
    start: usize,
}

/// A prompt that is being computed.
struct Running {
    job: Job,
    end_ms: f64,
    /// Blocks that hit.
    num_hits: usize,
}

struct Server {
    cache: Cache,
    queue: VecDeque<(Job, Waiting)>,
    running: Option<Running>,
    free_at: f64,
    computed_tokens: u64,
    requests: u64,
}

impl Server {
    fn new(config: &CacheConfig, block_size: usize) -> Result<Self> {
        let cache = Cache::new(config, block_size)?;
        // Room for the evictions of one request at least.
        cache
            .store()
            .reader()
            .evictions()
            .listen((config.num_blocks + 1).next_power_of_two(), &[])?;
        Ok(Self {
            cache,
            queue: VecDeque::new(),
            running: None,
            free_at: 0.0,
            computed_tokens: 0,
            requests: 0,
        })
    }

    /// The prompt that has ended by now, if one has.
    fn end(&mut self, now_ms: f64) -> Option<Running> {
        let ended = self.running.take_if(|running| running.end_ms <= now_ms)?;
        self.free_at = ended.end_ms;
        Some(ended)
    }

    /// Starts the next prompt, unless one is in flight or none waits. Returns the tokens that hit and the TTFT in
    /// milliseconds.
    fn start(&mut self, prefill: PrefillTime, block_size: usize) -> Result<Option<(usize, f64)>> {
        if self.running.is_some() {
            return Ok(None);
        }
        let Some((job, waiting)) = self.queue.pop_front() else {
            return Ok(None);
        };
        let start_ms = self.free_at.max(job.arrival_ms);
        let hit = self.cache.run(waiting, Duration::from_secs_f64(start_ms / 1e3))?;
        let computed = job.input_tokens - hit;
        self.computed_tokens += computed as u64;
        let end_ms = start_ms + prefill.ms(computed);
        let ttft_ms = end_ms - job.arrival_ms;
        self.running = Some(Running { job, end_ms, num_hits: hit / block_size });
        Ok(Some((hit, ttft_ms)))
    }

    /// The blocks that it lost since the last call, as KV events name them.
    fn take_evicted(&self) -> Vec<u64> {
        let mut evictions = Vec::new();
        self.cache.store().reader().evictions().take(usize::MAX, &mut evictions);
        let last = evictions.iter().filter_map(|eviction| match eviction {
            Eviction::Block(EvictedBlock { hash, is_last: true, .. }) => Some(hash.short()),
            Eviction::Block(_) | Eviction::Everything => None,
        });
        last.collect()
    }
}

/// What a router that looks at prefixes knows.
struct Knowledge {
    index: ReplicaIndex,
    chooser: Chooser,
    hits: Vec<u32>,
    /// Tokens that each server has to compute, as far as the router knows.
    loads: Vec<f64>,
}

impl Knowledge {
    fn new(config: &FleetConfig, weights: Weights) -> Result<Self> {
        let mut index = ReplicaIndex::new(config.cache.num_blocks);
        let mut chooser = Chooser::new(weights, config.seed)?;
        for number in 0..config.num_replicas {
            chooser.add_replica(index.add_replica()?, &format!("replica {number}"));
        }
        Ok(Self { index, chooser, hits: Vec::new(), loads: vec![0.0; config.num_replicas] })
    }

    fn choose(
        &mut self,
        hashes: &[u64],
        num_tokens: usize,
        block_size: usize,
    ) -> Result<(ReplicaId, Expected)> {
        self.index.hits(hashes, &mut self.hits);
        for hits in &mut self.hits {
            *hits *= block_size as u32;
        }
        let prompt = Prompt { num_tokens, hit_tokens: &self.hits, loads: &self.loads, key: None };
        let id = self.chooser.choose(&prompt, 1)[0];
        let hit = self.hits[usize::from(id.0)] as usize;
        let tokens = num_tokens.saturating_sub(hit);
        let start = (hit / block_size).min(hashes.len());
        self.index.expected(id, &hashes[start..])?;
        self.chooser.note(id, tokens);
        self.loads[usize::from(id.0)] += tokens as f64;
        Ok((id, Expected { tokens, start }))
    }

    fn ended(&mut self, server: usize, Running { job, num_hits, .. }: &Running) -> Result<()> {
        let id = ReplicaId(server as u16);
        self.loads[server] -= job.expected.tokens as f64;
        self.index.stored(id, &job.hashes[*num_hits..])?;
        Ok(self.index.settled(id, &job.hashes[job.expected.start..])?)
    }
}

/// Servers behind a router.
pub struct Fleet {
    config: FleetConfig,
    servers: Vec<Server>,
    /// Requests that each server has not computed.
    in_flight: Vec<usize>,
    knowledge: Option<Knowledge>,
    block_size: usize,
    num_requests: u64,
    outcome: FleetOutcome,
}

impl Fleet {
    /// Servers without content, for traces of this block size.
    pub fn new(config: FleetConfig, block_size: usize) -> Result<Self> {
        let servers = (0..config.num_replicas).map(|_| Server::new(&config.cache, block_size));
        let knowledge = match config.policy {
            Policy::Prefix(weights) => Some(Knowledge::new(&config, weights)?),
            Policy::RoundRobin | Policy::PowerOfTwo => None,
        };
        Ok(Self {
            servers: servers.collect::<Result<_>>()?,
            in_flight: vec![0; config.num_replicas],
            config,
            knowledge,
            block_size,
            num_requests: 0,
            outcome: FleetOutcome::default(),
        })
    }

    /// Sends a request to a server as it arrives.
    pub fn push(&mut self, request: &Request) -> Result<()> {
        let now_ms = request.time_ms as f64;
        self.run_until(now_ms)?;
        // All caches hash alike, and a prepared request is of one cache.
        let hashes = self.servers[0].cache.prepare(request)?.hashes();
        let (server, expected) = self.choose(&hashes, request.input_tokens)?;
        self.num_requests += 1;
        self.in_flight[server] += 1;
        self.servers[server].requests += 1;
        let waiting = self.servers[server].cache.prepare(request)?;
        let input_tokens = request.input_tokens;
        let job = Job { arrival_ms: now_ms, input_tokens, hashes, expected };
        self.servers[server].queue.push_back((job, waiting));
        self.outcome.input_tokens += input_tokens as u64;
        self.run_server(server, now_ms)
    }

    fn choose(&mut self, hashes: &[u64], tokens: usize) -> Result<(usize, Expected)> {
        let Some(knowledge) = &mut self.knowledge else {
            return Ok((self.choose_blindly(), Expected { tokens, start: 0 }));
        };
        let begin = Instant::now();
        let (id, expected) = knowledge.choose(hashes, tokens, self.block_size)?;
        self.outcome.choice_ns.push(begin.elapsed().as_nanos() as u64);
        Ok((usize::from(id.0), expected))
    }

    fn choose_blindly(&self) -> usize {
        let count = self.config.num_replicas;
        if let Policy::RoundRobin = self.config.policy {
            return (self.num_requests % count as u64) as usize;
        }
        let draw = mix(self.config.seed ^ mix(self.num_requests));
        let first = draw as u32 as usize % count;
        let second = (first + 1 + (draw >> 32) as usize % (count - 1).max(1)) % count;
        if self.in_flight[second] < self.in_flight[first] { second } else { first }
    }

    /// Runs all servers up to a time.
    fn run_until(&mut self, now_ms: f64) -> Result<()> {
        (0..self.servers.len()).try_for_each(|server| self.run_server(server, now_ms))
    }

    fn run_server(&mut self, server: usize, now_ms: f64) -> Result<()> {
        loop {
            if let Some(ended) = self.servers[server].end(now_ms) {
                self.note_end(server, &ended)?;
            }
            match self.servers[server].start(self.config.prefill, self.block_size)? {
                Some((hit, ttft_ms)) => self.note_start(server, hit, ttft_ms)?,
                None => return Ok(()),
            }
        }
    }

    fn note_start(&mut self, server: usize, hit: usize, ttft_ms: f64) -> Result<()> {
        self.outcome.hit_tokens += hit as u64;
        self.outcome.ttft_us.push((ttft_ms * 1e3) as u64);
        let evicted = self.servers[server].take_evicted();
        if let Some(knowledge) = &mut self.knowledge {
            knowledge.index.removed(ReplicaId(server as u16), &evicted)?;
        }
        Ok(())
    }

    fn note_end(&mut self, server: usize, ended: &Running) -> Result<()> {
        self.in_flight[server] -= 1;
        if let Some(knowledge) = &mut self.knowledge {
            knowledge.ended(server, ended)?;
        }
        Ok(())
    }

    /// Runs all that waits, and tells what became of the requests.
    pub fn finish(mut self) -> Result<FleetOutcome> {
        self.run_until(f64::INFINITY)?;
        let index = self.knowledge.as_ref().map(|knowledge| &knowledge.index);
        Ok(FleetOutcome {
            computed_tokens: self.servers.iter().map(|one| one.computed_tokens).collect(),
            requests: self.servers.iter().map(|one| one.requests).collect(),
            index_blocks: index.map_or(0, ReplicaIndex::num_blocks),
            ..self.outcome
        })
    }
}
