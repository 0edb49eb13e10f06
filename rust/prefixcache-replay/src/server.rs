//! Requests that wait for a server whose prefill takes time: a model of one, not a measurement.
//!
//! One prompt is computed after the other, in a time that is linear in the tokens that did not hit. Decoding
//! takes none of it, and an answer's blocks are free as soon as its prompt is computed.

use std::collections::VecDeque;
use std::time::Duration;

use prefixcache_core::error::CacheError;

use crate::cache::{Cache, Waiting};
use crate::quantiles::Quantiles;

/// The waiting requests among which the one with the longest hit is looked for.
const WINDOW: usize = 64;

/// How long a prompt takes.
#[derive(Clone, Copy, Debug)]
pub struct PrefillTime {
    /// Milliseconds that every prompt takes, whatever hits.
    pub ms_per_request: f64,
    /// Milliseconds a token that is computed.
    pub ms_per_token: f64,
}

impl PrefillTime {
    /// Milliseconds of a prompt of which `tokens` are computed.
    #[must_use]
    pub fn ms(self, tokens: usize) -> f64 {
        self.ms_per_request + self.ms_per_token * tokens as f64
    }
}

/// Which of the waiting requests starts next.
#[derive(Clone, Copy, Debug)]
pub enum Admission {
    /// The one that came first.
    Fcfs,
    /// The one with the longest hit among the first 64; no later one passes a request that has waited so long.
    CacheAware {
        /// The wait in milliseconds.
        max_delay_ms: f64,
    },
}

/// What requests waited for their first token.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    /// Microseconds from a request's arrival to the end of its prefill.
    pub ttft_us: Quantiles,
    /// Requests within the objective.
    pub good: u64,
    /// When the first request arrived, in milliseconds from the trace's start.
    pub start_ms: f64,
    /// When the last prefill ended.
    pub end_ms: f64,
    /// The most requests that waited at once.
    pub most_waiting: usize,
}

/// A server and its queue.
pub struct Server {
    prefill: PrefillTime,
    admission: Admission,
    /// The TTFT up to which a request counts as good, in milliseconds.
    objective_ms: f64,
    queue: VecDeque<(u64, Waiting)>,
    free_at: f64,
    latency: Latency,
}

impl Server {
    /// A server without requests.
    #[must_use]
    pub fn new(prefill: PrefillTime, admission: Admission, objective_ms: f64) -> Self {
        Self {
            prefill,
            admission,
            objective_ms,
            queue: VecDeque::new(),
            free_at: 0.0,
            latency: Latency::default(),
        }
    }

    /// Takes a request at its arrival, once all that start before are done.
    pub fn arrive(
        &mut self,
        cache: &mut Cache,
        time_ms: u64,
        waiting: Waiting,
    ) -> Result<(), CacheError> {
        self.run_until(cache, time_ms as f64)?;
        if self.latency.most_waiting == 0 {
            self.latency.start_ms = time_ms as f64;
        }
        self.queue.push_back((time_ms, waiting));
        self.latency.most_waiting = self.latency.most_waiting.max(self.queue.len());
        Ok(())
    }

    /// Runs all requests that start before a time.
    pub fn run_until(&mut self, cache: &mut Cache, time_ms: f64) -> Result<(), CacheError> {
        while let Some(&(first, ..)) = self.queue.front()
            && self.free_at.max(first as f64) < time_ms
        {
            let now = self.free_at.max(first as f64);
            let next = self.next(cache, now)?;
            self.start(cache, next, now)?;
        }
        Ok(())
    }

    fn next(&mut self, cache: &Cache, now: f64) -> Result<usize, CacheError> {
        let Admission::CacheAware { max_delay_ms } = self.admission else {
            return Ok(0);
        };
        if now - self.queue[0].0 as f64 >= max_delay_ms {
            return Ok(0);
        }
        let mut best = (0, 0);
        for (index, (_, waiting)) in self.queue.iter_mut().enumerate().take(WINDOW) {
            let hits = cache.probe(waiting)?;
            if hits > best.0 {
                best = (hits, index);
            }
        }
        Ok(best.1)
    }

    fn start(&mut self, cache: &mut Cache, index: usize, now: f64) -> Result<(), CacheError> {
        let Some((arrival, waiting)) = self.queue.remove(index) else {
            return Ok(());
        };
        let input_tokens = waiting.input_tokens;
        let hits = cache.run(waiting, Duration::from_secs_f64(now / 1e3))?;
        self.free_at = now + self.prefill.ms(input_tokens - hits);
        let ttft = self.free_at - arrival as f64;
        self.latency.ttft_us.push((ttft * 1e3) as u64);
        self.latency.good += u64::from(ttft <= self.objective_ms);
        self.latency.end_ms = self.free_at;
        Ok(())
    }

    /// What requests waited so far.
    #[must_use]
    pub fn latency(&self) -> &Latency {
        &self.latency
    }
}
