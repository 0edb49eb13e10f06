//! The Python class `BlockStaging`: evicted blocks between a pool and a slower tier.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use numpy::{IntoPyArray, PyArray1};
use prefixcache_core::error::Argument;
use prefixcache_core::events::ShortHash;
use prefixcache_core::id::{BlockId, BlockKey};
use prefixcache_file::staging::{Memory, Staging, key_from_bytes, key_to_bytes};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{Blocks, Group, List, Number, Value, wrong_type};
use crate::dicts::set_fields;
use crate::errors::{Result, out_of_range, panicked};
use crate::events::Event;
use crate::names::{self, Name};

type Keys = List<names::Keys, BlockKey>;

type MaxBlocks = Number<names::MaxBlocks>;
type Era = Number<names::Era, u64>;

/// A key and the bytes of its block, with their checksum.
type Taken<'py> = (Bound<'py, PyBytes>, Bound<'py, PyArray1<u8>>);

/// Evicted blocks on their way to a slower tier and back. A call that panics closes it: nothing is there then, and
/// `take`, `fill`, `add_stored` and `remove_stored` fail.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct BlockStaging(pub Staging);

/// 34 bytes: the hash, and the group, big endian.
impl Value for BlockKey {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let bytes = PyBackedBytes::read(argument, value)?;
        let reason = || format!("must have 34 bytes, not {}", bytes.len());
        key_from_bytes(&bytes).ok_or_else(|| out_of_range(argument, reason()))
    }
}

impl BlockStaging {
    fn open(&self) -> Result<&Staging> {
        if self.0.is_closed() { Err(panicked("staging")) } else { Ok(&self.0) }
    }
}

impl Value for PyBackedBytes {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let bytes = value.extract::<Self>();
        bytes.map_err(|_| wrong_type(argument, "bytes", value))
    }
}

#[pymethods]
impl BlockStaging {
    /// Up to `capacity` bytes of evicted blocks out of tensors at `addresses`, which `owner` keeps there.
    #[new]
    fn new(
        addresses: List<names::Addresses, usize>,
        block_bytes: Number<names::BlockBytes>,
        max_blocks: MaxBlocks,
        capacity: Number<names::Capacity>,
        min_uses: Number<names::MinUses, u32>,
        owner: Py<PyAny>,
    ) -> Result<Self> {
        let tensors = addresses.0.into_iter();
        let tensors: Option<Vec<_>> = tensors.map(|at| NonNull::new(at as *mut u8)).collect();
        let none = || out_of_range(names::Addresses::NAME, "must name tensors, not 0");
        let memory = Memory {
            tensors: tensors.filter(|all| !all.is_empty()).ok_or_else(none)?,
            block_bytes: block_bytes.0,
            num_blocks: max_blocks.0,
            owner: Box::new(owner),
        };
        if block_bytes.0 == 0 {
            return Err(out_of_range(names::BlockBytes::NAME, "must be at least 1, not 0"));
        }
        // SAFETY: the caller gives the addresses of tensors of that size, and keeps them.
        Ok(Self(unsafe { Staging::new(memory, capacity.0, min_uses.0) }))
    }

    /// How many clears of the cache there were. Any thread.
    #[getter]
    fn era(&self) -> u64 {
        self.0.era().0
    }

    /// Whether there are blocks to take. Any thread.
    #[getter]
    fn has_staged(&self) -> bool {
        self.0.era().1
    }

    /// How many blocks the tier holds. Any thread.
    #[getter]
    fn num_stored(&self) -> usize {
        self.0.num_stored()
    }

    /// Take up to `max_blocks` evicted blocks, the oldest first, and none of another era. Any thread.
    fn take<'py>(
        &self,
        py: Python<'py>,
        max_blocks: MaxBlocks,
        era: Era,
    ) -> Result<Vec<Taken<'py>>> {
        let staging = self.open()?;
        let taken = py.detach(|| match staging.take(max_blocks.0, era.0) {
            taken if taken.is_empty() => staging.take_ahead(max_blocks.0, era.0),
            taken => taken,
        });
        let taken = taken
            .into_iter()
            .map(|(key, bytes)| (PyBytes::new(py, &key_to_bytes(&key)), bytes.into_pyarray(py)));
        Ok(taken.collect())
    }

    /// The tier holds these from now on, unless another era has begun. Any thread.
    fn add_stored(&self, keys: Keys, era: Era) -> Result<()> {
        self.open()?.add_stored(&keys.0, era.0);
        Ok(())
    }

    /// The tier holds these no more. Any thread.
    fn remove_stored(&self, keys: Keys) -> Result<()> {
        self.open()?.remove_stored(&keys.0);
        Ok(())
    }

    /// The tier holds nothing. Any thread.
    fn clear_stored(&self) {
        self.0.clear_stored();
    }

    /// Take what KV events are to report of up to `max_blocks` blocks that the tier got or lost. Any thread.
    fn take_events(&self, max_blocks: MaxBlocks) -> Vec<Event> {
        let mut blocks = BTreeMap::<_, Vec<u64>>::new();
        for (key, is_stored) in self.0.take_changed(max_blocks.0) {
            let named = blocks.entry((is_stored, key.group.get())).or_default();
            named.push(ShortHash::from(&key.hash).0);
        }
        let events = blocks.into_iter().map(|((is_stored, group), hashes)| {
            let kind = if is_stored { "stored" } else { "removed" };
            (kind, group, None, hashes, Vec::new())
        });
        events.collect()
    }

    /// Report all that the tier holds again. Any thread.
    fn report_again(&self) {
        self.0.report_again();
    }

    /// The short hashes of all blocks of a group that KV events report as held by the tier. Any thread.
    fn reported<'py>(&self, py: Python<'py>, group: Group) -> Bound<'py, PyArray1<u64>> {
        let keys = py.detach(|| self.0.reported()).into_iter();
        let of_group = keys.filter(|key| key.group == group.0);
        let hashes: Vec<_> = of_group.map(|key| ShortHash::from(&key.hash).0).collect();
        hashes.into_pyarray(py)
    }

    /// How many leading ones of these the tier holds. Any thread.
    fn count_stored(&self, keys: Keys) -> usize {
        self.0.count_stored(keys.0.into_iter())
    }

    /// Write values that `take` gave to blocks, up to the first that is damaged; how many. Any thread.
    fn fill(
        &self,
        py: Python<'_>,
        blocks: Blocks,
        keys: Keys,
        values: List<names::Values, PyBackedBytes>,
    ) -> Result<usize> {
        let (blocks, keys, values) = (blocks.0, keys.0, values.0);
        let triples = blocks.into_iter().zip(keys).zip(&values);
        let triples =
            triples.map(|((block, key), value): ((BlockId, _), _)| (block, key, &**value));
        let staging = self.open()?;
        // SAFETY: the caller's promise.
        let filled = py.detach(|| unsafe { staging.fill(triples) });
        filled.ok_or_else(|| out_of_range(names::Blocks::NAME, "must be blocks of the pool"))
    }

    /// Lifetime counts of blocks: staged, dropped, skipped (not worth it) and damaged. Any thread.
    fn counts<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let (counts, dict) = (self.0.counts(), PyDict::new(py));
        set_fields!(dict, counts; staged, dropped, skipped, damaged);
        Ok(dict)
    }
}
