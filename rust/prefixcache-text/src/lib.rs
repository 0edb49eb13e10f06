//! Text at the server's edge: JSON within limits, and stop strings in a stream.
//!
//! Nothing here knows of Python, so that both run while its interpreter does something else.
#![warn(missing_docs)]

pub mod json;
pub mod stops;
