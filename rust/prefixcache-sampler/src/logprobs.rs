//! Log probabilities as they are reported: of the model's own logits, before any adjustment.

use crate::blocks::Blocks;
use crate::cuts::mass_of_all;
use crate::math::{UNITS, ln};

/// Log probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token that was taken.
    pub token: usize,
    /// The logarithm of its probability.
    pub logprob: f64,
    /// One more than the number of tokens with a larger logit.
    pub rank: usize,
    /// The likeliest tokens, of equals those with smaller ids first, and their log probabilities.
    pub top: Vec<(usize, f64)>,
}

/// Of a token, and the `count` likeliest ones. `logits` is None for logits that are not finite: NaN then.
#[inline(always)]
pub fn logprobs(
    values: &[f32],
    logits: Option<Blocks<'_>>,
    token: usize,
    count: usize,
    spare: &mut Vec<f32>,
) -> TokenLogprobs {
    let taken = values[token];
    let rank = 1 + values.iter().filter(|&&value| value > taken).count();
    let Some(logits) = logits else {
        return TokenLogprobs { token, logprob: f64::NAN, rank, top: Vec::new() };
    };
    let most = f64::from(logits.most);
    let log_sum = ln(mass_of_all(values, logits.most) as f64 / UNITS);
    let logprob = |value: f32| f64::from(value) - most - log_sum;
    let top = likeliest(logits, count.min(values.len()), spare);
    TokenLogprobs {
        token,
        logprob: logprob(taken),
        rank,
        top: top.map(|(token, value)| (token, logprob(value))).collect(),
    }
}

fn likeliest(
    logits: Blocks<'_>,
    count: usize,
    spare: &mut Vec<f32>,
) -> impl Iterator<Item = (usize, f32)> {
    let reached = match count {
        0 => f32::INFINITY,
        _ => logits.reached_by(count, spare),
    };
    let mut found: Vec<_> = logits.tokens_from(reached).collect();
    found.sort_unstable_by(|a, b| b.1.partial_cmp(&a.1).expect("no NaN").then(a.0.cmp(&b.0)));
    found.into_iter().take(count)
}
