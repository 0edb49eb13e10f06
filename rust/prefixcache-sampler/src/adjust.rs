//! What a request changes in its logits before a token is chosen.
//!
//! In vLLM's order: bias, banned tokens, allowed tokens, then the penalties; bad words and the
//! grammar's mask last.

use crate::row::{Penalties, Row};

/// Less than any logit, and finite times the largest penalty over the smallest temperature.
///
/// So a token that ends a bad word is chosen where nothing else may be, rather than none at all.
const BAD_WORD: f32 = -1e25;

/// Changes the logits. `counts` is zero, or empty, before and after.
#[inline(always)]
pub fn adjust(row: &Row, logits: &mut [f32], counts: &mut Vec<u32>) {
    for &(token, value) in &row.bias {
        logits[token] += value;
    }
    for &token in &row.banned {
        logits[token] = f32::NEG_INFINITY;
    }
    if let Some(allowed) = &row.allowed {
        keep_alone(logits, allowed);
    }
    if let Some(penalties) = &row.penalties {
        counts.resize(logits.len(), 0);
        penalize(logits, penalties, counts);
    }
    for &token in &row.bad_words {
        logits[token] += BAD_WORD;
    }
    if let Some(words) = &row.mask {
        mask(logits, words);
    }
}

fn keep_alone(logits: &mut [f32], allowed: &[usize]) {
    let kept: Vec<f32> = allowed.iter().map(|&token| logits[token]).collect();
    logits.fill(f32::NEG_INFINITY);
    for (&token, value) in allowed.iter().zip(kept) {
        logits[token] = value;
    }
}

/// A count is twice the number of times that a token stands in the answer, and one more where it stands
/// in the prompt. Without a repetition penalty the prompt plays no part.
fn penalize(logits: &mut [f32], penalties: &Penalties, counts: &mut [u32]) {
    let repeats = penalties.repetition != 1.0;
    let prompt = if repeats { &penalties.prompt[..] } else { &[] };
    for &token in prompt {
        counts[token as usize] |= 1;
    }
    for &token in &penalties.answer {
        counts[token as usize] += 2;
    }
    for &token in prompt.iter().chain(&penalties.answer) {
        // Each token once: its count is zero from then on.
        let count = std::mem::take(&mut counts[token as usize]);
        if count > 0 {
            let logit = &mut logits[token as usize];
            *logit = penalized(*logit, count / 2, penalties);
        }
    }
}

fn penalized(logit: f32, occurrences: u32, penalties: &Penalties) -> f32 {
    let repetition = penalties.repetition;
    let logit = match logit > 0.0 {
        true => logit / repetition,
        false => logit * repetition,
    };
    if occurrences == 0 {
        return logit;
    }
    logit - (penalties.frequency * occurrences as f32 + penalties.presence)
}

/// Minus infinity where a token's bit is not set.
#[inline(always)]
fn mask(logits: &mut [f32], words: &[i32]) {
    for (logits, &word) in logits.chunks_mut(32).zip(words) {
        for (i, logit) in logits.iter_mut().enumerate() {
            *logit = match (word >> i) & 1 {
                0 => f32::NEG_INFINITY,
                _ => *logit,
            };
        }
    }
}
