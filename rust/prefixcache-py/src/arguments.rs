//! Python numbers, lists and arrays as Rust values, with errors that name the argument.

use numpy::{PyArray1, PyArrayMethods, PyReadwriteArray1};
use prefixcache_core::error::Argument;
use prefixcache_core::id::{BlockHash, BlockId, GroupId};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::errors::out_of_range;

/// A whole number from 0 to what `T` holds.
pub fn number<'py, T>(argument: impl Into<Argument>, value: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    value.extract().map_err(|error: PyErr| {
        let argument = argument.into();
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            return out_of_range(
                argument,
                format!("must be from 0 to its limit, not {value}"),
            );
        }
        wrong_type(argument, "a whole number", value)
    })
}

fn wrong_type(argument: Argument, wanted: &str, value: &Bound<'_, PyAny>) -> PyErr {
    let found = value.get_type();
    PyTypeError::new_err(format!("{argument} must be {wanted}, not {found}"))
}

/// The items of a list or of any other sequence.
pub fn items<'py>(name: &'static str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Ok(list.clone());
    }
    let items = value
        .try_iter()
        .map_err(|_| wrong_type(name.into(), "a list", value))?;
    let list = PyList::empty(value.py());
    for item in items {
        list.append(item?)?;
    }
    Ok(list)
}

/// A list of whole numbers from 0.
pub fn numbers<'py, T>(name: &'static str, value: &Bound<'py, PyAny>) -> PyResult<Vec<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    let list = items(name, value)?;
    let element = |(index, item)| number(Argument::element(name, index), &item);
    list.iter().enumerate().map(element).collect()
}

pub fn group(value: &Bound<'_, PyAny>) -> PyResult<GroupId> {
    number("group", value).map(GroupId::new)
}

pub fn block_ids(value: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
    let ids: Vec<u32> = numbers("blocks", value)?;
    Ok(ids.into_iter().map(BlockId::new).collect())
}

pub fn ids_of(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.get()).collect()
}

/// A block hash: 32 bytes.
pub fn hash(argument: impl Into<Argument>, value: &Bound<'_, PyAny>) -> PyResult<BlockHash> {
    let argument = argument.into();
    let Ok(bytes) = value.extract::<&[u8]>() else {
        return Err(wrong_type(argument, "bytes", value));
    };
    match bytes.try_into() {
        Ok(bytes) => Ok(BlockHash::from_bytes(bytes)),
        Err(_) => {
            let reason = format!("must have 32 bytes, not {}", bytes.len());
            Err(out_of_range(argument, reason))
        }
    }
}

/// A list of block hashes.
pub fn hashes(value: &Bound<'_, PyAny>) -> PyResult<Vec<BlockHash>> {
    let list = items("hashes", value)?;
    let element = |(index, item)| hash(Argument::element("hashes", index), &item);
    list.iter().enumerate().map(element).collect()
}

/// A numpy array to write to. Fails where the same memory is already taken for another argument.
pub fn writable<'py, T: numpy::Element>(
    name: &'static str,
    array: &Bound<'py, PyArray1<T>>,
) -> PyResult<PyReadwriteArray1<'py, T>> {
    array
        .try_readwrite()
        .map_err(|error| out_of_range(name, format!("cannot be written to: {error}")))
}

/// The elements of a writable array, which must lie side by side.
pub fn slice_of<'a, T: numpy::Element>(
    name: &'static str,
    array: &'a mut PyReadwriteArray1<'_, T>,
) -> PyResult<&'a mut [T]> {
    array
        .as_slice_mut()
        .map_err(|_| out_of_range(name, "must be contiguous and aligned"))
}
