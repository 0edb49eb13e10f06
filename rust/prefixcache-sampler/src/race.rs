//! Draws a token by an exponential race: the token with the largest p / E wins it.
//!
//! E are standard exponential variables; in law the same as adding Gumbel noise to the logits. Most
//! tokens cannot win, and a bound for a block of them at once shows it.

use crate::blocks::Blocks;
use crate::math::ln;
use crate::noise::Noise;

/// A bound may be rounded below the score that it bounds.
const ROUNDING: f64 = 1e-9;

/// The blocks that may win, and what bounds their members: best logit, less the logarithm of the least
/// noise.
#[derive(Default)]
pub struct Runners {
    blocks: Vec<u32>,
    best: Vec<f32>,
    log_least: Vec<f64>,
}

/// The winner among the tokens whose logits are at least `floor`, the first of equals.
#[inline(always)]
pub fn race(logits: Blocks<'_>, floor: f32, noise: Noise, runners: &mut Runners) -> usize {
    runners.enter(logits.best, floor, noise);
    let leader = runners.leader();
    let mut first = First::default();
    for i in std::iter::once(leader).chain(0..runners.blocks.len()) {
        let log_least = runners.log_least[i];
        if f64::from(runners.best[i]) - log_least < first.score - ROUNDING {
            continue;
        }
        let block = runners.blocks[i] as usize;
        for (member, (token, logit)) in logits.members(block).enumerate() {
            let bound = f64::from(logit) - log_least;
            if logit >= floor && bound >= first.score - ROUNDING {
                first.meet(f64::from(logit) - ln(noise.of(block, member)), token);
            }
        }
    }
    first.token
}

impl Runners {
    #[inline(always)]
    fn enter(&mut self, best: &[f32], floor: f32, noise: Noise) {
        self.blocks.resize(best.len(), 0);
        self.best.resize(best.len(), 0.0);
        let mut count = 0;
        for (block, &logit) in best.iter().enumerate() {
            self.blocks[count] = block as u32;
            self.best[count] = logit;
            count += usize::from(logit >= floor && logit > f32::NEG_INFINITY);
        }
        self.blocks.truncate(count);
        self.best.truncate(count);
        self.log_least.resize(count, 0.0);
        for (log_least, &block) in self.log_least.iter_mut().zip(&self.blocks) {
            *log_least = ln(noise.least_of(block as usize));
        }
    }

    /// The one with the largest bound.
    #[inline(always)]
    fn leader(&self) -> usize {
        let (mut leader, mut most) = (0, f64::NEG_INFINITY);
        for (i, (&best, log_least)) in self.best.iter().zip(&self.log_least).enumerate() {
            let bound = f64::from(best) - log_least;
            if bound > most {
                (leader, most) = (i, bound);
            }
        }
        leader
    }
}

/// The token with the largest score so far.
struct First {
    score: f64,
    token: usize,
}

impl Default for First {
    fn default() -> Self {
        Self { score: f64::NEG_INFINITY, token: usize::MAX }
    }
}

impl First {
    #[inline(always)]
    fn meet(&mut self, score: f64, token: usize) {
        if score > self.score || (score == self.score && token < self.token) {
            *self = Self { score, token };
        }
    }
}
