//! Errors as Python exceptions: ValueError for an argument out of its range, RuntimeError for misuse, a
//! broken invariant and what another thread prevents, MemoryError where there is not enough.

use prefixcache_attention::{PlanError, ShapeError};
use prefixcache_core::error::{
    Argument, Broken, CacheError, InvalidArgument, ListenError, Misuse, PoolError, ResizeError,
};
use prefixcache_cpu::OutOfMemory;
use prefixcache_replay::trace::TraceError;
use prefixcache_sampler::RowError;
use pyo3::PyErr;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};

/// What a call raises. `?` makes it of any error that knows its Python exception.
#[derive(Debug)]
pub struct Failure(PyErr);

/// What a call returns or raises.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self(error.into())
    }
}

/// Errors that are one exception each.
macro_rules! one_exception {
    ($($error:ty => $exception:ident;)+) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                $exception::new_err(error.to_string()).into()
            }
        })+
    };
}

one_exception! {
    InvalidArgument => PyValueError;
    PlanError => PyValueError;
    RowError => PyValueError;
    ShapeError => PyValueError;
    TraceError => PyValueError;
    Broken => PyRuntimeError;
}

/// Errors that may be an invalid argument, or of the kind that is named, and else are misuse.
macro_rules! several_exceptions {
    ($($error:ident $(, $kind:ident => $exception:ident)?;)+) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                match error {
                    $error::Invalid(error) => error.into(),
                    $($error::$kind { .. } => $exception::new_err(error.to_string()).into(),)?
                    other => PyRuntimeError::new_err(other.to_string()).into(),
                }
            }
        })+
    };
}

several_exceptions! {
    CacheError;
    ResizeError;
    PoolError, OutOfMemory => PyMemoryError;
    ListenError, OutOfMemory => PyMemoryError;
}

impl From<OutOfMemory> for Failure {
    fn from(error: OutOfMemory) -> Self {
        PyMemoryError::new_err(format!("the call {error}")).into()
    }
}

/// A block id that the pool refused, as an error of the argument `blocks`.
pub fn bad_blocks(misuse: Misuse) -> Failure {
    PyValueError::new_err(format!("blocks: {misuse}")).into()
}

pub fn out_of_range(argument: impl Into<Argument>, reason: impl Into<String>) -> Failure {
    InvalidArgument::new(argument, reason).into()
}

/// Fails, by the argument's name, unless a condition holds.
macro_rules! ensure {
    ($holds:expr, $argument:expr, $($reason:tt)+) => {
        if !$holds {
            return Err($crate::errors::out_of_range($argument, format_args!($($reason)+).to_string()));
        }
    };
}
pub(crate) use ensure;

/// A value that a call has left in the middle of a change.
pub fn panicked(argument: impl Into<Argument>) -> Failure {
    let argument = argument.into();
    let reason = "cannot be used any more: a call that was using it panicked";
    PyRuntimeError::new_err(format!("{argument} {reason}")).into()
}

pub fn in_use(argument: impl Into<Argument>) -> Failure {
    let argument = argument.into();
    let reason = "is in use by another call: of another thread, or twice in this one";
    PyRuntimeError::new_err(format!("{argument} {reason}")).into()
}
