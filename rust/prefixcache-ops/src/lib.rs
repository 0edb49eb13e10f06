//! The layers of a language model, row by row, on the CPU.
//!
//! Each row of a result is a function of that row of the input alone, bit for bit: not of how many
//! rows are computed with it, nor of the number of threads.

mod bytes;
mod dense;
pub mod experts;
pub mod int8;
pub mod linear;
mod panel;
mod part;
pub mod quant;
pub mod rowwise;

pub use linear::{BlocksError, PackedLinear};
pub use part::Activations;
pub use quant::blocks::Format;
