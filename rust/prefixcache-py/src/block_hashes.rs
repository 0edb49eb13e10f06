//! The Python class `BlockHashes`.

use numpy::{IntoPyArray, PyArray1};
use prefixcache_core::hash::{self, Scope};
use prefixcache_core::id::BlockHash;
use prefixcache_core::sequence;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{Number, One};
use crate::detach::run_on_tokens;
use crate::errors::{Result, out_of_range};
use crate::names::{self, Name};
use crate::tokens::Tokens;

/// Hashes of a token sequence's full blocks.
#[pyclass(frozen, module = "prefixcache.core")]
pub struct BlockHashes(pub sequence::BlockHashes);

#[pymethods]
impl BlockHashes {
    /// The hashes of the full blocks of `tokens`, where `block_hash` is `h_0` without a salt.
    #[staticmethod]
    #[pyo3(signature = (tokens, block_hash, block_size, *, cache_salt=None))]
    fn compute(
        py: Python<'_>,
        tokens: Tokens,
        block_hash: One<names::BlockHash, BlockHash>,
        block_size: Number<names::BlockSize>,
        cache_salt: Option<String>,
    ) -> Result<Self> {
        let (tokens, block_size) = (tokens.0, block_size.0);
        hash::check_block_size(block_size)?;
        let scope = Scope { lora: None, cache_salt };
        let hashes = run_on_tokens(py, tokens.len(), || {
            sequence::BlockHashes::new(block_hash.0, block_size, &scope, &tokens)
        });
        Ok(Self(hashes))
    }

    /// What `state` gave in another process.
    #[staticmethod]
    fn from_state(state: &[u8]) -> Result<Self> {
        let hashes = sequence::BlockHashes::from_bytes(state);
        hashes
            .map(Self)
            .ok_or_else(|| out_of_range(names::State::NAME, "is not what BlockHashes.state gave"))
    }

    /// Everything of it as bytes, for another process.
    fn state<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    /// The hashes as KV events name them: the last 8 bytes of each, big endian.
    fn short<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        let hashes = self.0.as_slice().iter();
        let short: Vec<u64> = hashes.map(BlockHash::short).collect();
        short.into_pyarray(py)
    }

    fn __len__(&self) -> usize {
        self.0.as_slice().len()
    }

    /// The 32 bytes of a block's hash.
    fn to_bytes<'py>(
        &self,
        py: Python<'py>,
        index: Number<names::Index>,
    ) -> Result<Bound<'py, PyBytes>> {
        let index = index.0;
        let hash = self.0.as_slice().get(index).ok_or_else(|| {
            let count = self.__len__();
            PyIndexError::new_err(format!("index must be below {count}, not {index}"))
        })?;
        Ok(PyBytes::new(py, hash.as_bytes()))
    }
}
