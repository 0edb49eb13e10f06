//! Weights in the blocks of GGUF files, multiplied as they are.
//!
//! A number of a block is a small integer, its code or what a table has for it, times a scale, plus or
//! minus a minimum. The product is exact in `f32` and the sum is rounded once, so the number is the same however it is

pub mod blocks;
pub(crate) mod formats;
mod kernels;
mod layout;
pub mod packed;
mod strips;
mod tiles;
