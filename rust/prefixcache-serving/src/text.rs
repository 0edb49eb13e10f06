//! Text at the server's edge: JSON within limits, and stop strings in a stream.

pub mod json;
pub mod stops;
