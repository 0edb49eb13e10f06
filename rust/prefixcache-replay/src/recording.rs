//! What a server recorded with `--record-trace`, and the same calls made to the same cache again.
//!
//! `docs/recording.md` specifies the form. [`Namer`] names the blocks of a recording that is being written,
//! [`Events`] reads one, part by part, and [`replay`] makes its calls to a cache of the recorded size and policy:
//! it says whether that counts what the live server counted.

mod events;
mod exact;
mod names;

pub use events::{Counters, Event, Events, Header, Line, Place, Policy, RecordingError};
pub use exact::{Agreement, replay};
pub use names::{Chain, Namer};
