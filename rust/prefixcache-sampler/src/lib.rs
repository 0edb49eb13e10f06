//! Chooses next tokens from logits, on the CPU.
//!
//! A row's token depends on its logits, its options, its seed and its position, and on nothing else: it
//! is the same bits alone and in a batch, at any number of threads, with any instructions. There is
//! nothing in here that differs between instructions: numbers are computed one by one, in one order,
//! and sums are of whole numbers.
#![warn(missing_docs)]

mod adjust;
mod blocks;
mod cuts;
mod logprobs;
pub mod math;
mod noise;
mod race;
mod row;

use std::sync::{Mutex, OnceLock, PoisonError};

use prefixcache_cpu::{Form, Kernel, Lanes, Rows, Team};

pub use crate::logprobs::TokenLogprobs;
pub use crate::row::{Draw, MAX_VOCAB_SIZE, Penalties, Row, RowError};

use crate::blocks::Blocks;
use crate::noise::Noise;

/// Logits that a task should look at, so that waking a thread pays.
const TASK_LOGITS: usize = 1 << 18;

/// What a row chose.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// None where the logits, or what the options make of them, have no finite maximum.
    pub token: Option<usize>,
    /// Where the row asks for them and has a token.
    pub logprobs: Option<TokenLogprobs>,
}

/// Samples rows of logits. It keeps nothing but memory, of as many rows as were computed at once.
#[derive(Default)]
pub struct Sampler {
    spare: Mutex<Vec<Memory>>,
}

/// What computing a row takes.
#[derive(Default)]
struct Memory {
    changed: Vec<f32>,
    scaled: Vec<f32>,
    best: Vec<f32>,
    counts: Vec<u32>,
    cuts: cuts::Spare,
    runners: race::Runners,
    largest: Vec<f32>,
}

impl Sampler {
    /// The likeliest token of each row, the first of equals; None without a finite maximum.
    ///
    /// # Errors
    /// The vocabulary is empty or too large.
    pub fn likeliest(
        &self,
        form: Form,
        team: &Team,
        logits: Rows<'_, f32>,
    ) -> Result<Vec<Option<usize>>, RowError> {
        check_shape(logits, logits.rows())?;
        let chunk = (TASK_LOGITS / logits.width()).max(1);
        Ok(each_row(team, logits.rows(), chunk, |row| form.run(Likeliest(logits.row(row)))))
    }

    /// The next token of each row.
    ///
    /// # Errors
    /// The rows do not fit the logits.
    pub fn sample(
        &self,
        form: Form,
        team: &Team,
        logits: Rows<'_, f32>,
        rows: &[&Row],
    ) -> Result<Vec<Sampled>, RowError> {
        check_shape(logits, rows.len())?;
        for (i, row) in rows.iter().enumerate() {
            row.check(i, logits.width())?;
        }
        Ok(each_row(team, rows.len(), 1, |i| {
            self.with_memory(|memory| {
                form.run(SampleRow { logits: logits.row(i), row: rows[i], memory })
            })
        }))
    }

    /// Log probabilities of one token a row, and of the `count` likeliest ones.
    ///
    /// # Errors
    /// The tokens do not fit the logits.
    pub fn logprobs(
        &self,
        form: Form,
        team: &Team,
        logits: Rows<'_, f32>,
        tokens: &[i32],
        count: usize,
    ) -> Result<Vec<TokenLogprobs>, RowError> {
        check_shape(logits, tokens.len())?;
        for (row, token) in tokens.iter().enumerate() {
            row::check_all("token_ids", row, std::slice::from_ref(token), logits.width())?;
        }
        Ok(each_row(team, tokens.len(), 1, |i| {
            self.with_memory(|memory| {
                form.run(Logprobs {
                    logits: logits.row(i),
                    token: tokens[i] as usize,
                    count,
                    memory,
                })
            })
        }))
    }

    fn with_memory<T>(&self, work: impl FnOnce(&mut Memory) -> T) -> T {
        let lock = || self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let mut memory = lock().pop().unwrap_or_default();
        let done = work(&mut memory);
        lock().push(memory);
        done
    }
}

fn check_shape(logits: Rows<'_, f32>, rows: usize) -> Result<(), RowError> {
    if !(1..=MAX_VOCAB_SIZE).contains(&logits.width()) {
        return Err(RowError::Vocabulary(logits.width()));
    }
    match logits.rows() {
        logits if logits != rows => Err(RowError::Count { logits, rows }),
        _ => Ok(()),
    }
}

/// What `work` gives for each row, `chunk` of them a task.
fn each_row<T: Send + Sync>(
    team: &Team,
    rows: usize,
    chunk: usize,
    work: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let results: Vec<OnceLock<T>> = (0..rows).map(|_| OnceLock::new()).collect();
    team.run_chunks(rows, chunk, |rows| {
        for row in rows {
            // The row belongs to this task: nothing is there before.
            let _ = results[row].set(work(row));
        }
    });
    let results = results.into_iter();
    results.map(|result| result.into_inner().expect("each row is computed")).collect()
}

struct Likeliest<'a>(&'a [f32]);

impl Kernel for Likeliest<'_> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Option<usize> {
        blocks::likeliest(lanes, self.0)
    }
}

struct SampleRow<'a> {
    logits: &'a [f32],
    row: &'a Row,
    memory: &'a mut Memory,
}

impl Kernel for SampleRow<'_> {
    type Output = Sampled;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Sampled {
        let Self { logits, row, memory } = self;
        let token = match row.adjusts() {
            true => adjusted(lanes, logits, row, memory),
            false => chosen(lanes, logits, row, memory),
        };
        let (Some(taken), Some(count)) = (token, row.logprobs) else {
            let logprobs = None;
            return Sampled { token, logprobs };
        };
        let of_model = Blocks::new(lanes, logits, &mut memory.best);
        let logprobs = logprobs::logprobs(logits, of_model, taken, count, &mut memory.largest);
        Sampled { token, logprobs: Some(logprobs) }
    }
}

struct Logprobs<'a> {
    logits: &'a [f32],
    token: usize,
    count: usize,
    memory: &'a mut Memory,
}

impl Kernel for Logprobs<'_> {
    type Output = TokenLogprobs;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> TokenLogprobs {
        let Memory { best, largest, .. } = self.memory;
        let of_model = Blocks::new(lanes, self.logits, best);
        logprobs::logprobs(self.logits, of_model, self.token, self.count, largest)
    }
}

/// The token of logits that the row's options change.
#[inline(always)]
fn adjusted<L: Lanes>(lanes: L, logits: &[f32], row: &Row, memory: &mut Memory) -> Option<usize> {
    // What is not finite is an error, whatever the options hide.
    blocks::likeliest(lanes, logits)?;
    let mut changed = std::mem::take(&mut memory.changed);
    changed.clear();
    changed.extend_from_slice(logits);
    adjust::adjust(row, &mut changed, &mut memory.counts);
    let token = chosen(lanes, &changed, row, memory);
    memory.changed = changed;
    token
}

#[inline(always)]
fn chosen<L: Lanes>(lanes: L, logits: &[f32], row: &Row, memory: &mut Memory) -> Option<usize> {
    match &row.draw {
        Some(draw) => drawn(lanes, logits, draw, memory),
        None => blocks::likeliest(lanes, logits),
    }
}

#[inline(always)]
fn drawn<L: Lanes>(lanes: L, logits: &[f32], draw: &Draw, memory: &mut Memory) -> Option<usize> {
    let Memory { scaled, best, cuts, runners, .. } = memory;
    scaled.clear();
    scaled.extend(logits.iter().map(|logit| logit / draw.temperature));
    let scaled = Blocks::new(lanes, scaled, best)?;
    let floor = cuts::floor(scaled, draw, cuts);
    let noise = Noise::new(draw.seed, draw.position);
    Some(race::race(scaled, floor, noise, runners))
}
