//! Where requests go on: behind answers, or behind prompts.
//!
//! A chat's next turn begins with the answer as well, unless its template drops a part of it such as the thinking, and a
//! prompt that is asked again begins with itself. So each end may be worth a snapshot of the states, and mostly one of
//! the two is never hit.

use std::hash::{BuildHasher, RandomState};

use crate::hash::Scope;
use crate::store::Marks;
use crate::sync::{AtomicU64, Ordering::Relaxed};

/// How much more often one kind of end has to be used than the other before snapshots of that go first.
const FACTOR: u64 = 8;

/// Uses after which old ones count half.
const MEMORY: u64 = 256;

/// Scopes that are counted apart; salts whose hashes agree share a place, so that the table is bounded.
const PLACES: usize = 64;

thread_local! {
    /// Decides which salts share a place. It is random, so that no client can pick a salt that shares another's, and the
    /// same for all caches that a thread makes, so that these do the same where they get the same calls.
    static KEY: RandomState = RandomState::new();
}

/// What each scope's requests do, so that one client's do not decide about those of another.
#[derive(Debug)]
pub(crate) struct EndsByScope {
    places: [Ends; PLACES],
    key: RandomState,
}

impl Default for EndsByScope {
    fn default() -> Self {
        let places = std::array::from_fn(|_| Ends::default());
        Self { places, key: KEY.with(Clone::clone) }
    }
}

impl EndsByScope {
    /// The place of a scope; of all that have no salt it is the same one.
    pub(crate) fn place(&self, scope: &Scope) -> usize {
        let Some(salt) = &scope.cache_salt else {
            return 0;
        };
        1 + (self.key.hash_one(salt) as usize) % (PLACES - 1)
    }

    /// The counts of a place.
    pub(crate) fn at(&self, place: usize) -> &Ends {
        &self.places[place]
    }
}

/// How often requests went on from either kind of end.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    prompts: AtomicU64,
    answers: AtomicU64,
}

impl Ends {
    /// A request goes on from where content ends that has these marks. A place where prompts part, or where an answer
    /// of a few tokens ended with its prompt, says nothing.
    pub(crate) fn note(&self, marks: Marks) {
        let count = match marks {
            Marks::PROMPT => &self.prompts,
            Marks::ANSWER => &self.answers,
            _ => return,
        };
        // Relaxed, here and below: counts that order nothing. One that is lost changes what is evicted first alone.
        if count.fetch_add(1, Relaxed) >= MEMORY {
            for count in [&self.prompts, &self.answers] {
                count.store(count.load(Relaxed) / 2, Relaxed);
            }
        }
    }

    /// Whether requests go on from answers, so that snapshots at prompts' ends are not worth their memory.
    pub(crate) fn are_answers(&self) -> bool {
        self.answers.load(Relaxed) > FACTOR * (self.prompts.load(Relaxed) + 1)
    }

    /// The same of prompts.
    pub(crate) fn are_prompts(&self) -> bool {
        self.prompts.load(Relaxed) > FACTOR * (self.answers.load(Relaxed) + 1)
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, DefaultHasher};

    use super::*;

    #[test]
    fn the_places_of_salts_are_known_to_nobody() {
        let ends = EndsByScope::default();
        let salts: Vec<String> = (0..1000).map(|number| format!("salt {number}")).collect();
        let place = |salt: &String| {
            ends.place(&Scope { cache_salt: Some(salt.clone()), ..Scope::default() })
        };
        let places: Vec<usize> = salts.iter().map(place).collect();
        assert_eq!(places, salts.iter().map(place).collect::<Vec<_>>());
        assert!(places.iter().all(|&place| (1..PLACES).contains(&place)));
        let of_anybody = BuildHasherDefault::<DefaultHasher>::default();
        let guess = |salt| 1 + (of_anybody.hash_one(salt) as usize) % (PLACES - 1);
        assert_ne!(places, salts.iter().map(guess).collect::<Vec<_>>());
    }
}
