//! The Python classes `StopStrings` and `StopStream`.

use prefixcache_serving::text::stops::{Place, StopStrings as Automaton};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::sync::Arc;

use crate::arguments::{each, wrong_type};
use crate::errors::{Failure, Result, out_of_range};
use crate::names;

/// Stop strings, as one automaton that any number of streams share.
#[pyclass(frozen, weakref, module = "prefixcache._core")]
pub struct StopStrings {
    automaton: Arc<Automaton>,
}

/// The argument `stops`.
struct Stops(Vec<String>);

impl<'a, 'py> FromPyObject<'a, 'py> for Stops {
    type Error = Failure;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> Result<Self> {
        let stop = |argument, item: &Bound<'py, PyAny>| match item.cast::<PyString>() {
            Ok(text) if text.is_empty()? => Err(out_of_range(argument, "must not be empty")),
            Ok(text) => Ok(text.to_str()?.to_owned()),
            Err(_) => Err(wrong_type(argument, "a string", item)),
        };
        each::<names::Stops, _>(&value, stop).map(Self)
    }
}

#[pymethods]
impl StopStrings {
    #[new]
    fn new(py: Python<'_>, stops: Stops) -> Result<Self> {
        let Stops(stops) = stops;
        let built = py.detach(|| Automaton::new(&stops));
        let automaton = built.map_err(|error| PyValueError::new_err(format!("stops: {error}")))?;
        Ok(Self { automaton: Arc::new(automaton) })
    }

    fn stream(&self) -> StopStream {
        StopStream { place: self.automaton.begin(), automaton: Arc::clone(&self.automaton) }
    }
}

/// The search in one text that comes in pieces.
#[pyclass(module = "prefixcache._core")]
pub struct StopStream {
    automaton: Arc<Automaton>,
    place: Place,
}

#[pymethods]
impl StopStream {
    fn push(&mut self, text: &str) -> Option<(isize, usize)> {
        let found = self.automaton.push(&mut self.place, text);
        found.map(|found| (found.start, found.stop))
    }

    #[getter]
    fn num_held(&self) -> usize {
        self.automaton.num_held(self.place)
    }
}
