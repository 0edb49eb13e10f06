//! The Python class `KVFile`: KV tensors and their records in a file that outlives the process.

use std::os::fd::RawFd;

use prefixcache_file::{KvFile, Layout, OpenError, describe, duplicate};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{Number, One, or};
use crate::dicts::set_fields;
use crate::errors::{Failure, Result, ensure};
use crate::names;

type Start = Number<names::Start, u64>;
type Length = Number<names::Length, u64>;

/// An open file of KV blocks, which the caller has locked.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct KVFile(pub KvFile);

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Io(error) => error.into(),
            other => PyValueError::new_err(other.to_string()).into(),
        }
    }
}

#[pymethods]
impl KVFile {
    /// Opens the file of a descriptor; an empty one becomes one of this layout.
    #[new]
    #[pyo3(signature = (descriptor, digest, num_tensors, block_bytes, capacity, about="", block_tokens=None))]
    fn new(
        py: Python<'_>,
        descriptor: Number<names::Descriptor, RawFd>,
        digest: One<names::Digest, [u8; 32]>,
        num_tensors: Number<names::NumTensors, u32>,
        block_bytes: Number<names::BlockBytes, u64>,
        capacity: Number<names::Capacity, u64>,
        about: &str,
        block_tokens: Option<Number<names::BlockTokens, u32>>,
    ) -> Result<Self> {
        let layout = Layout {
            digest: digest.0,
            num_tensors: num_tensors.0,
            block_bytes: block_bytes.0,
            capacity: capacity.0,
            block_tokens: or(block_tokens, 0),
            about: about.to_owned(),
        };
        Ok(Self(py.detach(|| KvFile::open(duplicate(descriptor.0)?, &layout))?))
    }

    /// The most blocks that fit, the null block counted.
    #[getter]
    fn capacity(&self) -> u64 {
        self.0.layout().capacity
    }

    /// Where a tensor begins, in bytes; that after the last is the end of the file.
    fn tensor_at(&self, tensor: Number<names::TensorIndex, u32>) -> Result<u64> {
        let most = self.0.layout().num_tensors;
        ensure!(tensor.0 <= most, "tensor", "must be at most {most}, not {}", tensor.0);
        Ok(self.0.tensor_at(tensor.0))
    }

    /// Gives bytes space on the disk, so that writing to them cannot fail. Raises OSError.
    fn allocate(&self, py: Python<'_>, start: Start, length: Length) -> Result<()> {
        Ok(py.detach(|| self.0.allocate(start.0, length.0))?)
    }

    /// Gives space back; the bytes read as zero. Raises OSError.
    fn punch(&self, py: Python<'_>, start: Start, length: Length) -> Result<()> {
        Ok(py.detach(|| self.0.punch(start.0, length.0))?)
    }

    /// Blocks with a valid record, and those of them with other bytes than it says, if it `reads` them.
    #[pyo3(signature = (*, reads))]
    fn survey(&self, py: Python<'_>, reads: bool) -> (u64, u64) {
        py.detach(|| self.0.survey(reads))
    }

    /// Restored blocks that are being read because `reads_first` asked for them. Any thread.
    #[getter]
    fn num_asked(&self) -> usize {
        self.0.num_asked()
    }

    /// Blocks kept, restored ones checked, those that failed, and clears that the disk did not take. Any thread.
    fn counts<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let (counts, dict) = (self.0.counts(), PyDict::new(py));
        set_fields!(dict, counts; kept, checked, failed, failed_syncs);
        Ok(dict)
    }
}

/// The layout of the file of a descriptor, whoever has it open, as `KVFile` takes it.
///
/// Raises ValueError for a file that is none of this version, and OSError.
#[pyfunction]
pub fn describe_kv_file(
    py: Python<'_>,
    descriptor: Number<names::Descriptor, RawFd>,
) -> Result<Bound<'_, PyDict>> {
    let layout = describe(&duplicate(descriptor.0)?)?;
    let dict = PyDict::new(py);
    dict.set_item("digest", PyBytes::new(py, &layout.digest))?;
    set_fields!(dict, layout; num_tensors, block_bytes, capacity, about, block_tokens);
    Ok(dict)
}
