//! The Python classes `Sampler` and `SamplerRow`.

use std::ops::RangeInclusive;

use numpy::Ix2;
use prefixcache_cpu::Rows;
use prefixcache_sampler as rows;
use prefixcache_sampler::{Draw, Penalties, Sampled, TokenLogprobs};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{Array, List, Number, Numbers, One, Reading, Real, or, or_empty};
use crate::cpu::Cpu;
use crate::detach::run_on_numbers;
use crate::errors::{Result, ensure};
use crate::names::{self, Name};

/// What a row of logits is sampled with.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct SamplerRow(rows::Row);

/// Chooses next tokens from logits.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct Sampler {
    cpu: Py<Cpu>,
    sampler: rows::Sampler,
}

type Logits<'py> = Array<'py, names::Logits, f32, Ix2>;

/// The rows of an array that is read.
fn rows_of<'a>(array: &'a Reading<'_, names::Logits, f32, Ix2>) -> Result<Rows<'a, f32>> {
    Ok(Rows::new(array.slice()?, array.shape()[1]))
}

fn check<N: Name>(value: f64, range: RangeInclusive<f64>) -> Result<f64> {
    let (least, most) = (range.start(), range.end());
    ensure!(range.contains(&value), N::NAME, "must be from {least} to {most}, not {value}");
    Ok(value)
}

fn integers<N: Name>(array: Option<Array<'_, N, i32>>) -> Result<Option<Vec<i32>>> {
    array.map(|array| Ok(array.read()?.slice()?.to_vec())).transpose()
}

fn paired(tokens: Vec<usize>, values: Vec<f32>) -> Result<Vec<(usize, f32)>> {
    let (count, given) = (tokens.len(), values.len());
    ensure!(count == given, "bias", "must have {count} numbers, one a token");
    Ok(tokens.into_iter().zip(values).collect())
}

#[pymethods]
impl SamplerRow {
    /// Temperature 0 takes the likeliest token.
    #[new]
    #[pyo3(
        signature = (
            temperature, seed, position, *, min_p=None, top_k=None, top_p=None, bias_tokens=None, bias=None,
            banned=None, allowed=None, bad_words=None, repetition=None, presence=None, frequency=None,
            prompt=None, answer=None, mask=None, logprobs=None
        ),
        text_signature = "(temperature, seed, position, *, min_p=0.0, top_k=0, top_p=1.0, bias_tokens=(), bias=(), banned=(), allowed=None, bad_words=(), repetition=1.0, presence=0.0, frequency=0.0, prompt=None, answer=None, mask=None, logprobs=None)"
    )]
    fn new(
        temperature: One<names::Temperature, f64>,
        seed: Number<names::Seed, u64>,
        position: Number<names::Position, u64>,
        min_p: Option<One<names::MinP, f64>>,
        top_k: Option<Number<names::TopK>>,
        top_p: Option<One<names::TopP, f64>>,
        bias_tokens: Option<Numbers<names::BiasTokens>>,
        bias: Option<List<names::Bias, f32>>,
        banned: Option<Numbers<names::Banned>>,
        allowed: Option<Numbers<names::Allowed>>,
        bad_words: Option<Numbers<names::BadWords>>,
        repetition: Option<One<names::Repetition, f64>>,
        presence: Option<Real<names::Presence>>,
        frequency: Option<Real<names::Frequency>>,
        prompt: Option<Array<'_, names::Prompt, i32>>,
        answer: Option<Array<'_, names::Answer, i32>>,
        mask: Option<Array<'_, names::Mask, i32>>,
        logprobs: Option<Number<names::Logprobs>>,
    ) -> Result<Self> {
        let draw = Draw {
            temperature: check::<names::Temperature>(temperature.0, 0.0..=1e6)? as f32,
            min_p: check::<names::MinP>(or(min_p, 0.0), 0.0..=1.0)?,
            top_k: or(top_k, 0),
            top_p: check::<names::TopP>(or(top_p, 1.0), 0.0..=1.0)?,
            seed: seed.0,
            position: position.0,
        };
        let penalties = Penalties {
            repetition: check::<names::Repetition>(or(repetition, 1.0), 1e-6..=1e6)? as f32,
            presence: or(presence, 0.0),
            frequency: or(frequency, 0.0),
            prompt: integers(prompt)?.unwrap_or_default(),
            answer: integers(answer)?.unwrap_or_default(),
        };
        Ok(Self(rows::Row {
            draw: (draw.temperature > 0.0).then_some(draw),
            bias: paired(or_empty(bias_tokens), or_empty(bias))?,
            banned: or_empty(banned),
            allowed: allowed.map(|allowed| allowed.0),
            penalties: penalties.change().then_some(penalties),
            bad_words: or_empty(bad_words),
            mask: integers(mask)?,
            logprobs: logprobs.map(|logprobs| logprobs.0),
        }))
    }
}

type Found<'py> = (usize, f64, usize, Bound<'py, PyTuple>, Bound<'py, PyTuple>);

fn found<'py>(py: Python<'py>, of: TokenLogprobs) -> Result<Found<'py>> {
    let (tokens, logprobs): (Vec<_>, Vec<_>) = of.top.into_iter().unzip();
    let (tokens, logprobs) = (PyTuple::new(py, tokens)?, PyTuple::new(py, logprobs)?);
    Ok((of.token, of.logprob, of.rank, tokens, logprobs))
}

#[pymethods]
impl Sampler {
    #[new]
    fn new(cpu: Py<Cpu>) -> Self {
        let sampler = rows::Sampler::default();
        Self { cpu, sampler }
    }

    /// The likeliest token of each row.
    fn likeliest(&self, py: Python<'_>, logits: Logits<'_>) -> Result<Vec<Option<usize>>> {
        let array = logits.read()?;
        let (logits, cpu) = (rows_of(&array)?, self.cpu.get());
        let work = || self.sampler.likeliest(cpu.form, &cpu.team, logits);
        Ok(run_on_numbers(py, array.slice()?.len(), work)?)
    }

    /// The token of each row, and log probabilities where they are asked for.
    fn sample<'py>(
        &self,
        py: Python<'py>,
        logits: Logits<'_>,
        rows: List<names::SampledRows, Py<SamplerRow>>,
    ) -> Result<Vec<(Option<usize>, Option<Found<'py>>)>> {
        let array = logits.read()?;
        let (logits, cpu) = (rows_of(&array)?, self.cpu.get());
        let rows: Vec<_> = rows.0.iter().map(|row| &row.get().0).collect();
        let work = || self.sampler.sample(cpu.form, &cpu.team, logits, &rows);
        let sampled = run_on_numbers(py, array.slice()?.len(), work)?;
        let output = |Sampled { token, logprobs }| {
            Ok((token, logprobs.map(|of| found(py, of)).transpose()?))
        };
        sampled.into_iter().map(output).collect()
    }

    /// Log probabilities of one token a row, and of the `count` likeliest ones.
    fn logprobs<'py>(
        &self,
        py: Python<'py>,
        logits: Logits<'_>,
        token_ids: Array<'_, names::TokenIds, i32>,
        count: Number<names::Count>,
    ) -> Result<Vec<Found<'py>>> {
        let (array, token_ids) = (logits.read()?, token_ids.read()?);
        let (logits, tokens) = (rows_of(&array)?, token_ids.slice()?);
        let cpu = self.cpu.get();
        let work = || self.sampler.logprobs(cpu.form, &cpu.team, logits, tokens, count.0);
        let logprobs = run_on_numbers(py, array.slice()?.len(), work)?;
        logprobs.into_iter().map(|of| found(py, of)).collect()
    }
}
