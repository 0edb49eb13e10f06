//! Token ids from numpy arrays, what numpy can view as one, and lists.

use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use prefixcache_core::error::Argument;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::arguments::Numbers;
use crate::errors::{Failure, Result, out_of_range};
use crate::names::{self, Name};

const NAME: &str = names::Tokens::NAME;

/// The argument `tokens` as the core takes it: a number from 0 to 2**32 - 1 each.
pub struct Tokens(pub Vec<u32>);

impl<'a, 'py> FromPyObject<'a, 'py> for Tokens {
    type Error = Failure;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> Result<Self> {
        if value.is_instance_of::<PyList>() {
            let tokens: Numbers<names::Tokens, u32> = value.extract()?;
            return Ok(Self(tokens.0));
        }
        if let Some(tokens) = from_array(&value)? {
            return Ok(Self(tokens));
        }
        let array = numpy_array("asarray", &value)?;
        let tokens = from_array(&array)?.ok_or_else(|| wrong_array(&value, &array))?;
        Ok(Self(tokens))
    }
}

fn wrong_array(value: &Bound<'_, PyAny>, array: &Bound<'_, PyAny>) -> Failure {
    let dtype = array.getattr("dtype");
    let dtype = dtype.map_or_else(|_| String::new(), |dtype| dtype.to_string());
    let wanted = "int32, int64 or uint32 token ids in one dimension";
    let found = value.get_type();
    PyTypeError::new_err(format!("{NAME} must be {wanted}, not {found} ({dtype})")).into()
}

/// `value` as numpy makes an array of it: a copy with "array", the same memory where it can with
/// "asarray".
fn numpy_array<'py>(how: &str, value: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
    Ok(value.py().import("numpy")?.call_method1(how, (value,))?)
}

/// None unless `value` is an array of a type that token ids come in.
fn from_array(value: &Bound<'_, PyAny>) -> Result<Option<Vec<u32>>> {
    let tokens = from_array_of::<i32>(value)
        .or_else(|| from_array_of::<i64>(value))
        .or_else(|| from_array_of::<u32>(value))
        .or_else(|| from_array_of::<u64>(value));
    if let Some(tokens) = tokens {
        return tokens.map(Some);
    }
    let empty =
        value.cast::<PyUntypedArray>().is_ok_and(|array| array.ndim() == 1 && array.is_empty());
    Ok(empty.then(Vec::new))
}

fn from_array_of<T>(value: &Bound<'_, PyAny>) -> Option<Result<Vec<u32>>>
where
    T: Element + Copy + TryInto<u32> + std::fmt::Display,
{
    let array = value.cast::<PyArray1<T>>().ok()?;
    if !array.is_aligned() {
        let copy = numpy_array("array", value);
        return copy.map_or_else(|error| Some(Err(error)), |copy| from_array_of::<T>(&copy));
    }
    let Ok(array) = array.try_readonly() else {
        return Some(Err(out_of_range(NAME, "is being written to by another call")));
    };
    Some(match array.as_slice() {
        Ok(slice) => to_u32(slice.iter().copied()),
        Err(_) => to_u32(array.as_array().iter().copied()),
    })
}

/// The values as token ids. One pass without a branch for each value, which is vectorized.
fn to_u32<T>(values: impl Iterator<Item = T> + Clone) -> Result<Vec<u32>>
where
    T: Copy + TryInto<u32> + std::fmt::Display,
{
    let mut all_fit = true;
    let token = |value: T| {
        let token = value.try_into();
        all_fit &= token.is_ok();
        token.unwrap_or(0)
    };
    let tokens = values.clone().map(token).collect();
    if all_fit {
        return Ok(tokens);
    }
    let wrong = values.enumerate().find(|(_, value)| T::try_into(*value).is_err());
    let (index, value) = wrong.expect("a value did not fit");
    let reason = format!("must be from 0 to 4294967295, not {value}");
    Err(out_of_range(Argument::element(NAME, index), reason))
}
