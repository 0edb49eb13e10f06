//! The Python class `BlockPseudonyms` and the function `replay_recording`.

use std::path::PathBuf;

use prefixcache_core::EvictionPolicy;
use prefixcache_core::policy::NameBlocks;
use prefixcache_replay::recording::{Pseudonyms, replay, write_name};
use prefixcache_replay::trace::TraceError;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict};

use crate::arguments::{Number, One, Word};
use crate::detach::run_on_tokens;
use crate::dicts::set_fields;
use crate::errors::{Failure, Result};
use crate::names;
use crate::tokens::Tokens;

/// Pseudonyms for the blocks of requests in one recording: hashes under a key. Any thread.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct BlockPseudonyms(Pseudonyms);

#[pymethods]
impl BlockPseudonyms {
    /// Pseudonyms under a `key` of 32 bytes, for blocks of `block_size` tokens.
    #[new]
    fn new(key: One<names::Key, [u8; 32]>, block_size: Number<names::BlockSize>) -> Result<Self> {
        Ok(Self(Pseudonyms::new(key.0, block_size.0)?))
    }

    /// Tokens in a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size()
    }

    /// The chain before the first block of requests with this cache salt: 32 bytes.
    #[pyo3(signature = (cache_salt=None))]
    fn begin<'py>(&self, py: Python<'py>, cache_salt: Option<&str>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.begin(cache_salt))
    }

    /// The chain behind the full blocks of `tokens`, and their names: 16 hexadecimal digits each.
    fn extend<'py>(
        &self,
        py: Python<'py>,
        chain: One<names::Chain, [u8; 32]>,
        tokens: Tokens,
    ) -> (Bound<'py, PyBytes>, String) {
        let (mut chain, tokens) = (chain.0, tokens.0);
        let named = run_on_tokens(py, tokens.len(), || {
            let mut named = String::new();
            for next in self.0.extend(chain, &tokens) {
                write_name(&next, &mut named);
                chain = next;
            }
            named
        });
        (PyBytes::new(py, &chain), named)
    }
}

/// Make the calls of a recording again, to a cache of its size and policy: does that count the same?
///
/// Returns what the live server and the replay counted, and the first difference. Raises ValueError, naming
/// file and line, for what is no recording, and OSError for what cannot be read.
#[pyfunction]
pub fn replay_recording(py: Python<'_>, path: PathBuf) -> Result<Bound<'_, PyDict>> {
    let outcome = py.detach(|| replay(&path)).map_err(|error| match error {
        TraceError::Unreadable { .. } => PyOSError::new_err(error.to_string()).into(),
        TraceError::Invalid { .. } => Failure::from(error),
    })?;
    let dict = PyDict::new(py);
    dict.set_item("agrees", outcome.agrees())?;
    set_fields!(
        dict, outcome;
        difference, ended, parts, requests, events, checks, unchecked as "unchecked_events",
    );
    set_fields!(dict, outcome.header; block_size, num_blocks);
    dict.set_item("live", outcome.live.named().into_py_dict(py)?)?;
    dict.set_item("replayed", outcome.replayed.named().into_py_dict(py)?)?;
    let policy = outcome.header.eviction_policy;
    let mut words = EvictionPolicy::WORDS.iter();
    let word = words.find_map(|&(word, named)| (named == policy).then_some(word));
    dict.set_item("eviction_policy", word)?;
    Ok(dict)
}
