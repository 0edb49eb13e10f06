//! Where requests go on: behind answers, or behind prompts.
//!
//! A chat's next turn begins with the answer as well, unless its template drops a part of it such as the thinking, and a
//! prompt that is asked again begins with itself. So each end may be worth a snapshot of the states, and mostly one of
//! the two is never hit.

use crate::store::Marks;
use crate::sync::{AtomicU64, Ordering};

use Ordering::Relaxed;

/// How much more often one kind of end has to be used than the other before snapshots of that go first.
const FACTOR: u64 = 8;

/// Uses after which old ones count half.
const MEMORY: u64 = 256;

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
