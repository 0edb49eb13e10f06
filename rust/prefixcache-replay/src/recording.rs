//! What a server recorded with `--record-trace`, and the same calls made to the same cache again.
//!
//! `docs/reference/recording.md` specifies the form, [`Header`] and `Line` are its one reader, and [`replay`] makes a
//! recording's calls to a cache of the recorded size and policy: it says whether that counts what the live server
//! counted.

mod events;
mod exact;
mod names;

pub(crate) use events::{Added, Event, Events, Line, hint_of};
pub use events::{Counters, Header};
pub use exact::{Agreement, replay};
pub(crate) use names::parse as parse_names;
pub use names::{Pseudonyms, write as write_name};
