//! Evictions, as arrays.

use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use prefixcache_core::evictions::{EvictedBlock, Eviction};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::Result;

/// The code of a cause; 0 stands for a cleared index.
fn cause(eviction: &Eviction) -> u8 {
    match eviction {
        Eviction::Everything => 0,
        Eviction::Block(block) => 1 + block.cause as u8,
    }
}

/// The arrays that `take_evictions` returns, by name.
pub fn arrays<'py>(py: Python<'py>, evictions: &[Eviction]) -> Result<Bound<'py, PyDict>> {
    let block = |eviction: &Eviction| match eviction {
        Eviction::Block(block) => Some(block.clone()),
        Eviction::Everything => None,
    };
    let blocks: Vec<Option<EvictedBlock>> = evictions.iter().map(block).collect();
    let dict = PyDict::new(py);
    let hashes = blocks.iter().flat_map(|block| match block {
        Some(block) => *block.hash.as_bytes(),
        None => [0; 32],
    });
    let hashes = PyArray1::from_iter(py, hashes);
    dict.set_item("hash", hashes.reshape([evictions.len(), 32])?)?;
    dict.set_item("cause", array(py, evictions.iter().map(cause)))?;
    macro_rules! column {
        ($name:literal, $of:expr) => {
            let values =
                blocks.iter().map(|block| block.as_ref().map_or_else(Default::default, $of));
            dict.set_item($name, array(py, values))?;
        };
    }
    column!("group", |block| block.group.get());
    column!("band", |block| block.band.index() as u8);
    column!("hits", |block| block.hits);
    column!("age", |block| block.age.as_secs_f64());
    column!("idle", |block| block.idle.as_secs_f64());
    column!("is_last", |block| block.is_last);
    Ok(dict)
}

fn array<'py, T: numpy::Element>(
    py: Python<'py>,
    values: impl Iterator<Item = T>,
) -> Bound<'py, PyArray1<T>> {
    values.collect::<Vec<T>>().into_pyarray(py)
}
