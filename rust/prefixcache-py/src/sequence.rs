//! The Python class `Sequence`.

use prefixcache_core::error::Argument;
use prefixcache_core::sequence as core;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::arguments::{ids_of, items, number};
use crate::errors::{in_use, out_of_range};
use crate::exclusive::{Exclusive, Using};
use crate::tokens::as_tokens;

/// A request's tokens, block hashes and block tables. Made by `PrefixCache.new_sequence`.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct Sequence(Exclusive<core::Sequence>);

impl Sequence {
    pub fn new(sequence: core::Sequence) -> Self {
        Self(Exclusive::new(sequence))
    }

    /// The sequence, unless another call is using it.
    pub fn use_as(&self, argument: impl Into<Argument>) -> PyResult<Using<'_, core::Sequence>> {
        self.0.try_use().ok_or_else(|| in_use(argument))
    }
}

#[pymethods]
impl Sequence {
    /// Tokens known: the prompt and what was generated.
    #[getter]
    fn num_tokens(&self) -> PyResult<usize> {
        Ok(self.use_as("sequence")?.num_tokens())
    }

    /// Tokens that have a KV slot: hits and allocated ones; 0 while nothing is held.
    #[getter]
    fn num_slots(&self) -> PyResult<usize> {
        Ok(self.use_as("sequence")?.num_slots())
    }

    /// Tokens whose KV is there; 0 while nothing is held.
    #[getter]
    fn num_filled(&self) -> PyResult<usize> {
        Ok(self.use_as("sequence")?.num_filled())
    }

    /// Whether the sequence holds blocks: from a commit until its release.
    #[getter]
    fn is_committed(&self) -> PyResult<bool> {
        Ok(self.use_as("sequence")?.is_committed())
    }

    /// Add tokens, and hash the blocks that they fill.
    fn extend(&self, #[pyo3(from_py_with = as_tokens)] tokens: Vec<u32>) -> PyResult<()> {
        self.use_as("sequence")?.extend(&tokens);
        Ok(())
    }

    /// The blocks of a group, in the order of the positions; empty while nothing is held.
    #[pyo3(signature = (group=None), text_signature = "($self, group=0)")]
    fn block_table(&self, group: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<u32>> {
        let group = group.map_or(Ok(0), |group| number("group", group))?;
        let sequence = self.use_as("sequence")?;
        if group >= sequence.num_groups() {
            let reason = format!("must be below {}, not {group}", sequence.num_groups());
            return Err(out_of_range("group", reason));
        }
        Ok(ids_of(sequence.block_table(group)))
    }

    /// The hashes of full blocks `start` to `stop`, 32 bytes each.
    #[pyo3(signature = (start=0, stop=None))]
    fn block_hashes<'py>(
        &self,
        py: Python<'py>,
        start: usize,
        stop: Option<usize>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let sequence = self.use_as("sequence")?;
        let hashes = sequence.hashes();
        let stop = stop.unwrap_or(hashes.len()).min(hashes.len());
        let wanted = &hashes[start.min(stop)..stop];
        Ok(wanted
            .iter()
            .map(|hash| PyBytes::new(py, hash.as_bytes()))
            .collect())
    }
}

/// The sequences of a batch call, kept alive and each used by this call alone.
pub struct Batch<'py> {
    list: Vec<Bound<'py, Sequence>>,
}

impl<'py> Batch<'py> {
    /// The elements of the argument `sequences`.
    pub fn new(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        let list: Bound<'py, PyList> = items("sequences", value)?;
        let element = |(index, item): (usize, Bound<'py, PyAny>)| {
            item.cast_into::<Sequence>().map_err(|error| {
                let found = error.into_inner().get_type();
                PyTypeError::new_err(format!(
                    "sequences[{index}] must be a Sequence, not {found}"
                ))
            })
        };
        let list = list
            .iter()
            .enumerate()
            .map(element)
            .collect::<PyResult<_>>()?;
        Ok(Self { list })
    }

    /// Uses all sequences; fails at one that another call uses, or that stands in the list twice.
    pub fn use_all(&self) -> PyResult<Vec<Using<'_, core::Sequence>>> {
        let sequences = self.list.iter().enumerate();
        sequences
            .map(|(index, sequence)| sequence.get().use_as(Argument::element("sequences", index)))
            .collect()
    }
}
