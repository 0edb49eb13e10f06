//! The Python class `BlockHashes`.

use prefixcache_core::sequence;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::Number;
use crate::names;

/// Hashes of a token sequence's full blocks.
#[pyclass(frozen, module = "prefixcache.core")]
pub struct BlockHashes(pub sequence::BlockHashes);

#[pymethods]
impl BlockHashes {
    fn __len__(&self) -> usize {
        self.0.as_slice().len()
    }

    /// The 32 bytes of a block's hash.
    fn to_bytes<'py>(
        &self,
        py: Python<'py>,
        index: Number<names::Index>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let index = index.0;
        let hash = self.0.as_slice().get(index).ok_or_else(|| {
            let count = self.__len__();
            PyIndexError::new_err(format!("index must be below {count}, not {index}"))
        })?;
        Ok(PyBytes::new(py, hash.as_bytes()))
    }
}
