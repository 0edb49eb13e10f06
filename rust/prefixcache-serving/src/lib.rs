//! What a server does around its cache: it guesses next tokens ([`drafts`]), chooses replicas ([`routing`]), and reads
//! JSON and stop strings ([`text`]).
//!
//! Nothing here knows of Python, of a network, or of the cache. Each module stands alone.
#![warn(missing_docs)]

pub mod drafts;
pub mod mix;
pub mod routing;
pub mod text;
