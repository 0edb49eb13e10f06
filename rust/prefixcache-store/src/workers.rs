//! Threads for calls to the system that may take longer than somebody waits.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use crate::memory::Scratch;

/// What became of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    Failed,
    /// Nobody waits for it any more.
    Late,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    Running,
    Ended(Outcome),
}

/// By which a job hears whether somebody waits for it.
#[derive(Debug)]
pub(crate) struct Ticket(Mutex<Phase>);

impl Ticket {
    /// Ends the job with `finish`, if somebody waits for it; whether that was so. Who waits does so until `finish`
    /// returns, which therefore makes no call that may take long.
    pub(crate) fn finish(&self, finish: impl FnOnce()) -> bool {
        let mut phase = lock(&self.0);
        let in_time = *phase == Phase::Running;
        if in_time {
            finish();
            *phase = Phase::Ended(Outcome::Done);
        }
        in_time
    }

    fn begin(&self) -> bool {
        let mut phase = lock(&self.0);
        let in_time = *phase == Phase::Waiting;
        if in_time {
            *phase = Phase::Running;
        }
        in_time
    }
}

pub(crate) type Job = Box<dyn FnOnce(&mut Scratch, &Ticket) + Send>;

/// The jobs of a call.
#[derive(Debug)]
struct Call {
    tickets: Vec<Ticket>,
    num_left: Mutex<usize>,
    ended: Condvar,
}

struct Queued {
    job: Job,
    call: Arc<Call>,
    place: usize,
}

#[derive(Default)]
struct Jobs {
    queued: VecDeque<Queued>,
    is_closed: bool,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    changed: Condvar,
    /// Threads that are in a job for which nobody waits.
    num_stuck: AtomicUsize,
}

/// Threads that take jobs in turn.
pub(crate) struct Workers {
    queue: Arc<Queue>,
    num_threads: usize,
}

impl Workers {
    pub(crate) fn start(name: &str, num_threads: usize) -> io::Result<Self> {
        let workers = Self { queue: Arc::default(), num_threads };
        for _ in 0..num_threads {
            let queue = Arc::clone(&workers.queue);
            thread::Builder::new().name(name.to_owned()).spawn(move || queue.work())?;
        }
        Ok(workers)
    }

    /// Runs jobs and waits for them, `timeout` at most.
    pub(crate) fn run(&self, jobs: Vec<Job>, timeout: Option<Duration>) -> Vec<Outcome> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        // Relaxed: a thread that is free in a moment may be missed.
        if deadline.is_some() && self.queue.num_stuck.load(Relaxed) >= self.num_threads {
            return vec![Outcome::Late; jobs.len()];
        }
        let tickets = jobs.iter().map(|_| Ticket(Mutex::new(Phase::Waiting))).collect();
        let call =
            Arc::new(Call { tickets, num_left: Mutex::new(jobs.len()), ended: Condvar::new() });
        let queued = |(place, job)| Queued { job, call: Arc::clone(&call), place };
        lock(&self.queue.jobs).queued.extend(jobs.into_iter().enumerate().map(queued));
        self.queue.changed.notify_all();
        let mut num_left = lock(&call.num_left);
        while *num_left > 0 {
            let Some(deadline) = deadline else {
                num_left = call.ended.wait(num_left).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = call.ended.wait_timeout(num_left, left);
            num_left = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(num_left);
        call.tickets.iter().map(|ticket| self.queue.leave(ticket)).collect()
    }
}

impl Drop for Workers {
    /// The threads end once what is queued is done; nobody waits for that.
    fn drop(&mut self) {
        lock(&self.queue.jobs).is_closed = true;
        self.queue.changed.notify_all();
    }
}

impl Queue {
    fn work(&self) {
        let mut scratch = Scratch::default();
        while let Some(Queued { job, call, place }) = self.next() {
            let ticket = &call.tickets[place];
            if ticket.begin() {
                // A job that panics has failed.
                let _ = catch_unwind(AssertUnwindSafe(|| job(&mut scratch, ticket)));
                self.end(ticket);
            } else {
                drop(job);
            }
            // What the job had is dropped by now: who waits may open the folder again.
            *lock(&call.num_left) -= 1;
            call.ended.notify_one();
        }
    }

    fn next(&self) -> Option<Queued> {
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.queued.pop_front() {
                return Some(job);
            }
            if jobs.is_closed {
                return None;
            }
            jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// After a job.
    fn end(&self, ticket: &Ticket) {
        let mut phase = lock(&ticket.0);
        match *phase {
            Phase::Ended(Outcome::Late) => {
                self.num_stuck.fetch_sub(1, Relaxed);
            }
            Phase::Ended(_) => {}
            Phase::Waiting | Phase::Running => *phase = Phase::Ended(Outcome::Failed),
        }
    }

    /// Waits for a job no longer; what became of it.
    fn leave(&self, ticket: &Ticket) -> Outcome {
        let mut phase = lock(&ticket.0);
        if *phase == Phase::Running {
            self.num_stuck.fetch_add(1, Relaxed);
        }
        match *phase {
            Phase::Ended(outcome) => outcome,
            Phase::Waiting | Phase::Running => {
                *phase = Phase::Ended(Outcome::Late);
                Outcome::Late
            }
        }
    }
}

/// A lock whose owner may have panicked: what it guards is whole at each step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
