//! Token ids from numpy arrays, what numpy can view as one, and lists.

use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use prefixcache_core::error::Argument;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::errors::out_of_range;

/// The argument `tokens` as the core takes it: a number from 0 to 2**32 - 1 each.
pub fn as_tokens(value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let name = "tokens";
    if let Ok(list) = value.cast::<PyList>() {
        return from_list(name, list);
    }
    if let Some(tokens) = from_array(name, value)? {
        return Ok(tokens);
    }
    let array = numpy_array("asarray", value)?;
    from_array(name, &array)?.ok_or_else(|| {
        let found = value.get_type();
        let dtype = array.getattr("dtype").map_or_else(|_| String::new(), |it| it.to_string());
        PyTypeError::new_err(format!(
            "{name} must be int32, int64 or uint32 token ids in one dimension, not {found} ({dtype})"
        ))
    })
}

/// `value` as numpy makes an array of it: a copy with "array", the same memory where it can with
/// "asarray".
fn numpy_array<'py>(how: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    value.py().import("numpy")?.call_method1(how, (value,))
}

fn from_list(name: &'static str, list: &Bound<'_, PyList>) -> PyResult<Vec<u32>> {
    let element = |(index, item): (usize, Bound<'_, PyAny>)| {
        crate::arguments::number(Argument::element(name, index), &item)
    };
    list.iter().enumerate().map(element).collect()
}

/// None unless `value` is an array of a type that token ids come in.
fn from_array(name: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u32>>> {
    if let Some(tokens) = from_array_of::<i32>(name, value) {
        return tokens.map(Some);
    }
    if let Some(tokens) = from_array_of::<i64>(name, value) {
        return tokens.map(Some);
    }
    if let Some(tokens) = from_array_of::<u32>(name, value) {
        return tokens.map(Some);
    }
    if let Some(tokens) = from_array_of::<u64>(name, value) {
        return tokens.map(Some);
    }
    let empty = value
        .cast::<PyUntypedArray>()
        .is_ok_and(|array| array.ndim() == 1 && array.is_empty());
    Ok(empty.then(Vec::new))
}

fn from_array_of<T>(name: &'static str, value: &Bound<'_, PyAny>) -> Option<PyResult<Vec<u32>>>
where
    T: Element + Copy + TryInto<u32> + std::fmt::Display,
{
    let array = value.cast::<PyArray1<T>>().ok()?;
    if !array.is_aligned() {
        let copy = numpy_array("array", value);
        return copy.map_or_else(
            |error| Some(Err(error)),
            |copy| from_array_of::<T>(name, &copy),
        );
    }
    let Ok(array) = array.try_readonly() else {
        return Some(Err(out_of_range(
            name,
            "is being written to by another call",
        )));
    };
    Some(match array.as_slice() {
        Ok(slice) => to_u32(name, slice.iter().copied()),
        Err(_) => to_u32(name, array.as_array().iter().copied()),
    })
}

fn to_u32<T>(name: &'static str, values: impl ExactSizeIterator<Item = T>) -> PyResult<Vec<u32>>
where
    T: Copy + TryInto<u32> + std::fmt::Display,
{
    let mut out = Vec::with_capacity(values.len());
    for (index, value) in values.enumerate() {
        let Ok(token) = value.try_into() else {
            let reason = format!("must be from 0 to 4294967295, not {value}");
            return Err(out_of_range(Argument::element(name, index), reason));
        };
        out.push(token);
    }
    Ok(out)
}
