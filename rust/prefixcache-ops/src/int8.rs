//! Linears of quantized weights over activations quantized to eight bits, in integer dot products.
//!
//! What is computed, whatever the processor, the number of rows and the number of threads:
//!
//! - A row of activations is quantized by blocks of 32 numbers (`activations`): a scale in `f32`,
//!   `s = max |x| / 127`, and codes `q = round(x * (127 / max |x|))`, ties to even, from -127 to 127.
//! - A weight is `scale * (code - offset) + minimum`, with what GGUF keeps for its block; a scale or a
//!   minimum that is a product of two numbers in the file is exact in `f32`. In a format with a table
//!   the number that the table has for the code takes the place of `code - offset`.
//! - A block of 32 adds to an output: `acc = fma(p, s, acc)`, where `p` is the exact sum of
//!   `scale * (code - offset) * q` rounded once to `f32`; then, in a format with minimums,
//!   `acc = fma(minimum, round(s * sum of q), acc)`. Minimums of 16 numbers (Q2_K) count together:
//!   `acc = fma(round(m * sum of minimums * q), s, acc)`. Blocks follow each other in their order.
//! - Bias and residual are added to the sum, which is then rounded to the type of the result.
//!
//! Integer sums are exact in any order and every other operation rounds once in every form, so the
//! bits do not depend on the form either. It is the arithmetic of llama.cpp's kernels with the scale
//! of activations kept in `f32`, for few rows and for many: a prompt's keys and values are those that
//! decoding writes.

mod activations;
mod product;
mod tiles;

pub use activations::QuantizedRows;
pub use tiles::Int8Weight;
