//! The Python class `Cpu`, and tensors that come as addresses.

use prefixcache_core::error::Argument;
use prefixcache_cpu::form::UnknownForm;
use prefixcache_cpu::team::MAX_THREADS;
use prefixcache_cpu::{Bf16, Form, Rows, RowsMut, Team, WeightMemory};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arguments::{Number, One, Value, Word, text};
use crate::detach;
use crate::errors::{Result, ensure, out_of_range};
use crate::names::{self, Name};

/// The threads and the instruction set that kernels run with, and the memory of their weights.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct Cpu {
    pub form: Form,
    pub team: Team,
    pub weights: WeightMemory,
}

#[pymethods]
impl Cpu {
    /// `threads` threads, the caller's among them; the processor's best instructions, or those named.
    #[new]
    #[pyo3(signature = (threads, instructions=None))]
    fn new(
        py: Python<'_>,
        threads: Number<names::ThreadCount>,
        instructions: Option<One<names::Instructions, Form>>,
    ) -> Result<Self> {
        let threads = threads.0;
        let fits = (1..=MAX_THREADS).contains(&threads);
        ensure!(fits, "threads", "must be from 1 to {MAX_THREADS}, not {threads}");
        let team = detach::run(py, threads, || Team::new(threads)).map_err(|error| {
            let reason = "the system does not give";
            PyRuntimeError::new_err(format!("{reason} {threads} threads; ask for fewer: {error}"))
        })?;
        Ok(Self {
            form: instructions.map_or_else(Form::detect, |form| form.0),
            team,
            weights: WeightMemory::default(),
        })
    }

    /// Threads that share a computation.
    #[getter]
    fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Name of the instruction set in use.
    #[getter]
    fn instructions(&self) -> &'static str {
        self.form.name()
    }

    /// Names of the instruction sets that this processor has, the slowest first.
    #[staticmethod]
    fn available_instructions() -> Vec<&'static str> {
        Form::available().into_iter().map(Form::name).collect()
    }
}

impl Value for Form {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let form = text(argument, value)?.parse();
        form.map_err(|error: UnknownForm| out_of_range(argument, error.to_string()))
    }
}

/// Evaluates an expression with `$element` as the Rust type of a [`DType`].
macro_rules! with_dtype {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            $crate::cpu::DType::Bf16 => {
                type $element = prefixcache_cpu::Bf16;
                $body
            }
            $crate::cpu::DType::F32 => {
                type $element = f32;
                $body
            }
        }
    };
}
pub(crate) use with_dtype;

/// The number type of a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DType {
    Bf16,
    F32,
}

impl DType {
    /// Bytes of a number.
    pub fn size(self) -> usize {
        with_dtype!(self, E => size_of::<E>())
    }
}

impl Word for DType {
    const ARGUMENT: &'static str = "dtype";
    const WORDS: &'static [(&'static str, Self)] =
        &[("bfloat16", Self::Bf16), ("float32", Self::F32)];
}

/// A matrix at an address: `rows` rows, one every `stride` numbers.
#[derive(Clone, Copy)]
pub struct Matrix {
    name: &'static str,
    address: usize,
    rows: usize,
    width: usize,
    stride: usize,
}

impl Matrix {
    /// Rows that follow each other without gaps.
    pub fn dense<N: Name>(address: Number<N>, rows: usize, width: usize) -> Self {
        Self::strided(address, (rows, width), width)
    }

    /// `rows` rows of `width` numbers, one every `stride` numbers.
    pub fn strided<N: Name>(
        address: Number<N>,
        (rows, width): (usize, usize),
        stride: usize,
    ) -> Self {
        Self { name: N::NAME, address: address.0, rows, width, stride }
    }

    /// The matrix as bytes, if it is one of numbers of this type.
    pub fn in_bytes(&self, dtype: DType) -> Self {
        let bytes = |numbers: usize| numbers.saturating_mul(dtype.size());
        Self { width: bytes(self.width), stride: bytes(self.stride), ..*self }
    }

    /// Where the matrix starts, and its stride: rows that can lie in memory and do not overlap.
    fn checked<E>(&self) -> Result<(*mut E, usize)> {
        if self.rows == 0 || self.width == 0 {
            return Ok((std::ptr::NonNull::dangling().as_ptr(), 0));
        }
        let is_address = self.address != 0 && self.address.is_multiple_of(align_of::<E>());
        let are_apart = self.rows == 1 || self.stride >= self.width;
        ensure!(is_address, self.name, "must be the address of its numbers");
        ensure!(are_apart, self.name, "must not have rows that overlap");
        ensure!(
            self.ends_in_memory::<E>(),
            self.name,
            "must not have more numbers than memory has"
        );
        let start = std::ptr::with_exposed_provenance_mut(self.address);
        Ok((start, self.stride))
    }

    fn ends_in_memory<E>(&self) -> bool {
        let numbers = (self.rows - 1)
            .checked_mul(self.stride)
            .and_then(|before_last| before_last.checked_add(self.width));
        let bytes = numbers.and_then(|numbers| numbers.checked_mul(size_of::<E>()));
        // The address space of a process ends in its middle: no object is larger than `isize` counts.
        let end = bytes.and_then(|bytes| self.address.checked_add(bytes));
        end.is_some_and(|end| isize::try_from(end).is_ok())
    }

    /// Numbers of the matrix, as far as they can be counted.
    pub fn numbers(&self) -> usize {
        self.rows.saturating_mul(self.width)
    }

    /// The matrix, to read: of numbers, or of bytes or ids.
    ///
    /// # Safety
    /// Such numbers stand there while `'a` lasts, and nobody writes to them.
    pub unsafe fn rows<'a, E>(&self) -> Result<Rows<'a, E>> {
        let (start, stride) = self.checked::<E>()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { Rows::from_raw(start, self.rows, self.width, stride) })
    }

    /// The matrix, to write.
    ///
    /// # Safety
    /// Numbers of this type stand there while `'a` lasts, and nobody else uses them.
    pub unsafe fn rows_mut<'a, E>(&self) -> Result<RowsMut<'a, E>> {
        let (start, stride) = self.checked::<E>()?;
        // SAFETY: the caller's promise; rows do not overlap.
        Ok(unsafe { RowsMut::from_raw(start, self.rows, self.width, stride) })
    }
}

/// `count` numbers at an address.
///
/// # Safety
/// They stand there while `'a` lasts, and nobody writes to them.
pub unsafe fn numbers_at<'a, N: Name, E>(address: Number<N>, count: usize) -> Result<&'a [E]> {
    // SAFETY: the caller's promise.
    Ok(unsafe { Matrix::dense(address, 1, count).rows()? }.row(0))
}

/// Those at an address that need not be given.
///
/// # Safety
/// As for [`numbers_at`].
pub unsafe fn numbers_if_given<'a, N: Name, E>(
    address: Option<Number<N>>,
    count: usize,
) -> Result<Option<&'a [E]>> {
    // SAFETY: the caller's promise.
    address.map(|address| unsafe { numbers_at(address, count) }).transpose()
}

/// Bfloat16 is two bytes, as torch has it.
const _: () = assert!(size_of::<Bf16>() == 2);
