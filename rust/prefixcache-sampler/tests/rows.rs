//! Rows against an oracle in slow, obvious code, and against themselves in batches.

use std::collections::BTreeMap;

use prefixcache_cpu::{Form, Rows, Team};
use prefixcache_sampler::{Draw, Penalties, Row, RowError, Sampled, Sampler};
use proptest::prelude::*;

/// The oracle: the noise of all tokens is computed, and all are sorted.
mod plain {
    use super::*;

    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

    fn mix(x: u64) -> u64 {
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn bits(key: u64, counter: u64) -> u64 {
        mix(key.wrapping_add((counter + 1).wrapping_mul(GOLDEN)))
    }

    fn exponential(bits: u64) -> f64 {
        let uniform = ((bits >> 11) as f64 + 0.5) / 2.0_f64.powi(53);
        (-uniform.ln()).max(2.0_f64.powi(-54))
    }

    fn noise(draw: &Draw, token: u64) -> f64 {
        let steps = draw.position.wrapping_mul(GOLDEN);
        let block_key = mix(mix(draw.seed).wrapping_add(steps));
        let block = token / 1024 * 64 + token % 64;
        let block_bits = bits(block_key, block);
        let least = exponential(block_bits) / 16.0;
        match block_bits % 16 == token % 1024 / 64 {
            true => least,
            false => {
                let token_key = mix(block_key ^ 0xbf58_476d_1ce4_e5b9);
                least + exponential(bits(token_key, token))
            }
        }
    }

    pub fn adjusted(row: &Row, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        let bias = row.bias.iter();
        bias.for_each(|&(token, value)| logits[token] += value);
        for token in 0..logits.len() {
            let leaves = |allowed: &Vec<usize>| allowed.contains(&token);
            if row.banned.contains(&token) || !row.allowed.as_ref().is_none_or(leaves) {
                logits[token] = f32::NEG_INFINITY;
            }
            if let Some(penalties) = &row.penalties {
                logits[token] = penalized(logits[token], token as i32, penalties);
            }
            for _ in row.bad_words.iter().filter(|&&bad| bad == token) {
                logits[token] -= 1e25;
            }
            let bit = |words: &Vec<i32>| (words[token / 32] >> (token % 32)) & 1 == 1;
            if !row.mask.as_ref().is_none_or(bit) {
                logits[token] = f32::NEG_INFINITY;
            }
        }
        logits
    }

    fn penalized(logit: f32, token: i32, penalties: &Penalties) -> f32 {
        let count = |tokens: &[i32]| tokens.iter().filter(|&&one| one == token).count();
        let (prompt, answer) = (count(&penalties.prompt), count(&penalties.answer));
        let logit = match (prompt + answer, logit > 0.0) {
            (0, _) => return logit,
            (_, true) => logit / penalties.repetition,
            (_, false) => logit * penalties.repetition,
        };
        match answer {
            0 => logit,
            _ => logit - (penalties.frequency * answer as f32 + penalties.presence),
        }
    }

    /// The scores of all tokens that may be drawn, the best first.
    pub fn scores(draw: &Draw, logits: &[f32]) -> Vec<(f64, usize)> {
        let scaled: Vec<f32> = logits.iter().map(|x| x / draw.temperature).collect();
        let mut sorted = scaled.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let most = sorted[0];
        let mut floor = most + draw.min_p.ln() as f32;
        if 0 < draw.top_k && draw.top_k < sorted.len() {
            floor = floor.max(sorted[draw.top_k - 1]);
        }
        sorted.retain(|&x| x >= floor);
        if draw.top_p < 1.0 {
            let mass = |x: f32| f64::from(x - most).exp();
            let all: f64 = sorted.iter().map(|&x| mass(x)).sum();
            let mut reached = 0.0;
            let inside = sorted.iter().position(|&x| {
                reached += mass(x);
                reached >= draw.top_p * all
            });
            floor = sorted[inside.unwrap_or(sorted.len() - 1)];
        }
        let kept = scaled.iter().enumerate().filter(|&(_, &x)| x >= floor);
        let score =
            |(token, &x): (usize, &f32)| (f64::from(x) - noise(draw, token as u64).ln(), token);
        let mut scores: Vec<_> = kept.map(score).collect();
        scores.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        scores
    }
}

/// The token that the oracle chooses, or any of those whose scores are as good as its.
fn check_token(row: &Row, logits: &[f32], sampled: &Sampled) -> Result<(), TestCaseError> {
    let adjusted = plain::adjusted(row, logits);
    let most = adjusted.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !most.is_finite() {
        prop_assert_eq!(sampled.token, None);
        return Ok(());
    }
    let token = sampled.token.expect("a token");
    match &row.draw {
        None => prop_assert_eq!(Some(token), adjusted.iter().position(|&x| x == most)),
        Some(draw) => {
            let scores = plain::scores(draw, &adjusted);
            let (best, _) = scores[0];
            let near = |score: f64| score == best || (best - score) < 1e-12 * best.abs();
            let found = scores.iter().find(|(_, one)| *one == token);
            prop_assert!(found.is_some_and(|&(score, _)| near(score)), "{token}");
        }
    }
    Ok(())
}

fn check_logprobs(row: &Row, logits: &[f32], sampled: &Sampled) -> Result<(), TestCaseError> {
    let (Some(count), Some(token)) = (row.logprobs, sampled.token) else {
        prop_assert_eq!(&sampled.logprobs, &None);
        return Ok(());
    };
    let found = sampled.logprobs.as_ref().expect("log probabilities");
    let wide: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    let most = wide.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = wide.iter().map(|x| (x - most).exp()).sum();
    let logprob = |token: usize| wide[token] - most - sum.ln();
    let near = |a: f64, b: f64| a == b || (a - b).abs() < 1e-7;
    prop_assert_eq!(found.token, token);
    prop_assert!(near(found.logprob, logprob(token)));
    prop_assert_eq!(found.rank, 1 + wide.iter().filter(|&&x| x > wide[token]).count());
    let mut order: Vec<_> = (0..wide.len()).collect();
    order.sort_by(|&a, &b| wide[b].partial_cmp(&wide[a]).expect("no NaN").then(a.cmp(&b)));
    order.truncate(count);
    let tokens: Vec<_> = found.top.iter().map(|&(token, _)| token).collect();
    prop_assert_eq!(tokens, order);
    let top = found.top.iter();
    prop_assert!(top.clone().all(|&(token, found)| near(found, logprob(token))));
    Ok(())
}

fn sample(form: Form, threads: usize, logits: &[f32], rows: &[Row]) -> Vec<Sampled> {
    let team = Team::new(threads).expect("threads");
    let logits = Rows::new(logits, logits.len() / rows.len());
    let rows: Vec<_> = rows.iter().collect();
    let sampled = Sampler::default().sample(form, &team, logits, &rows);
    sampled.expect("rows that fit")
}

/// Numbers of 64 bits for logits; a few of them so that there are ties.
fn logits(count: usize, spread: f32, distinct: u64, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((state >> 33) % distinct) as f32 / distinct as f32
    };
    // A sum of three is more often in the middle.
    (0..count).map(|_| (next() + next() + next() - 1.5) * spread).collect()
}

fn draws() -> impl Strategy<Value = Option<Draw>> {
    let draw = (
        prop::sample::select(vec![1e-5, 0.3, 1.0, 1.7, 100.0]),
        prop::sample::select(vec![0.0, 1e-9, 0.02, 0.5, 1.0]),
        prop::sample::select(vec![0, 1, 3, 40, 200, 5000]),
        prop::sample::select(vec![1.0, 1.0 - 1e-9, 0.95, 0.5, 1e-9]),
        any::<u64>(),
        0..1_000_000_u64,
    );
    let draw = draw.prop_map(|(temperature, min_p, top_k, top_p, seed, position)| Draw {
        temperature,
        min_p,
        top_k,
        top_p,
        seed,
        position,
    });
    prop::option::weighted(0.8, draw)
}

fn penalties(vocab: usize) -> impl Strategy<Value = Option<Penalties>> {
    let tokens = || prop::collection::vec(0..vocab as i32, 0..20);
    let penalties = (
        prop::sample::select(vec![1.0, 1.3, 0.6]),
        prop::sample::select(vec![0.0, 0.5, -2.0]),
        prop::sample::select(vec![0.0, 0.7, -1.0]),
        tokens(),
        tokens(),
    );
    let penalties = penalties.prop_map(|(repetition, presence, frequency, prompt, answer)| {
        Penalties { repetition, presence, frequency, prompt, answer }
    });
    prop::option::weighted(0.3, penalties)
}

fn rows(vocab: usize) -> impl Strategy<Value = Row> {
    let tokens = move |most| prop::collection::vec(0..vocab, 0..most);
    let bias = prop::collection::btree_map(0..vocab, -20.0_f32..20.0, 0..4);
    let mask = prop::collection::vec(any::<i32>(), vocab.div_ceil(32));
    (
        draws(),
        bias,
        tokens(4),
        prop::option::weighted(0.2, prop::collection::vec(0..vocab, 1..9)),
        penalties(vocab),
        tokens(3),
        prop::option::weighted(0.2, mask),
        prop::option::weighted(0.4, 0..21_usize),
    )
        .prop_map(|(draw, bias, banned, allowed, penalties, bad_words, mask, logprobs)| Row {
            draw,
            bias: BTreeMap::into_iter(bias).collect(),
            banned,
            allowed,
            penalties,
            bad_words,
            mask,
            logprobs,
        })
}

/// A batch of rows, and their logits.
fn batches() -> impl Strategy<Value = (Vec<Row>, Vec<f32>)> {
    let vocabularies = vec![1, 2, 40, 63, 64, 1023, 1024, 1025, 2500, 5003];
    let spreads = prop::sample::select(vec![0.0, 0.01, 4.0, 30.0, 1e30]);
    let distinct = prop::sample::select(vec![3, 1000, 1 << 31]);
    let of_vocabulary =
        |vocab| prop::collection::vec(rows(vocab), 1..5).prop_map(move |r| (vocab, r));
    let rows = prop::sample::select(vocabularies).prop_flat_map(of_vocabulary);
    (rows, spreads, distinct, any::<u64>()).prop_map(|((vocab, rows), spread, distinct, seed)| {
        let logits = logits(vocab * rows.len(), spread, distinct, seed);
        (rows, logits)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn rows_are_what_the_oracle_says((rows, logits) in batches()) {
        let vocab = logits.len() / rows.len();
        let sampled = sample(Form::detect(), 1, &logits, &rows);
        for ((row, logits), sampled) in rows.iter().zip(logits.chunks(vocab)).zip(&sampled) {
            check_token(row, logits, sampled)?;
            check_logprobs(row, logits, sampled)?;
        }
    }

    #[test]
    fn rows_are_the_same_bits_alone_and_in_every_form((rows, logits) in batches()) {
        let vocab = logits.len() / rows.len();
        let together = sample(Form::detect(), 2, &logits, &rows);
        for form in Form::available() {
            prop_assert_eq!(&sample(form, 1, &logits, &rows), &together);
            for (i, row) in rows.iter().enumerate() {
                let logits = &logits[i * vocab..(i + 1) * vocab];
                let alone = sample(form, 1, logits, std::slice::from_ref(row));
                prop_assert_eq!(&alone[0], &together[i]);
            }
        }
    }
}

fn drawn(temperature: f32) -> Row {
    Row {
        draw: Some(Draw { temperature, min_p: 0.0, top_k: 0, top_p: 1.0, seed: 1, position: 2 }),
        ..Row::default()
    }
}

#[test]
fn what_is_not_finite_fails_alone() {
    let rows = [Row::default(), drawn(1.0), banning(vec![3])];
    for bad in [f32::NAN, f32::INFINITY] {
        for vocab in [5, 1024, 1500] {
            for row in &rows {
                let mut logits = logits(3 * vocab, 4.0, 1000, 7);
                let rows = vec![row.clone(); 3];
                let good = sample(Form::detect(), 1, &logits, &rows);
                logits[vocab + vocab / 2] = bad;
                let found = sample(Form::detect(), 1, &logits, &rows);
                assert_eq!(found[1].token, None);
                assert_eq!((&found[0], &found[2]), (&good[0], &good[2]));
            }
        }
    }
}

#[test]
fn a_mask_hides_no_nan() {
    let mut logits = logits(40, 4.0, 1000, 7);
    logits[3] = f32::NAN;
    for row in [banning(vec![3]), Row { draw: drawn(1.0).draw, ..banning(vec![3]) }] {
        assert_eq!(sample(Form::detect(), 1, &logits, &[row])[0].token, None);
    }
}

#[test]
fn nothing_to_choose_is_no_token() {
    let all = vec![f32::NEG_INFINITY; 70];
    for row in [Row::default(), drawn(1.0), drawn(1e-5)] {
        assert_eq!(sample(Form::detect(), 1, &all, &[row])[0].token, None);
    }
    let row = banning((0..40).collect());
    assert_eq!(sample(Form::detect(), 1, &[1.0; 40], &[row])[0].token, None);
}

fn banning(banned: Vec<usize>) -> Row {
    Row { banned, ..Row::default() }
}

#[test]
fn the_first_of_equal_scores_wins() {
    // The noise is lost where it is added to such logits.
    for start in [0, 70, 1100] {
        let mut logits = vec![-3e38; 5000];
        logits[start..].fill(3e38);
        let sampled = sample(Form::detect(), 1, &logits, &[drawn(1.0)]);
        assert_eq!(sampled[0].token, Some(start));
    }
}

#[test]
fn likeliest_is_what_greedy_rows_take() {
    let rows = vec![Row::default(); 30];
    for distinct in [3, 1 << 31] {
        let logits = logits(30 * 3001, 4.0, distinct, 5);
        let sampled = sample(Form::detect(), 1, &logits, &rows);
        for threads in [1, 2] {
            let team = Team::new(threads).expect("threads");
            let logits = Rows::new(&logits, 3001);
            let found = Sampler::default().likeliest(Form::detect(), &team, logits);
            let tokens: Vec<_> = sampled.iter().map(|row| row.token).collect();
            assert_eq!(found, Ok(tokens));
        }
    }
}

#[test]
fn logprobs_of_a_prompt_are_those_of_a_sampled_token() {
    let logits = logits(4 * 1500, 4.0, 1000, 9);
    let row = Row { logprobs: Some(7), ..drawn(1.0) };
    let sampled = sample(Form::detect(), 1, &logits, &vec![row; 4]);
    let tokens: Vec<_> = sampled.iter().map(|row| row.token.expect("a token") as i32).collect();
    let team = Team::new(2).expect("threads");
    let found =
        Sampler::default().logprobs(Form::detect(), &team, Rows::new(&logits, 1500), &tokens, 7);
    let sampled: Vec<_> = sampled.into_iter().filter_map(|row| row.logprobs).collect();
    assert_eq!(found, Ok(sampled));
}

#[test]
fn logprobs_of_what_is_not_finite_are_nan() {
    let logits = [1.0, f32::NAN, 2.0];
    let team = Team::new(1).expect("a thread");
    let found = Sampler::default().logprobs(Form::detect(), &team, Rows::new(&logits, 3), &[0], 2);
    let found = &found.expect("a row that fits")[0];
    assert!(found.logprob.is_nan() && found.top.is_empty());
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let token = |field, token| RowError::Token { row: 0, field, token, vocab_size: 40 };
    fn penalized(row: &mut Row, prompt: Vec<i32>, answer: Vec<i32>) {
        row.penalties =
            Some(Penalties { repetition: 1.5, presence: 0.0, frequency: 0.0, prompt, answer });
    }
    type Change = fn(&mut Row);
    let wide = (1 << 19) + 1;
    let (row, vocab_size) = (0, 40);
    let cases: [(usize, Change, RowError); 9] = [
        (0, |_| {}, RowError::Vocabulary(0)),
        (wide, |_| {}, RowError::Vocabulary(wide)),
        (40, |row| row.banned = vec![0, 40], token("banned", 40)),
        (40, |row| row.bad_words = vec![41], token("bad_words", 41)),
        (40, |row| row.allowed = Some(vec![7, 99]), token("allowed", 99)),
        (40, |row| row.bias = vec![(77, 1.0)], token("bias", 77)),
        (40, |row| row.mask = Some(vec![-1]), RowError::Mask { row, vocab_size }),
        (40, |row| penalized(row, vec![39, -1], vec![0]), token("prompt", -1)),
        (40, |row| penalized(row, vec![39], vec![40, 1]), token("answer", 40)),
    ];
    let team = Team::new(1).expect("a thread");
    for (width, change, error) in cases {
        let mut row = Row::default();
        change(&mut row);
        let logits = vec![0.0; width];
        let logits = Rows::new(&logits, width);
        let refused = Sampler::default().sample(Form::detect(), &team, logits, &[&row]);
        assert_eq!(refused, Err(error));
    }
}

#[test]
fn the_largest_vocabulary_does_not_overflow_its_masses() {
    let logits = vec![1.0; 1 << 19];
    let row = Row {
        draw: drawn(1.0).draw.map(|draw| Draw { top_p: 0.5, ..draw }),
        logprobs: Some(1),
        ..Row::default()
    };
    let sampled = &sample(Form::detect(), 1, &logits, &[row])[0];
    let logprobs = sampled.logprobs.as_ref().expect("log probabilities");
    assert!((logprobs.logprob + 19.0 * std::f64::consts::LN_2).abs() < 1e-12);
    assert_eq!((logprobs.rank, logprobs.top[0].0), (1, 0));
}
