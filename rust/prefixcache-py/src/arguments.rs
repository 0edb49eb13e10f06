//! Arguments of the Python methods as types: a signature says what a method takes, and an error names
//! the argument that it is about.
//!
//! Reading an argument can run code of the caller (`__index__`, `__iter__`), which may call this
//! module again or resize an array. So arguments are read into values of their own first; what is
//! lent to a call, an array's memory or a sequence, is borrowed after that.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::time::Duration;

use numpy::ndarray::Dimension;
use numpy::{
    Element, Ix1, PyArray, PyArrayMethods, PyReadonlyArray, PyReadwriteArray, PyUntypedArrayMethods,
};
use prefixcache_core::error::Argument;
use prefixcache_core::id::{BlockHash, BlockId, GroupId};
use pyo3::PyClass;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};

use crate::errors::{Failure, Result, out_of_range};
use crate::names::{self, Name};

/// What an argument, or an element of a list, is read into.
pub trait Value: Sized {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self>;
}

/// The argument `N`.
#[derive(Clone, Copy)]
pub struct One<N, T>(pub T, PhantomData<N>);

impl<'a, 'py, N: Name, T: Value> FromPyObject<'a, 'py> for One<N, T> {
    type Error = Failure;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> Result<Self> {
        Ok(Self::new(T::read(N::NAME.into(), &value)?))
    }
}

/// The argument `N`, a list or any other iterable.
pub struct List<N, T>(pub Vec<T>, PhantomData<N>);

impl<'a, 'py, N: Name, T: Value> FromPyObject<'a, 'py> for List<N, T> {
    type Error = Failure;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> Result<Self> {
        Ok(Self(each::<N, _>(&value, T::read)?, PhantomData))
    }
}

/// A whole number from 0 to what `T` holds.
pub type Number<N, T = usize> = One<N, T>;

/// A list of whole numbers from 0.
pub type Numbers<N, T = usize> = List<N, T>;

/// A floating-point number.
pub type Real<N> = One<N, f32>;

/// The argument `group`.
pub type Group = One<names::GroupIndex, GroupId>;

/// The argument `blocks`.
pub type Blocks = List<names::Blocks, BlockId>;

impl<N, T> One<N, T> {
    /// A value that the argument stands for, or is part of.
    pub fn new(value: T) -> Self {
        Self(value, PhantomData)
    }
}

macro_rules! whole {
    ($($number:ty),*) => {
        $(impl Value for $number {
            fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
                let number = value.extract::<Self>();
                number.map_err(|error| not_whole(argument, value, Self::MAX as u64, error))
            }
        })*
    };
}

whole!(i32, u16, u32, u64, usize);

fn not_whole(argument: Argument, value: &Bound<'_, PyAny>, most: u64, error: PyErr) -> Failure {
    if error.is_instance_of::<PyOverflowError>(value.py()) {
        let reason = format!("must be from 0 to {most}, not {}", shown(value));
        return out_of_range(argument, reason);
    }
    if error.is_instance_of::<PyTypeError>(value.py()) {
        return wrong_type(argument, "a whole number", value);
    }
    error.into()
}

/// A number as a message shows it; Python refuses to write very long ones.
fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = value.str().map(|text| text.to_string());
    text.unwrap_or_else(|_| "a number of thousands of digits".to_owned())
}

impl Value for f64 {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        value.extract::<Self>().map_err(|error| {
            match error.is_instance_of::<PyOverflowError>(value.py()) {
                true => out_of_range(argument, "must be a number that a float can hold"),
                false if error.is_instance_of::<PyTypeError>(value.py()) => {
                    wrong_type(argument, "a number", value)
                }
                false => error.into(),
            }
        })
    }
}

impl Value for f32 {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        f64::read(argument, value).map(|real| real as Self)
    }
}

/// Seconds.
impl Value for Duration {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let seconds = f64::read(argument, value)?;
        Self::try_from_secs_f64(seconds).map_err(|_| {
            let reason = format!("must be a number of seconds from 0, not {seconds}");
            out_of_range(argument, reason)
        })
    }
}

impl Value for GroupId {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        u16::read(argument, value).map(Self::new)
    }
}

impl Value for BlockId {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        u32::read(argument, value).map(Self::new)
    }
}

/// An object of one of our classes.
impl<T: PyClass> Value for Py<T> {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let object = value.cast::<T>().cloned().map(Bound::unbind);
        let wanted = || format!("a {}", <T as PyClass>::NAME);
        object.map_err(|_| wrong_type(argument, &wanted(), value))
    }
}

impl Value for [u8; 32] {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let Ok(bytes) = value.extract::<&[u8]>() else {
            return Err(wrong_type(argument, "bytes", value));
        };
        bytes.try_into().map_err(|_| {
            let reason = format!("must have 32 bytes, not {}", bytes.len());
            out_of_range(argument, reason)
        })
    }
}

impl Value for BlockHash {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        <[u8; 32]>::read(argument, value).map(Self::from_bytes)
    }
}

/// A type whose values an argument names by words.
pub trait Word: Copy + 'static {
    const ARGUMENT: &'static str;
    const WORDS: &'static [(&'static str, Self)];
}

/// An argument that is one of a few words.
#[derive(Clone, Copy)]
pub struct OneOf<T>(pub T);

impl<'a, 'py, T: Word> FromPyObject<'a, 'py> for OneOf<T> {
    type Error = Failure;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> Result<Self> {
        let text = text(T::ARGUMENT.into(), &value)?;
        let found = T::WORDS.iter().find(|(word, _)| *word == text);
        found.map(|&(_, value)| Self(value)).ok_or_else(|| {
            let words = T::WORDS.iter().map(|(word, _)| format!("{word:?}"));
            let words: Vec<_> = words.collect();
            let reason = format!("must be {}, not {text:?}", words.join(" or "));
            out_of_range(T::ARGUMENT, reason)
        })
    }
}

/// A string.
pub fn text<'a>(argument: Argument, value: &'a Bound<'_, PyAny>) -> Result<Cow<'a, str>> {
    let text = value.cast::<PyString>().map_err(|_| wrong_type(argument, "a string", value))?;
    Ok(text.to_string_lossy())
}

pub fn wrong_type(argument: Argument, wanted: &str, value: &Bound<'_, PyAny>) -> Failure {
    let found = value.get_type();
    PyTypeError::new_err(format!("{argument} must be {wanted}, not {found}")).into()
}

/// A tuple of `N` whole numbers, which `wanted` names.
pub fn whole_numbers<T: Value, const N: usize>(
    argument: Argument,
    wanted: &str,
    value: &Bound<'_, PyAny>,
) -> Result<[T; N]> {
    let items = value.extract::<[Bound<'_, PyAny>; N]>();
    let items = items.map_err(|_| wrong_type(argument, wanted, value))?;
    let numbers = items.iter().map(|item| T::read(argument, item)).collect::<Result<Vec<_>>>()?;
    numbers.try_into().map_err(|_| wrong_type(argument, wanted, value))
}

/// The items of a list or of any other iterable.
///
/// Their number is what the iterator gives, not what `__len__` says, which may be anything.
fn items<'py>(name: &'static str, value: &Bound<'py, PyAny>) -> Result<Bound<'py, PyList>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Ok(list.clone());
    }
    let items = value.try_iter().map_err(|_| wrong_type(name.into(), "a list", value))?;
    let list = PyList::empty(value.py());
    for item in items {
        list.append(item?)?;
    }
    Ok(list)
}

/// What `read` makes of each item of the list `N`.
pub fn each<'py, N: Name, T>(
    value: &Bound<'py, PyAny>,
    read: impl Fn(Argument, &Bound<'py, PyAny>) -> Result<T>,
) -> Result<Vec<T>> {
    let element = |(index, item)| read(Argument::element(N::NAME, index), &item);
    let list = items(N::NAME, value)?;
    list.iter().enumerate().map(element).collect()
}

/// An argument that need not be given, or what it is then.
pub fn or<N, T>(given: Option<One<N, T>>, default: T) -> T {
    given.map_or(default, |given| given.0)
}

/// A list that need not be given, and is empty then.
pub fn or_empty<N, T>(given: Option<List<N, T>>) -> Vec<T> {
    given.map_or_else(Vec::new, |given| given.0)
}

pub fn ids_of(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.get()).collect()
}

/// A numpy array of one dimension or of those that `D` names, not borrowed yet.
pub struct Array<'py, N, T, D = Ix1>(Bound<'py, PyArray<T, D>>, PhantomData<N>);

impl<'a, 'py, N: Name, T: Element, D: Dimension> FromPyObject<'a, 'py> for Array<'py, N, T, D> {
    type Error = Failure;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> Result<Self> {
        match value.cast::<PyArray<T, D>>() {
            Ok(array) => Ok(Self(array.to_owned(), PhantomData)),
            Err(_) => {
                let dtype = T::get_dtype(value.py());
                let dimensions = if D::NDIM == Some(2) { " with two dimensions" } else { "" };
                let wanted = format!("a numpy array of {dtype}{dimensions}");
                Err(wrong_type(N::NAME.into(), &wanted, &value))
            }
        }
    }
}

impl<'py, N: Name, T: Element, D: Dimension> Array<'py, N, T, D> {
    /// The array, to read. No code of the caller may run meanwhile.
    pub fn read(&self) -> Result<Reading<'py, N, T, D>> {
        let wrong = |_| out_of_range(N::NAME, "is written to by another call");
        self.0.try_readonly().map(|array| Reading(array, PhantomData)).map_err(wrong)
    }

    /// The array, to write. No code of the caller may run meanwhile.
    ///
    /// Fails where the same memory is already taken for another argument.
    pub fn write(&self) -> Result<Writing<'py, N, T, D>> {
        let wrong = |error| out_of_range(N::NAME, format!("cannot be written to: {error}"));
        self.0.try_readwrite().map(|array| Writing(array, PhantomData)).map_err(wrong)
    }
}

/// An array that is read.
pub struct Reading<'py, N, T: Element, D: Dimension = Ix1>(
    PyReadonlyArray<'py, T, D>,
    PhantomData<N>,
);

impl<N: Name, T: Element, D: Dimension> Reading<'_, N, T, D> {
    pub fn shape(&self) -> &[usize] {
        self.0.shape()
    }

    /// The elements, which must lie side by side.
    pub fn slice(&self) -> Result<&[T]> {
        self.0.as_slice().map_err(|_| apart::<N>())
    }
}

/// An array that is written.
pub struct Writing<'py, N, T: Element, D: Dimension = Ix1>(
    PyReadwriteArray<'py, T, D>,
    PhantomData<N>,
);

impl<N: Name, T: Element, D: Dimension> Writing<'_, N, T, D> {
    /// The elements, which must lie side by side.
    pub fn slice(&mut self) -> Result<&mut [T]> {
        self.0.as_slice_mut().map_err(|_| apart::<N>())
    }
}

fn apart<N: Name>() -> Failure {
    out_of_range(N::NAME, "must be contiguous and aligned")
}
