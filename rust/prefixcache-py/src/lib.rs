//! The Python module `prefixcache._core`.
#![warn(missing_docs)]

use pyo3::prelude::*;

#[pymodule]
mod _core {}
