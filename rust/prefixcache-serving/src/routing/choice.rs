//! Which replica a prompt is best sent to.
//!
//! All is counted in tokens to compute. The cost of a replica is what it has to do before the prompt's first token:
//! the work that waits there, and the part of the prompt that is not cached there. A missing token costs more than one
//! that waits: it delays all prompts behind this one too, and its block takes the place of another. So the longest
//! prefix wins, unless its replica is behind by some times what the hit saves.
//!
//! Two terms are added. Where nothing waits anywhere, all prompts with a common beginning would go to the replica
//! that computed it first. So a replica that got more work than the others lately pays for the surplus, by its square:
//! next to nothing for a little, so that conversations stay where they are, and soon more than any prompt, so that
//! a prefix in high demand comes to be cached by a second one. And a prompt with a key (`prompt_cache_key`) counts as
//! partly cached at the replica that the key names, whatever is known.

use std::cmp::Ordering;
use std::ops::RangeInclusive;

use thiserror::Error;

use super::replica::ReplicaId;
use crate::mix::mix;

/// A growth of recent work beyond which it is scaled down, far from what a float loses.
const MAX_GROWTH: f64 = 1e60;

/// Windows of work by which one prompt can age what came before, far beyond what still counts.
const MAX_AGE: f64 = 50.0;

/// The surplus of work of which a token costs `balance`, as a share of the mean work of all. Of half of it a token
/// costs half as much, of twice of it twice as much.
const UNIT_SHARE: f64 = 0.1;

/// That surplus in tokens, at least: where little was done at all, a few requests more are no reason to compute
/// a prefix again.
const UNIT_TOKENS: f64 = 4096.0;

/// What counts how much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// What a token that is not cached costs, where one that waits costs 1.
    pub overlap_weight: f64,
    /// Tokens of work that a request is, besides the tokens of its prompt that are computed.
    pub request_tokens: f64,
    /// Tokens of work of a replica after which the work before counts for less by a factor of e.
    pub window_tokens: f64,
    /// What a surplus of recent work over the mean of all costs: that times its square over a tenth of the mean,
    /// or over 4,096 tokens where that is more. 0: only what waits counts.
    pub balance: f64,
    /// The share of what is not cached of a prompt that is taken as cached at its key's replica, from 0 to 1.
    pub affinity: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self {
            overlap_weight: 3.0,
            request_tokens: 64.0,
            window_tokens: 1e6,
            balance: 0.4,
            affinity: 0.5,
        }
    }
}

/// A weight that is out of its range.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{field} must be {range}, not {value}")]
pub struct InvalidWeight {
    /// The field of [`Weights`].
    pub field: &'static str,
    /// What it must be.
    pub range: &'static str,
    /// What it was.
    pub value: f64,
}

impl Weights {
    fn check(&self) -> Result<(), InvalidWeight> {
        let from_0 = |field, value| require(field, value, 0.0..=f64::MAX, "a number from 0");
        from_0("overlap_weight", self.overlap_weight)?;
        from_0("request_tokens", self.request_tokens)?;
        from_0("balance", self.balance)?;
        let above_0 = f64::MIN_POSITIVE..=f64::MAX;
        require("window_tokens", self.window_tokens, above_0, "a number above 0")?;
        require("affinity", self.affinity, 0.0..=1.0, "from 0 to 1")
    }
}

fn require(
    field: &'static str,
    value: f64,
    allowed: RangeInclusive<f64>,
    range: &'static str,
) -> Result<(), InvalidWeight> {
    match allowed.contains(&value) {
        true => Ok(()),
        false => Err(InvalidWeight { field, range, value }),
    }
}

/// What stands for a text in choices: the same in every process.
#[must_use]
pub fn identity(text: &str) -> u64 {
    let fold = |hash, byte: &u8| mix(hash ^ u64::from(*byte));
    text.as_bytes().iter().fold(text.len() as u64, fold)
}

/// A replica as the choice sees it.
#[derive(Clone, Copy)]
struct Seen {
    /// What stands for its name.
    identity: u64,
    /// Its recent work, times the growth at hand.
    work: f64,
}

/// What is asked of a choice; the lists have an item a replica.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Its tokens.
    pub num_tokens: usize,
    /// Tokens of it that hit at each replica.
    pub hit_tokens: &'a [u32],
    /// Tokens that each replica has to compute before it; infinite for a replica that is not to be chosen.
    pub loads: &'a [f64],
    /// What stands for the client's key.
    pub key: Option<u64>,
}

/// The place of a replica in the order; the first is the best.
#[derive(Clone, Copy)]
struct Rank {
    cost: f64,
    work: f64,
    lot: u64,
    replica: usize,
}

impl Rank {
    fn order(&self, other: &Self) -> Ordering {
        let by_cost = self.cost.total_cmp(&other.cost);
        let by_work = || self.work.total_cmp(&other.work);
        by_cost.then_with(by_work).then(self.lot.cmp(&other.lot))
    }
}

/// Chooses replicas, and remembers what they were given. The same calls give the same choices.
pub struct Chooser {
    weights: Weights,
    seed: u64,
    replicas: Vec<Option<Seen>>,
    /// What new work is multiplied by, which grows with all work, so that what came before counts for less.
    growth: f64,
    num_choices: u64,
}

impl Chooser {
    /// A chooser without replicas. The seed decides between replicas that are equal.
    pub fn new(weights: Weights, seed: u64) -> Result<Self, InvalidWeight> {
        weights.check()?;
        Ok(Self { weights, seed, replicas: Vec::new(), growth: 1.0, num_choices: 0 })
    }

    /// Adds a replica under a number, in place of one that had it. It starts with the mean of the others' recent
    /// work, so that it is not sent everything at once.
    pub fn add_replica(&mut self, id: ReplicaId, name: &str) {
        self.remove_replica(id);
        let works = self.replicas.iter().flatten().map(|seen| seen.work);
        let work = mean(works);
        if id.index() >= self.replicas.len() {
            self.replicas.resize(id.index() + 1, None);
        }
        let identity = identity(name);
        self.replicas[id.index()] = Some(Seen { identity, work });
    }

    /// Forgets a replica.
    pub fn remove_replica(&mut self, id: ReplicaId) {
        if let Some(place) = self.replicas.get_mut(id.index()) {
            *place = None;
        }
    }

    /// The best replicas for a prompt, up to `most`, the best first.
    pub fn choose(&mut self, prompt: &Prompt<'_>, most: usize) -> Vec<ReplicaId> {
        let mut ranks = self.ranks(prompt);
        self.num_choices += 1;
        if most < ranks.len() {
            if most > 0 {
                ranks.select_nth_unstable_by(most - 1, Rank::order);
            }
            ranks.truncate(most);
        }
        ranks.sort_unstable_by(Rank::order);
        let id = |rank: &Rank| ReplicaId(rank.replica as u16);
        ranks.iter().map(id).collect()
    }

    fn ranks(&self, prompt: &Prompt<'_>) -> Vec<Rank> {
        let mean = mean(self.candidates(prompt).map(|(_, seen)| seen.work));
        let unit = (mean * UNIT_SHARE).max(UNIT_TOKENS * self.growth);
        let imbalance = |seen: Seen| (seen.work - mean).max(0.0).powi(2) / unit / self.growth;
        let named = prompt.key.and_then(|key| self.named(prompt, key));
        let draw = mix(self.seed ^ self.num_choices);
        let rank = |(replica, seen): (usize, Seen)| Rank {
            cost: self.cost(prompt, replica, imbalance(seen), named == Some(replica)),
            work: seen.work,
            lot: mix(draw ^ replica as u64),
            replica,
        };
        self.candidates(prompt).map(rank).collect()
    }

    /// The replicas that can be chosen.
    fn candidates<'a>(&'a self, prompt: &'a Prompt<'_>) -> impl Iterator<Item = (usize, Seen)> {
        let loads = prompt.loads.iter().zip(prompt.hit_tokens);
        let replicas = self.replicas.iter().zip(loads).enumerate();
        replicas.filter_map(|(replica, (seen, (load, _)))| {
            seen.filter(|_| load.is_finite()).map(|seen| (replica, seen))
        })
    }

    /// The replica that a key names: the same one at every router, and for most keys also after others came or went.
    fn named(&self, prompt: &Prompt<'_>, key: u64) -> Option<usize> {
        let weight = |&(_, seen): &(usize, Seen)| mix(mix(key) ^ seen.identity);
        let best = self.candidates(prompt).max_by_key(weight);
        best.map(|(replica, _)| replica)
    }

    fn cost(&self, prompt: &Prompt<'_>, replica: usize, imbalance: f64, is_named: bool) -> f64 {
        let hit = prompt.num_tokens.min(prompt.hit_tokens[replica] as usize);
        let missing = (prompt.num_tokens - hit) as f64;
        let share = if is_named { self.weights.affinity } else { 0.0 };
        prompt.loads[replica]
            + self.weights.overlap_weight * missing * (1.0 - share)
            + self.weights.balance * imbalance
    }

    /// A replica was given a prompt of which it has to compute `computed_tokens`.
    pub fn note(&mut self, id: ReplicaId, computed_tokens: usize) {
        let tokens = computed_tokens as f64 + self.weights.request_tokens;
        let count = self.replicas.iter().flatten().count();
        let Some(Some(seen)) = self.replicas.get_mut(id.index()) else {
            return;
        };
        seen.work += tokens * self.growth;
        let age = tokens / (self.weights.window_tokens * count as f64);
        self.growth *= age.min(MAX_AGE).exp();
        if self.growth > MAX_GROWTH {
            self.scale_down();
        }
    }

    fn scale_down(&mut self) {
        for seen in self.replicas.iter_mut().flatten() {
            seen.work /= self.growth;
        }
        self.growth = 1.0;
    }

    /// Tokens of work that a replica was given lately; 0 for one that is not there.
    #[must_use]
    pub fn recent_tokens(&self, id: ReplicaId) -> f64 {
        let seen = self.replicas.get(id.index()).copied().flatten();
        seen.map_or(0.0, |seen| seen.work / self.growth)
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (count, sum) = values.fold((0_usize, 0.0), |(count, sum), value| (count + 1, sum + value));
    sum / count.max(1) as f64
}
