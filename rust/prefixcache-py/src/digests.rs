//! The functions `hash_file_ranges` and `derive_digest`.

use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;

use prefixcache_core::digests::{derive, hash_ranges};
use prefixcache_core::error::Argument;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{List, Number, Value, wrong_type};
use crate::errors::out_of_range;
use crate::names;

/// (start, end) in bytes.
impl Value for Range<u64> {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let pair = value.extract::<(u64, u64)>();
        let (start, end) =
            pair.map_err(|_| wrong_type(argument, "(start, end) in bytes", value))?;
        if start > end {
            return Err(out_of_range(argument, "must not end before its start"));
        }
        Ok(start..end)
    }
}

/// BLAKE3 of each range of bytes of a file, which `threads` threads read.
///
/// Raises OSError when the file cannot be read or ends within a range. Lets other threads run meanwhile.
#[pyfunction]
pub fn hash_file_ranges<'py>(
    py: Python<'py>,
    path: PathBuf,
    ranges: List<names::Ranges, Range<u64>>,
    threads: Number<names::ThreadCount>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let threads = NonZeroUsize::new(threads.0)
        .ok_or_else(|| out_of_range("threads", "must be at least 1, not 0"))?;
    let digests = py.detach(|| hash_ranges(&File::open(path)?, &ranges.0, threads))?;
    Ok(digests.iter().map(|one| PyBytes::new(py, one)).collect())
}

/// BLAKE3 of `data` in key derivation mode, whose `context` says what it is of: 32 bytes.
#[pyfunction]
pub fn derive_digest<'py>(py: Python<'py>, context: &str, data: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &derive(context, data))
}
