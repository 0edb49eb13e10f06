//! Which of many replicas gets a prompt.
//!
//! [`index`] knows which blocks each replica has cached, as its KV events tell, and counts the leading blocks of a
//! prompt that each one would hit. [`choice`] weighs those hits against the work that waits at each replica.
//! Nothing here knows of Python, of a network, or of how replicas are started.
#![warn(missing_docs)]

pub mod choice;
pub mod index;
pub mod mix;
pub mod replica;
mod sets;
