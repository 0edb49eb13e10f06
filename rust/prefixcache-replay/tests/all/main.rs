//! The tests of what the crate offers, as one program, which is linked once.

mod common;
mod conversations;
mod fleet;
mod oracles;
mod recording;
mod server;
mod trace;
