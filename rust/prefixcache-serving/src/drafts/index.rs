//! Streams, and what is drafted for them.

use std::collections::TryReserveError;

use thiserror::Error;

use super::grams::{Grams, ORDERS, PLACE_BITS, Rolling, Scope};
use super::ring::{PAGE, PageRef, Place, Ring};

/// The fewest tokens that must have been said before, one after the other.
pub const MIN_MATCH: usize = ORDERS[0];

/// Tokens that two texts are compared by; a longer match counts as this one.
pub const MAX_MATCH: usize = 256;

/// The most tokens of a draft.
pub const MAX_DRAFT: usize = 64;

/// The most tokens of an index.
pub const MAX_TOKENS: usize = 1 << PLACE_BITS;

/// Why there is no index.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum SizeError {
    /// There is room for less than a page, or for more than an entry of the tables can name.
    #[error("must be from {PAGE} to {MAX_TOKENS}, not {0}")]
    Tokens(usize),
    /// There is not enough memory.
    #[error("no memory for an index of {0} tokens")]
    Memory(usize),
}

/// Whose text a draft is from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The stream's own.
    #[default]
    Prompt,
    /// Another's of the same scope. So is text of its own that another stream began with since.
    Cache,
}

/// A guess.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Draft {
    /// The next tokens; none where nothing can be guessed.
    pub tokens: Vec<u32>,
    /// How many tokens before them were the same: from [`MIN_MATCH`] to [`MAX_MATCH`], 0 without a guess.
    pub matched: usize,
    /// Where they are from.
    pub source: Source,
}

/// The text of one request.
pub struct Stream {
    scope: Scope,
    serial: u64,
    shares: bool,
    tail: Option<PageRef>,
    text: Rolling,
}

/// The recent text of all requests.
pub struct Index {
    ring: Ring,
    grams: Grams,
    streams: u64,
}

impl Index {
    /// An index of up to `max_tokens` tokens, rounded down to whole pages.
    ///
    /// # Errors
    /// [`SizeError`] if it is less than [`PAGE`] or more than [`MAX_TOKENS`], or there is no memory for it.
    pub fn new(max_tokens: usize) -> Result<Self, SizeError> {
        Self::with_secret(max_tokens, Grams::secret())
    }

    /// [`Index::new`] whose hashes are the same in each run: for tests.
    ///
    /// # Errors
    /// As [`Index::new`].
    pub fn with_secret(max_tokens: usize, secret: u64) -> Result<Self, SizeError> {
        if !(PAGE..=MAX_TOKENS).contains(&max_tokens) {
            return Err(SizeError::Tokens(max_tokens));
        }
        let no_memory = |_: TryReserveError| SizeError::Memory(max_tokens);
        Ok(Self {
            ring: Ring::new(max_tokens / PAGE).map_err(no_memory)?,
            grams: Grams::new(max_tokens, secret).map_err(no_memory)?,
            streams: 0,
        })
    }

    /// Tokens that are held.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.ring.num_tokens()
    }

    /// Bytes of memory: the same however many tokens are held.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.ring.num_bytes() + self.grams.num_bytes()
    }

    /// A request without text. One that does not share reads its own text alone, and nobody else reads it.
    pub fn stream(&mut self, scope: &[u8], shares: bool) -> Stream {
        self.streams += 1;
        let own = (!shares).then_some(self.streams);
        Stream {
            scope: self.grams.scope(scope, own),
            serial: self.streams,
            shares,
            tail: None,
            text: Rolling::new(),
        }
    }

    /// Adds tokens to the end of a stream's text. Evicts what was used least recently.
    pub fn append(&mut self, stream: &mut Stream, mut tokens: &[u32]) {
        while let Some((&token, rest)) = tokens.split_first() {
            if let Some((page, rest)) = tokens.split_at_checked(PAGE)
                && self.ring.is_at_start(stream.tail)
                && self.reuse(stream, page)
            {
                tokens = rest;
                continue;
            }
            self.grams.roll(&mut stream.text, token);
            let (scope, serial) = (stream.scope, stream.serial);
            let place = self.ring.push(&mut stream.tail, token, scope, serial);
            self.grams.put(&stream.text, scope, place);
            tokens = rest;
        }
    }

    /// Takes the page that holds these tokens after the stream's text, if there is one: texts that begin alike are
    /// held once.
    fn reuse(&mut self, stream: &mut Stream, page: &[u32]) -> bool {
        let mut text = stream.text.clone();
        for &token in page {
            self.grams.roll(&mut text, token);
        }
        let (ring, scope) = (&self.ring, stream.scope);
        let is_same = |place: &Place| ring.is_same(*place, scope, stream.tail, page);
        let found = self.grams.places(&text, scope, ORDERS.len() - 1).find(is_same);
        if let Some(place) = found {
            stream.tail = Some(self.ring.take(place, stream.serial));
            stream.text = text;
        }
        found.is_some()
    }

    /// What may come next in a stream: up to `max_tokens` tokens, and no more than [`MAX_DRAFT`].
    ///
    /// They follow the longest match that is found by the last 32 tokens, else by the last 2; of several, the latest. A
    /// vote among these guesses recorded chats and edits no better.
    pub fn draft(&mut self, stream: &Stream, max_tokens: usize) -> Draft {
        let Some(end) = self.ring.end(stream.tail) else {
            return Draft::default();
        };
        let Some((place, matched)) = self.longest(stream, end) else {
            return Draft::default();
        };
        let source = match self.ring.user(place) == stream.serial {
            true => Source::Prompt,
            false => Source::Cache,
        };
        self.ring.touch(place);
        Draft { tokens: self.follow(place, end, max_tokens.min(MAX_DRAFT)), matched, source }
    }

    fn longest(&self, stream: &Stream, end: Place) -> Option<(Place, usize)> {
        let mut best = None;
        for order in (0..ORDERS.len()).rev() {
            for place in self.grams.places(&stream.text, stream.scope, order) {
                let least = best.map_or(ORDERS[order], |(_, matched)| matched + 1);
                if self.ring.is_readable(place, stream.scope) && self.ring.after(place).is_some() {
                    let matched = self.matched(place, end);
                    if matched >= least {
                        best = Some((place, matched));
                    }
                }
            }
            if best.is_some() {
                break;
            }
        }
        best
    }

    /// How many tokens up to these two places are the same.
    fn matched(&self, one: Place, other: Place) -> usize {
        let (mut places, mut matched) = (Some((one, other)), 0);
        while let Some((one, other)) = places
            && matched < MAX_MATCH
            && self.ring.token(one) == self.ring.token(other)
        {
            matched += 1;
            places = self.ring.before(one).zip(self.ring.before(other));
        }
        matched
    }

    /// The tokens after a place. At the end of the stream's own text they go on with themselves: a text that repeats
    /// its last tokens goes on to do so.
    fn follow(&self, mut place: Place, end: Place, max_tokens: usize) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(max_tokens);
        while tokens.len() < max_tokens
            && let Some(next) = self.ring.after(place)
        {
            tokens.push(self.ring.token(next));
            place = next;
        }
        for i in 0..max_tokens - tokens.len() {
            if place == end && !tokens.is_empty() {
                tokens.push(tokens[i]);
            }
        }
        tokens
    }

    /// Ends a stream. What it shares stays until it is evicted; text that nobody else may read is given back.
    pub fn close(&mut self, stream: Stream) {
        if !stream.shares {
            self.ring.free(stream.tail);
        }
    }
}
