//! Stop strings in a stream of text: one automaton for all of them.
//!
//! A step of the automaton costs the same for one stop string and for a thousand.

use std::collections::HashMap;

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::noncontiguous::NFA;
use aho_corasick::{Anchored, BuildError};

/// An Aho-Corasick automaton of stop strings, shared by every stream that looks for them.
#[derive(Debug)]
pub struct StopStrings {
    automaton: NFA,
    start: StateID,
    /// Characters of each stop string.
    lengths: Vec<usize>,
    /// Characters of a stop string's beginning that a state stands for.
    depths: HashMap<StateID, usize>,
}

/// A place in a stream, before the first match.
#[derive(Clone, Copy, Debug)]
pub struct Place(StateID);

/// A stop string in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Match {
    /// Where it begins, in characters from the beginning of the text that completed it; negative
    /// when it began in a text before.
    pub start: isize,
    /// Its index among the stop strings.
    pub stop: usize,
}

impl StopStrings {
    /// An automaton of `stops`.
    ///
    /// # Errors
    /// When they are too long for an automaton, which takes gigabytes.
    pub fn new<T: AsRef<str>>(stops: &[T]) -> Result<Self, BuildError> {
        let automaton = NFA::builder()
            .prefilter(false)
            .build(stops.iter().map(|stop| stop.as_ref().as_bytes()))?;
        let start = automaton.start_state(Anchored::No).expect("an NFA searches without an anchor");
        let mut depths = HashMap::from([(start, 0)]);
        for stop in stops {
            let mut state = start;
            for (depth, char) in stop.as_ref().chars().enumerate() {
                state = after(&automaton, state, char);
                depths.insert(state, depth + 1);
            }
        }
        let lengths = stops.iter().map(|stop| stop.as_ref().chars().count()).collect();
        Ok(Self { automaton, start, lengths, depths })
    }

    /// The beginning of a stream.
    #[must_use]
    pub fn begin(&self) -> Place {
        Place(self.start)
    }

    /// Goes on through `text`: the match in it that begins first (of several the one listed first),
    /// if there is one.
    pub fn push(&self, place: &mut Place, text: &str) -> Option<Match> {
        let mut first: Option<Match> = None;
        for (position, char) in text.chars().enumerate() {
            place.0 = after(&self.automaton, place.0, char);
            let found = self.longest_match(place.0, position + 1);
            first = first.into_iter().chain(found).min();
        }
        first
    }

    /// Characters at the end of the text so far that may be the beginning of a stop string.
    #[must_use]
    pub fn num_held(&self, place: Place) -> usize {
        self.depths.get(&place.0).copied().unwrap_or(0)
    }

    /// The match that begins first of those that end at `end`.
    fn longest_match(&self, state: StateID, end: usize) -> Option<Match> {
        if !self.automaton.is_match(state) {
            return None;
        }
        let count = self.automaton.match_len(state);
        let stops = (0..count).map(|index| self.automaton.match_pattern(state, index).as_usize());
        stops
            .map(|stop| Match { start: end.cast_signed() - self.lengths[stop].cast_signed(), stop })
            .min()
    }
}

fn after(automaton: &NFA, state: StateID, char: char) -> StateID {
    let mut bytes = [0; 4];
    let bytes = char.encode_utf8(&mut bytes).bytes();
    bytes.fold(state, |state, byte| automaton.next_state(Anchored::No, state, byte))
}
