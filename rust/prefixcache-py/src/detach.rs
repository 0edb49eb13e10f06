//! Long calls let the interpreter's other threads run meanwhile.

use pyo3::prelude::*;

/// Calls about fewer blocks than this stay attached to the interpreter: they are over sooner than
/// another thread could make use of it.
const DETACH_BLOCKS: usize = 64;

/// Runs `work`, detached from the interpreter if it is about many blocks.
pub fn run<T: Send>(py: Python<'_>, num_blocks: usize, work: impl FnOnce() -> T + Send) -> T {
    if num_blocks < DETACH_BLOCKS {
        work()
    } else {
        py.detach(work)
    }
}
