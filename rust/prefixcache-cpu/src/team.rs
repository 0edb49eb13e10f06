//! A few threads that share the tasks of one computation at a time.
//!
//! A decode step has some two hundred short computations, so what counts is how fast the members
//! start: between two of them a member spins for a while before it sleeps, and less on a busy machine.
//!
//! How a computation is passed on. One word, the gate, holds the number of the round, whether the
//! round is open, and how many members are in it. `run` writes the job, then opens the next round
//! (Release). A member goes in by adding itself to the gate of an open round (Acquire), and so sees
//! the job. All take task numbers from one counter until none is left; a member then leaves
//! (Release). The caller, when no number is left, closes the round, so that a member that comes
//! late is not waited for, and returns once the members inside have left (Acquire): all writes of
//! all tasks are visible to it, and nobody holds the job, which may thus borrow from its stack.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::mem;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Turns of the wait loop before a member sleeps: about 100 microseconds.
const SPINS_BEFORE_SLEEP: u32 = 4_000;

/// Turns of a wait loop between two offers of the processor to other threads.
const SPINS_BEFORE_YIELD: u32 = 500;

/// An offer that takes longer was taken: the machine is busy.
const TAKEN: Duration = Duration::from_micros(50);

/// Numbers that a task should have, so that waking a thread pays.
const TASK_NUMBERS: usize = 16_384;

/// The most threads of a team.
pub const MAX_THREADS: usize = 1024;

/// The caller and `threads - 1` members.
pub struct Team {
    shared: Arc<Shared>,
    members: Vec<JoinHandle<()>>,
    sleepers: Vec<Thread>,
    turn: Mutex<()>,
    /// The id of the process that has the members: one that was forked off has none.
    process: u32,
}

struct Shared {
    job: UnsafeCell<Job>,
    gate: AtomicU64,
    next: AtomicUsize,
    asleep: AtomicUsize,
    stop: AtomicBool,
    /// What the first task to panic in this round panicked with.
    panic: Mutex<Option<Panic>>,
}

type Panic = Box<dyn Any + Send>;

/// Bits of the gate: members inside, whether they may come in, and the round's number above.
const INSIDE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const ROUND: u64 = 1 << 17;

fn round_of(gate: u64) -> u64 {
    gate / ROUND
}

// SAFETY: `job` is written only by the caller of `run`, who holds `turn`, while the gate is closed
// and nobody is inside; members read it only while they are inside.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is used only while `run` keeps its target alive.
unsafe impl Send for Shared {}

/// Offers the processor to other threads; whether one of them took it, so that to spin on would take it
/// from the next.
fn others_ran() -> bool {
    let begun = Instant::now();
    thread::yield_now();
    begun.elapsed() > TAKEN
}

#[derive(Clone, Copy)]
struct Job {
    task: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

fn nothing(_: usize) {}

impl Team {
    /// A team of `threads` threads, from 1 to [`MAX_THREADS`]; the caller of [`Team::run`] is one.
    ///
    /// # Errors
    /// The system has fewer threads to give; those that were started have ended then.
    pub fn new(threads: usize) -> io::Result<Self> {
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(Job { task: &nothing, tasks: 0 }),
            gate: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            asleep: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut team = Self {
            shared,
            members: Vec::new(),
            sleepers: Vec::new(),
            turn: Mutex::new(()),
            process: process::id(),
        };
        // One by one: where a thread cannot be had, the team's drop ends those before it.
        for number in 1..threads {
            team.members.push(spawn(number, team.shared.clone())?);
        }
        let threads = team.members.iter().map(JoinHandle::thread);
        team.sleepers = threads.cloned().collect();
        Ok(team)
    }

    /// Threads that work on a computation.
    pub fn threads(&self) -> usize {
        self.members.len() + 1
    }

    /// Rounds so far: computations that the threads shared. At the end of each they wait for each other.
    pub fn rounds(&self) -> u64 {
        // Relaxed: a count, which orders nothing.
        round_of(self.shared.gate.load(Ordering::Relaxed))
    }

    /// The task that is `number` in an order of `0..tasks` in which each thread goes through neighbours, as long as
    /// tasks take equally long: so what a thread fetches ahead, it reads itself.
    pub fn in_order(&self, number: usize, tasks: usize) -> usize {
        let threads = self.threads();
        let each = tasks / threads;
        if number < each * threads { number % threads * each + number / threads } else { number }
    }

    /// Calls `task` with each of `0..tasks`, once, on any thread and in any order; returns when all
    /// have returned. Callers from several threads take turns.
    ///
    /// # Panics
    /// A task panicked; with what the first to panic panicked with. Some tasks may not be run then.
    pub fn run(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.members.is_empty() {
            return (0..tasks).for_each(task);
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.start(tasks, &task);
        self.shared.take_tasks_and_catch();
        self.finish();
        let panic = self.shared.take_panic();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// As [`Team::run`], for tasks of up to `chunk` neighbours of `0..count`.
    pub fn run_chunks(&self, count: usize, chunk: usize, task: impl Fn(Range<usize>) + Sync) {
        self.run(count.div_ceil(chunk), |i| task(i * chunk..((i + 1) * chunk).min(count)));
    }

    /// As [`Team::run_chunks`], for rows of `width` numbers: a task has as many as waking a thread pays for.
    pub fn run_rows(&self, rows: usize, width: usize, task: impl Fn(Range<usize>) + Sync) {
        self.run_chunks(rows, (TASK_NUMBERS / width.max(1)).max(1), task);
    }

    /// As [`Team::run`], for tasks that can fail; the error of one that did. All are run.
    ///
    /// # Panics
    /// A task panicked.
    pub fn try_run<E: Send + Sync>(
        &self,
        tasks: usize,
        task: impl Fn(usize) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let failure = OnceLock::new();
        self.run(tasks, |number| {
            if let Err(error) = task(number) {
                // Not the first one: the caller gets one.
                let _ = failure.set(error);
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    fn start(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes; `run` waits until nobody holds the job.
        let task = unsafe {
            mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(task)
        };
        // SAFETY: the caller holds `turn`, and the last `run` left the gate closed, nobody inside.
        unsafe { *self.shared.job.get() = Job { task, tasks } };
        // Relaxed: a member takes a number only after it has come in.
        self.shared.next.store(0, Ordering::Relaxed);
        self.shared.open_round();
        // SeqCst: see `Shared::await_round`.
        if self.shared.asleep.load(Ordering::SeqCst) > 0 {
            self.sleepers.iter().for_each(Thread::unpark);
        }
    }

    fn finish(&self) {
        // Relaxed: it publishes nothing; the loop below synchronizes.
        self.shared.gate.fetch_and(!OPEN, Ordering::Relaxed);
        let mut spins = 0;
        // Acquire: synchronizes with each member's leave, so that its tasks' writes are visible.
        while self.shared.gate.load(Ordering::Acquire) & INSIDE > 0 {
            spins += 1;
            if spins % SPINS_BEFORE_YIELD == 0 {
                thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        if process::id() != self.process {
            mem::forget(mem::take(&mut self.members));
            return;
        }
        // Relaxed: the new round publishes it.
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.open_round();
        // All are woken before one is waited for: they end side by side.
        let threads = self.members.iter().map(JoinHandle::thread);
        threads.for_each(Thread::unpark);
        for member in self.members.drain(..) {
            // A member catches its tasks' panics and has nothing else to fail with.
            let _ = member.join();
        }
    }
}

fn spawn(number: usize, shared: Arc<Shared>) -> io::Result<JoinHandle<()>> {
    let name = format!("prefixcache-cpu-{number}");
    let body = move || shared.work();
    thread::Builder::new().name(name).spawn(body)
}

impl Shared {
    /// Opens the next round; the gate is closed and nobody inside.
    fn open_round(&self) {
        // Relaxed: only the caller who holds `turn` changes the round.
        let round = round_of(self.gate.load(Ordering::Relaxed)) + 1;
        // SeqCst: releases the job; for the rest see `await_round`.
        self.gate.store((round * ROUND) | OPEN, Ordering::SeqCst);
    }

    /// A member's life: one round after the other, until the team is dropped.
    fn work(&self) {
        let mut seen = 0;
        loop {
            seen = self.await_round(seen);
            // Relaxed: ordered by the round that was just seen.
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            if self.enter(seen) {
                self.take_tasks_and_catch();
                // Release: the caller that sees it sees the writes of this member's tasks.
                self.gate.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Waits for a round other than `seen`; returns its number.
    fn await_round(&self, seen: u64) -> u64 {
        for spin in 1..=SPINS_BEFORE_SLEEP {
            // Acquire: synchronizes with `open_round`, so that `stop` is visible.
            let round = round_of(self.gate.load(Ordering::Acquire));
            if round != seen {
                return round;
            }
            if spin % SPINS_BEFORE_YIELD == 0 && others_ran() {
                break;
            }
            std::hint::spin_loop();
        }
        self.sleep_through(seen)
    }

    fn sleep_through(&self, seen: u64) -> u64 {
        // SeqCst, here, at the load below, in `open_round` and in `start`: of "asleep, then look at
        // the gate" and "open the gate, then look for sleepers" one sees the other.
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let mut round = round_of(self.gate.load(Ordering::SeqCst));
        while round == seen {
            thread::park();
            round = round_of(self.gate.load(Ordering::SeqCst));
        }
        // Relaxed: a caller that still counts this member wakes it for nothing.
        self.asleep.fetch_sub(1, Ordering::Relaxed);
        round
    }

    /// Goes into the round while it is open.
    fn enter(&self, round: u64) -> bool {
        let come_in = |gate| (round_of(gate) == round && gate & OPEN > 0).then_some(gate + 1);
        // Acquire: synchronizes with `open_round`, so that the job is visible. Relaxed: a failed
        // look is only a reason to look again.
        self.gate.fetch_update(Ordering::Acquire, Ordering::Relaxed, come_in).is_ok()
    }

    fn take_tasks_and_catch(&self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_tasks())) {
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(panic);
        }
    }

    /// What the round's first panic was, which the next round knows nothing of.
    fn take_panic(&self) -> Option<Panic> {
        let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        first.take()
    }

    fn take_tasks(&self) {
        // SAFETY: this is the caller of `run`, or a member inside the round, which `run` waits for.
        // So nobody writes the job, and what it points to lives.
        let Job { task, tasks } = unsafe { *self.job.get() };
        // SAFETY: as above.
        let task = unsafe { &*task };
        loop {
            // Relaxed: only the number counts; the job was published by the round.
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= tasks {
                return;
            }
            task(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_and_is_seen() {
        for threads in [1, 2, 3] {
            let team = Team::new(threads).expect("threads");
            for tasks in (0..200).chain([5_000]) {
                let counts: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                team.run(tasks, |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn threads_go_through_neighbours_and_every_task_has_its_turn() {
        for threads in 1..=3 {
            let team = Team::new(threads).expect("threads");
            for tasks in 0..20 {
                let mut order: Vec<_> = (0..tasks).map(|i| team.in_order(i, tasks)).collect();
                if tasks >= 2 * threads {
                    assert_eq!(order[threads], order[0] + 1);
                }
                order.sort_unstable();
                assert!(order.into_iter().eq(0..tasks), "{threads}, {tasks}");
            }
        }
    }

    #[test]
    fn a_round_is_what_two_threads_share() {
        let team = Team::new(2).expect("threads");
        for tasks in [0, 1, 2, 9] {
            team.run(tasks, |_| ());
        }
        assert_eq!(team.rounds(), 2);
    }

    #[test]
    fn a_member_wakes_from_sleep() {
        let team = Team::new(2).expect("threads");
        for _ in 0..5 {
            thread::sleep(std::time::Duration::from_millis(3));
            let together = std::sync::Barrier::new(2);
            // Returns only if two threads take a task each.
            team.run(2, |_| {
                together.wait();
            });
        }
    }

    #[test]
    fn callers_take_turns() {
        let team = Team::new(2).expect("threads");
        let sum = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        team.run(7, |i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 200 * 21);
    }

    #[test]
    fn a_failure_reaches_the_caller() {
        let team = Team::new(2).expect("threads");
        for bad in 0..8 {
            let odd = |number| if number == bad { Err(number) } else { Ok(()) };
            assert_eq!(team.try_run(8, odd), Err(bad));
        }
        assert_eq!(team.try_run(8, |_| Ok::<_, usize>(())), Ok(()));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_leaves_the_team_whole() {
        let team = Team::new(2).expect("threads");
        for bad in 0..8 {
            let run = || {
                team.run(8, |i| {
                    if i == bad {
                        std::panic::panic_any(bad);
                    }
                });
            };
            let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("a panic");
            assert_eq!(panic.downcast_ref(), Some(&bad));
        }
        team.run(8, |_| ());
    }

    #[test]
    fn panics_of_caller_and_member_are_reported_once() {
        let team = Team::new(2).expect("threads");
        let together = std::sync::Barrier::new(2);
        let run = || {
            team.run(2, |_| {
                together.wait();
                panic!("each of both");
            });
        };
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        team.run(2, |_| {
            together.wait();
        });
    }

    #[test]
    fn a_team_has_a_size() {
        for threads in [0, MAX_THREADS + 1, usize::MAX] {
            assert!(Team::new(threads).is_err());
        }
    }
}
