//! The core's errors as Python exceptions: ValueError for an argument out of its range, RuntimeError
//! for misuse, a broken invariant and what another thread prevents, MemoryError where there is not enough.

use prefixcache_core::error::{
    Argument, Broken, CacheError, InvalidArgument, ListenError, Misuse, PoolError, ResizeError,
};
use prefixcache_cpu::OutOfMemory;
use pyo3::PyErr;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};

/// An error of the core that knows its Python exception.
pub trait IntoPyErr {
    fn into_py_err(self) -> PyErr;
}

impl IntoPyErr for InvalidArgument {
    fn into_py_err(self) -> PyErr {
        PyValueError::new_err(self.to_string())
    }
}

/// For errors that may be an invalid argument, or of the kind that is named, and else are misuse.
macro_rules! into_py_err {
    ($($error:ident $(, $kind:ident => $exception:ident)?;)+) => {
        $(impl IntoPyErr for $error {
            fn into_py_err(self) -> PyErr {
                match self {
                    Self::Invalid(error) => error.into_py_err(),
                    $(Self::$kind { .. } => $exception::new_err(self.to_string()),)?
                    other => PyRuntimeError::new_err(other.to_string()),
                }
            }
        })+
    };
}

into_py_err! {
    CacheError;
    ResizeError;
    PoolError, OutOfMemory => PyMemoryError;
    ListenError, OutOfMemory => PyMemoryError;
}

impl IntoPyErr for Broken {
    fn into_py_err(self) -> PyErr {
        PyRuntimeError::new_err(self.to_string())
    }
}

impl IntoPyErr for OutOfMemory {
    fn into_py_err(self) -> PyErr {
        PyMemoryError::new_err(format!("the call {self}"))
    }
}

/// A block id that the pool refused, as an error of the argument `blocks`.
pub fn bad_blocks(misuse: Misuse) -> PyErr {
    PyValueError::new_err(format!("blocks: {misuse}"))
}

pub fn out_of_range(argument: impl Into<Argument>, reason: impl Into<String>) -> PyErr {
    InvalidArgument::new(argument, reason).into_py_err()
}

pub fn in_use(argument: impl Into<Argument>) -> PyErr {
    let argument = argument.into();
    PyRuntimeError::new_err(format!(
        "{argument} is in use by another call: of another thread, or twice in this one"
    ))
}
