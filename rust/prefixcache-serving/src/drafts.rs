//! Guesses the next tokens of a request, so that a model can verify several in one step.
//!
//! An [`Index`] holds the recent text of all requests as token ids in pages of [`PAGE`] tokens (`ring`). A request
//! is a [`Stream`]: its prompt, then each token that was accepted. A draft is what followed the longest text that
//! ends as the request does now, in the request itself or in another of its scope. Where such text ends is found by
//! hashes of the last 2 and the last 32 tokens (`grams`), and every find is compared token by token.
//!
//! Memory is fixed at the start: 4 bytes a token for the text, 12 for the hashes, 1 for the page. Text is evicted by
//! the page, the least recently used first. Each call does bounded work for each token whatever the text is.
//! One thread calls an index: the one that schedules steps. So nothing here waits.

mod grams;
mod index;
mod ring;

pub use index::{
    Draft, Index, MAX_DRAFT, MAX_MATCH, MAX_TOKENS, MIN_MATCH, SizeError, Source, Stream,
};
pub use ring::PAGE;
