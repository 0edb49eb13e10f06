//! Which experts a row goes to, and the rows of each expert.

use prefixcache_cpu::math;
use prefixcache_cpu::memory::{OutOfMemory, filled};
use prefixcache_cpu::{Element, Rows, RowsMut, Team};

use crate::linear::{PackedLinear, RowGroup};

/// Rows that one task routes.
const TASK_ROWS: usize = 16;

/// What logits of experts become before some are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// e^x / (sum of all e^x)
    Softmax,
    /// 1 / (1 + e^-x)
    Sigmoid,
}

/// How experts are chosen and weighed. Letters: N experts, E hidden size.
#[derive(Clone, Copy)]
pub struct Router<'a, E> {
    /// E to N, summed in `f32` and not rounded to E.
    pub linear: &'a PackedLinear<E>,
    /// What its logits become.
    pub scores: Scores,
    /// Of N numbers: added to the scores to choose, not to weigh.
    pub selection_bias: Option<&'a [f32]>,
    /// Experts of a row.
    pub top_k: usize,
    /// Whether the scores of a row's experts are divided by their sum, plus this.
    pub renormalise: Option<f32>,
    /// What the weights are multiplied by in the end.
    pub scale: f32,
    /// Of N numbers: what an expert's weights are multiplied by too.
    pub expert_scales: Option<&'a [f32]>,
}

impl<E> Router<'_, E> {
    /// Writes the numbers of a row's experts and their weights, by falling scores. Of equal ones the
    /// lower number comes first; NaN is above all numbers.
    fn choose(&self, logits: &[f32], chosen: &mut [usize], weights: &mut [f32]) {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let power = |logit: f32| exp(logit - highest);
        let total: f32 = match self.scores {
            Scores::Softmax => logits.iter().copied().map(power).sum(),
            Scores::Sigmoid => 1.0,
        };
        let score = |expert: usize| match self.scores {
            Scores::Softmax => power(logits[expert]) / total,
            Scores::Sigmoid => 1.0 / (1.0 + exp(-logits[expert])),
        };
        match self.selection_bias {
            // Scores grow with their logits.
            None => best(logits.len(), |expert| logits[expert], chosen),
            Some(bias) => best(logits.len(), |expert| score(expert) + bias[expert], chosen),
        }
        for (weight, &expert) in weights.iter_mut().zip(&*chosen) {
            *weight = score(expert);
        }
        let divisor = self.renormalise.map_or(1.0, |more| weights.iter().sum::<f32>() + more);
        for (weight, &expert) in weights.iter_mut().zip(&*chosen) {
            *weight = *weight / divisor * self.scale;
            if let Some(scales) = self.expert_scales {
                *weight *= scales[expert];
            }
        }
    }
}

/// e^x, the same bits with any instructions and C library.
fn exp(x: f32) -> f32 {
    math::exp(f64::from(x).clamp(-700.0, 700.0)) as f32
}

/// The experts of a row, by falling keys.
fn best(experts: usize, key: impl Fn(usize) -> f32, chosen: &mut [usize]) {
    let mut count = 0;
    for expert in 0..experts {
        let own = key(expert);
        let before = |&other: &usize| key(other).total_cmp(&own).is_ge();
        let place = chosen[..count].partition_point(before);
        if place < chosen.len() {
            count = (count + 1).min(chosen.len());
            chosen[place..count].rotate_right(1);
            chosen[place] = expert;
        }
    }
}

/// Where the rows of a step go: gathered by expert, in the order of their tokens.
pub struct Routes {
    top_k: usize,
    /// The token of each gathered row.
    pub tokens: Vec<usize>,
    /// For each expert the end of its gathered rows.
    ends: Vec<usize>,
    /// `[T, top_k]`: the gathered row of each choice.
    places: Vec<usize>,
    /// `[T, top_k]`
    weights: Vec<f32>,
}

/// What became of a row's choices, by falling scores.
pub struct Chosen<'a> {
    /// The gathered rows.
    pub places: &'a [usize],
    /// What they are multiplied by.
    pub weights: &'a [f32],
}

impl Routes {
    /// The routes of rows with these logits.
    ///
    /// # Errors
    /// There is no memory for them.
    ///
    /// # Panics
    /// There are fewer experts than a row has, or the bias or the scales have another length.
    pub fn new<E: Element>(
        router: &Router<'_, E>,
        team: &Team,
        logits: Rows<'_, f32>,
    ) -> Result<Self, OutOfMemory> {
        let (rows, experts) = logits.shape();
        let top_k = router.top_k;
        assert!((1..=experts).contains(&top_k), "experts of a row");
        for numbers in [router.selection_bias, router.expert_scales] {
            let fits = numbers.is_none_or(|numbers| numbers.len() == experts);
            assert!(fits, "length of the bias or the scales");
        }
        let mut chosen = filled(0, rows, top_k)?;
        let mut weights = filled(0.0, rows, top_k)?;
        let (to, weights_to) =
            (RowsMut::new(&mut chosen, top_k), RowsMut::new(&mut weights, top_k));
        team.run_chunks(rows, TASK_ROWS, |rows| {
            for row in rows {
                // SAFETY: a row belongs to one task.
                let (chosen, weights) =
                    unsafe { (to.part(row, 0, top_k), weights_to.part(row, 0, top_k)) };
                router.choose(logits.row(row), chosen, weights);
            }
        });
        let mut routes = Self {
            top_k,
            tokens: filled(0, rows, top_k)?,
            ends: filled(0, 1, experts)?,
            places: chosen,
            weights,
        };
        routes.gather();
        Ok(routes)
    }

    /// Gives the choices, whose experts `places` names, their places.
    fn gather(&mut self) {
        for &expert in &self.places {
            self.ends[expert] += 1;
        }
        // Where the rows of each expert start, which grows to where they end.
        let mut start = 0;
        for end in &mut self.ends {
            start += std::mem::replace(end, start);
        }
        for (choice, expert) in self.places.iter_mut().enumerate() {
            let place = self.ends[*expert];
            self.ends[*expert] += 1;
            self.tokens[place] = choice / self.top_k;
            *expert = place;
        }
    }

    /// The experts that have rows, as groups of a layer with `parts` parts an expert.
    pub fn groups(&self, parts: usize) -> Vec<RowGroup> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let groups = starts.zip(&self.ends).enumerate();
        let groups = groups.map(|(expert, (start, &end))| RowGroup {
            rows: start..end,
            parts: expert * parts..(expert + 1) * parts,
        });
        groups.filter(|group| !group.rows.is_empty()).collect()
    }

    /// Rotates the order of each row's choices: a fault for a test to find.
    #[cfg(test)]
    pub fn rotate(&mut self, count: usize) {
        let count = count % self.top_k;
        self.places.chunks_mut(self.top_k).for_each(|row| row.rotate_left(count));
        self.weights.chunks_mut(self.top_k).for_each(|row| row.rotate_left(count));
    }

    /// What became of row `row`.
    pub fn of_row(&self, row: usize) -> Chosen<'_> {
        let range = row * self.top_k..(row + 1) * self.top_k;
        Chosen { places: &self.places[range.clone()], weights: &self.weights[range] }
    }
}
