//! Hints as Python gives them: (start, end or None, priority, TTL in seconds or None).

use std::time::Duration;

use prefixcache_core::error::Argument;
use prefixcache_core::hints::Hint;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{Value, wrong_type};
use crate::errors::{Result, out_of_range};

impl Value for Hint {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let fields = value.cast::<PyTuple>().ok();
        let Some(fields) = fields.filter(|fields| fields.len() == 4) else {
            return Err(wrong_type(argument, "(start, end, priority, ttl)", value));
        };
        let end = fields.get_item(1)?;
        let ttl = fields.get_item(3)?;
        Ok(Self {
            start: whole(argument, "start", &fields.get_item(0)?)?,
            end: optional(&end, |end| whole(argument, "end", end))?,
            priority: whole(argument, "priority", &fields.get_item(2)?)?,
            ttl: optional(&ttl, |ttl| seconds(argument, ttl))?,
        })
    }
}

fn optional<'py, T>(
    value: &Bound<'py, PyAny>,
    read: impl Fn(&Bound<'py, PyAny>) -> Result<T>,
) -> Result<Option<T>> {
    (!value.is_none()).then(|| read(value)).transpose()
}

/// A field that is a whole number.
fn whole<'py, T: for<'a> FromPyObject<'a, 'py, Error = PyErr>>(
    argument: Argument,
    field: &str,
    value: &Bound<'py, PyAny>,
) -> Result<T> {
    value.extract::<T>().map_err(|error| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            return out_of_range(argument, format!("has a {field} that is out of range"));
        }
        if error.is_instance_of::<PyTypeError>(value.py()) {
            return wrong_type(argument, &format!("a tuple with a whole number as {field}"), value);
        }
        error.into()
    })
}

fn seconds(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Duration> {
    let seconds = f64::read(argument, value)?;
    let ttl = Duration::try_from_secs_f64(seconds).ok();
    ttl.filter(|ttl| !ttl.is_zero()).ok_or_else(|| {
        let reason = format!("must have a TTL of more than 0 seconds, not {seconds}");
        out_of_range(argument, reason)
    })
}
