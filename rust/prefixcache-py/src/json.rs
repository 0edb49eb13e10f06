//! The Python function `parse_json`.

use prefixcache_serving::text::json::{Limits, Refusal, Value, parse};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyInt, PyList, PyString};

use crate::arguments::Number;
use crate::errors::{Failure, Result};
use crate::names;

/// Objects made before other threads get a chance to use the interpreter.
const VALUES_AT_ONCE: usize = 8192;

/// The value of a JSON text, read while the interpreter's other threads run.
#[pyfunction]
#[pyo3(signature = (text, *, max_numbers, max_others))]
pub fn parse_json<'py>(
    text: &Bound<'py, PyBytes>,
    max_numbers: Number<names::MaxNumbers>,
    max_others: Number<names::MaxOthers>,
) -> Result<Bound<'py, PyAny>> {
    let py = text.py();
    let limits = Limits { numbers: max_numbers.0, others: max_others.0 };
    let bytes = text.as_bytes();
    let value = py.detach(|| parse(bytes, limits))?;
    let mut maker = ObjectMaker { py, until_pause: VALUES_AT_ONCE };
    Ok(maker.object(value)?)
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let (kind, message, field) = match refusal {
            Refusal::Invalid(message) => ("invalid", message, None),
            Refusal::OutOfRange { number, field } => {
                ("invalid", format!("{number} is out of range"), field)
            }
            Refusal::Twice(key) => ("twice", format!("{key:?} appears twice"), Some(key)),
            Refusal::TooManyNumbers { field } => ("numbers", "too many numbers".into(), field),
            Refusal::TooManyOthers { field } => ("others", "too many other values".into(), field),
        };
        PyValueError::new_err((kind, message, field)).into()
    }
}

struct ObjectMaker<'py> {
    py: Python<'py>,
    until_pause: usize,
}

impl<'py> ObjectMaker<'py> {
    fn object(&mut self, value: Value<'_>) -> PyResult<Bound<'py, PyAny>> {
        self.pause_at_times();
        let py = self.py;
        Ok(match value {
            Value::Null => py.None().into_bound(py),
            Value::Bool(value) => PyBool::new(py, value).to_owned().into_any(),
            Value::Int(value) => value.into_pyobject(py)?.into_any(),
            Value::BigInt(digits) => py.get_type::<PyInt>().call1((digits,))?,
            Value::Float(value) => value.into_pyobject(py)?.into_any(),
            Value::Str(text) => PyString::new(py, &text).into_any(),
            Value::Array(items) => self.list(items)?.into_any(),
            Value::Object(entries) => self.dict(entries)?.into_any(),
        })
    }

    fn list(&mut self, items: Vec<Value<'_>>) -> PyResult<Bound<'py, PyList>> {
        let objects: PyResult<Vec<_>> = items.into_iter().map(|item| self.object(item)).collect();
        PyList::new(self.py, objects?)
    }

    fn dict(&mut self, entries: Vec<(Box<str>, Value<'_>)>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(self.py);
        for (key, value) in entries {
            dict.set_item(&*key, self.object(value)?)?;
        }
        Ok(dict)
    }

    fn pause_at_times(&mut self) {
        self.until_pause -= 1;
        if self.until_pause == 0 {
            self.until_pause = VALUES_AT_ONCE;
            self.py.detach(|| ());
        }
    }
}
