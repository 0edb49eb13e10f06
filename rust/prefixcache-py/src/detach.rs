//! Long calls let the interpreter's other threads run meanwhile.

use pyo3::prelude::*;

/// Calls about fewer blocks than this stay attached to the interpreter: they are over sooner than
/// another thread could make use of it.
const DETACH_BLOCKS: usize = 64;

/// Tokens that are as long a call as one block is.
const TOKENS_PER_BLOCK: usize = 16;

/// Numbers of a tensor that are as long a call as one block is.
const NUMBERS_PER_BLOCK: usize = 256;

/// Runs `work`, detached from the interpreter if it is about many tokens.
pub fn run_on_tokens<T: Send>(
    py: Python<'_>,
    num_tokens: usize,
    work: impl FnOnce() -> T + Send,
) -> T {
    run(py, num_tokens / TOKENS_PER_BLOCK, work)
}

/// Runs `work`, detached from the interpreter if it is about many numbers.
pub fn run_on_numbers<T: Send>(py: Python<'_>, count: usize, work: impl FnOnce() -> T + Send) -> T {
    run(py, count / NUMBERS_PER_BLOCK, work)
}

/// Runs `work`, detached from the interpreter if it is about many blocks.
pub fn run<T: Send>(py: Python<'_>, num_blocks: usize, work: impl FnOnce() -> T + Send) -> T {
    if num_blocks < DETACH_BLOCKS { work() } else { py.detach(work) }
}
