//! Which of many replicas gets a prompt.
//!
//! [`index`] knows which blocks each replica has cached, as its KV events tell, and counts the leading blocks of a
//! prompt that each one would hit. [`choice`] weighs those hits against the work that waits at each replica.
//! Threads that share one of them use it in turn ([`in_turn`]).

pub mod choice;
pub mod in_turn;
pub mod index;
pub mod replica;
mod sets;
