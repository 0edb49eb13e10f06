//! The Python classes `StopStrings` and `StopStream`.

use prefixcache_text::stops::{Place, StopStrings as Automaton};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// Stop strings, as one automaton that any number of streams share.
#[pyclass(frozen, weakref, module = "prefixcache._core")]
pub struct StopStrings {
    automaton: Arc<Automaton>,
}

#[pymethods]
impl StopStrings {
    #[new]
    fn new(py: Python<'_>, stops: Vec<String>) -> PyResult<Self> {
        if stops.iter().any(String::is_empty) {
            return Err(PyValueError::new_err("stops must not hold an empty string"));
        }
        let built = py.detach(|| Automaton::new(&stops));
        let automaton = built.map_err(|error| PyValueError::new_err(format!("stops: {error}")))?;
        Ok(Self {
            automaton: Arc::new(automaton),
        })
    }

    fn stream(&self) -> StopStream {
        StopStream {
            place: self.automaton.begin(),
            automaton: Arc::clone(&self.automaton),
        }
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
