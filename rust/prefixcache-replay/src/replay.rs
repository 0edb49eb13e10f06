//! A trace through any number of caches side by side, each on its own.

use std::sync::{Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use prefixcache_core::error::CacheError;
use thiserror::Error;

use crate::cache::{Cache, CacheConfig, ConfigError, Outcome};
use crate::history::History;
use crate::marconi::Marconi;
use crate::server::{Latency, Server};
use crate::trace::{Reader, Request, TraceError};

/// Block references of a batch, or a request more: what is read between two looks at the caches.
const BATCH_BLOCKS: usize = 1 << 18;

/// Why a trace could not be run.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The trace is wrong.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The cache refused a call.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// A cache, and what its requests found.
pub enum Simulation {
    /// The real one, and the server whose requests wait for it, where there is one.
    Real(Box<Cache>, Option<Server>),
    /// Marconi's.
    Marconi(Marconi),
}

impl Simulation {
    /// A cache without content, for traces of this block size.
    pub fn new(
        config: &CacheConfig,
        server: Option<Server>,
        block_size: usize,
    ) -> Result<Self, ConfigError> {
        Ok(Self::Real(Box::new(Cache::new(config, block_size)?), server))
    }

    /// Takes a request. Without a server it is answered at once.
    pub fn push(&mut self, request: &Request) -> Result<(), CacheError> {
        match self {
            Self::Marconi(cache) => cache.push(request),
            Self::Real(cache, None) => {
                cache.run(cache.prepare(request)?, Duration::from_millis(request.time_ms))?;
            }
            Self::Real(cache, Some(server)) => {
                let waiting = cache.prepare(request)?;
                server.arrive(cache, request.time_ms, waiting)?;
            }
        }
        Ok(())
    }

    /// Answers all that wait.
    pub fn finish(&mut self) -> Result<(), CacheError> {
        match self {
            Self::Real(cache, Some(server)) => server.run_until(cache, f64::INFINITY),
            _ => Ok(()),
        }
    }

    /// What the requests found.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::Real(cache, _) => cache.outcome(),
            Self::Marconi(cache) => cache.outcome(),
        }
    }

    /// What they waited, where there is a server.
    #[must_use]
    pub fn latency(&self) -> Option<&Latency> {
        match self {
            Self::Real(_, server) => server.as_ref().map(Server::latency),
            Self::Marconi(_) => None,
        }
    }
}

/// A trace that is being run.
pub struct Replay {
    reader: Reader,
    simulations: Vec<Simulation>,
    history: Option<History>,
    threads: usize,
    batch: Vec<Request>,
    block_references: u64,
}

impl Replay {
    /// Runs the requests of a reader through simulations, and notes their history where one is given, with up to
    /// `threads` threads.
    #[must_use]
    pub fn new(
        reader: Reader,
        simulations: Vec<Simulation>,
        history: Option<History>,
        threads: usize,
    ) -> Self {
        Self {
            reader,
            simulations,
            history,
            threads: threads.max(1),
            batch: Vec::new(),
            block_references: 0,
        }
    }

    /// One more simulation, which sees the requests from the next batch on.
    pub fn add(&mut self, simulation: Simulation) {
        self.simulations.push(simulation);
    }

    /// Whether a batch was asked for.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        !self.batch.is_empty()
    }

    /// Runs the next batch of requests; false after the last one.
    pub fn advance(&mut self) -> Result<bool, ReplayError> {
        let count = self.read_batch()?;
        let is_last = count == 0;
        self.run_batch(count, is_last)?;
        Ok(!is_last)
    }

    /// How many requests were read.
    fn read_batch(&mut self) -> Result<usize, TraceError> {
        let (mut count, mut blocks) = (0, 0);
        while blocks < BATCH_BLOCKS {
            if count == self.batch.len() {
                self.batch.push(Request::default());
            }
            if !self.reader.read(&mut self.batch[count])? {
                break;
            }
            // A request without blocks counts too, so that a batch is bounded.
            blocks += self.batch[count].blocks.len() + 1;
            self.block_references += self.batch[count].num_prompt_blocks as u64;
            count += 1;
        }
        Ok(count)
    }

    fn run_batch(&mut self, count: usize, is_last: bool) -> Result<(), CacheError> {
        let batch = &self.batch[..count];
        let helpers = self.threads.min(self.simulations.len()).saturating_sub(1);
        let waiting = Mutex::new(self.simulations.iter_mut());
        let next = || {
            let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.next()
        };
        let run = || -> Result<(), CacheError> {
            while let Some(simulation) = next() {
                batch.iter().try_for_each(|one| simulation.push(one))?;
                if is_last {
                    simulation.finish()?;
                }
            }
            Ok(())
        };
        let history = &mut self.history;
        let mut note = || {
            if let Some(history) = history {
                batch.iter().for_each(|request| history.push(request));
            }
        };
        std::thread::scope(|scope| {
            // Where the system gives no more threads, those that there are do it all.
            let spawn = |_| Builder::new().spawn_scoped(scope, run).ok();
            let others: Vec<_> = (0..helpers).map_while(spawn).collect();
            note();
            let mut outcome = run();
            for other in others {
                let result = other.join().unwrap_or_else(|panic| {
                    std::panic::resume_unwind(panic);
                });
                outcome = outcome.and(result);
            }
            outcome
        })
    }

    /// What is read.
    #[must_use]
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Full blocks of the prompts so far, each as often as it was asked for.
    #[must_use]
    pub fn block_references(&self) -> u64 {
        self.block_references
    }

    /// The simulations, in the order in which they were given.
    #[must_use]
    pub fn simulations(&self) -> &[Simulation] {
        &self.simulations
    }

    /// The history, where one was given.
    #[must_use]
    pub fn history(&self) -> Option<&History> {
        self.history.as_ref()
    }
}
