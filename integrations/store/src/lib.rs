//! The Python module `prefixcache_store._store`: check arguments, call the store, map errors.
#![warn(missing_docs)]

use std::any::Any;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prefixcache_store::{Memory, OpenError, Store as Values};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;

pyo3::create_exception!(
    _store,
    StoreInUseError,
    PyOSError,
    "Another process, or another store of this one, has the folder."
);

/// As the system's call raises it in Python: its subclass by the number, and the folder.
fn os_error(error: &std::io::Error, folder: PathBuf) -> PyErr {
    let text = error.to_string();
    let reason = text.split(" (os error").next().unwrap_or(&text).to_owned();
    PyOSError::new_err((error.raw_os_error(), reason, folder.into_os_string()))
}

/// Where the bytes of a buffer begin, and how many there are.
type Place = (usize, usize);

/// What keeps buffers there. Who calls has it until the call ends, so that they are free then.
type Owner = Arc<dyn Any + Send + Sync>;

/// Values by key in files of a folder. What a call takes and raises is said in `prefixcache_store`.
#[pyclass(frozen, module = "prefixcache_store._store")]
struct Store(Mutex<Option<Arc<Values>>>);

impl Store {
    fn open(&self) -> PyResult<Arc<Values>> {
        let values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        values.clone().ok_or_else(|| PyValueError::new_err("the store is closed"))
    }
}

#[pymethods]
impl Store {
    #[new]
    fn new(py: Python<'_>, folder: PathBuf, max_bytes: u64, threads: usize) -> PyResult<Self> {
        if threads == 0 {
            return Err(PyValueError::new_err("threads must be at least 1, not 0"));
        }
        let values = py.detach(|| Values::open(&folder, max_bytes, threads));
        let values = values.map_err(|error| match error {
            OpenError::Io(error) => os_error(&error, folder),
            OpenError::InUse(_) => StoreInUseError::new_err(error.to_string()),
            OpenError::NotPrivate(_) | OpenError::NoRoom(_) => {
                PyOSError::new_err(error.to_string())
            }
        })?;
        Ok(Self(Mutex::new(Some(Arc::new(values)))))
    }

    fn contains(&self, keys: Vec<PyBackedBytes>) -> PyResult<Vec<bool>> {
        Ok(self.open()?.contains(checked(&keys)?))
    }

    fn touch(&self, keys: Vec<PyBackedBytes>) -> PyResult<()> {
        self.open()?.touch(checked(&keys)?);
        Ok(())
    }

    /// `owner` keeps the bytes at `places` there.
    fn put(
        &self,
        py: Python<'_>,
        keys: Vec<PyBackedBytes>,
        places: Vec<Place>,
        owner: Py<PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<bool>> {
        let (values, timeout) = (self.open()?, duration(timeout)?);
        let owner: Owner = Arc::new(owner);
        let sources = memories(checked(&keys)?, &places, &owner)?;
        Ok(py.detach(|| values.put(&keys, sources, timeout)))
    }

    /// As `put`; nobody else reads or writes what is at `places`.
    fn get_into(
        &self,
        py: Python<'_>,
        keys: Vec<PyBackedBytes>,
        places: Vec<Place>,
        owner: Py<PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<bool>> {
        let (values, timeout) = (self.open()?, duration(timeout)?);
        let owner: Owner = Arc::new(owner);
        let targets = memories(checked(&keys)?, &places, &owner)?;
        let mut sorted = places;
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
            return Err(PyValueError::new_err("the buffers overlap"));
        }
        Ok(py.detach(|| values.get_into(&keys, targets, timeout)))
    }

    fn remove(&self, py: Python<'_>, keys: Vec<PyBackedBytes>) -> PyResult<()> {
        let values = self.open()?;
        checked(&keys)?;
        Ok(py.detach(|| values.remove(&keys))?)
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let values = self.open()?;
        Ok(py.detach(|| values.clear())?)
    }

    #[getter]
    fn bound(&self) -> PyResult<u64> {
        Ok(self.open()?.bound())
    }

    #[getter]
    fn num_bytes(&self) -> PyResult<u64> {
        Ok(self.open()?.num_bytes())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.open()?.num_values())
    }

    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (counts, dict) = (self.open()?.counts(), PyDict::new(py));
        dict.set_item("hits", counts.hits)?;
        dict.set_item("misses", counts.misses)?;
        dict.set_item("late", counts.late)?;
        dict.set_item("damaged", counts.damaged)?;
        dict.set_item("failed", counts.failed)?;
        dict.set_item("written", counts.written)?;
        dict.set_item("evicted", counts.evicted)?;
        Ok(dict)
    }

    fn close(&self, py: Python<'_>) {
        let values = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(move || drop(values));
    }
}

fn checked(keys: &[PyBackedBytes]) -> PyResult<&[PyBackedBytes]> {
    match keys.iter().any(|key| key.is_empty()) {
        true => Err(PyValueError::new_err("keys must have at least one byte")),
        false => Ok(keys),
    }
}

fn duration(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let duration = |seconds| Duration::try_from_secs_f64(seconds);
    let wrong = |_| PyValueError::new_err("timeout must be seconds, at least 0");
    seconds.map(duration).transpose().map_err(wrong)
}

fn memories(keys: &[PyBackedBytes], places: &[Place], owner: &Owner) -> PyResult<Vec<Memory>> {
    if keys.len() != places.len() {
        let (keys, buffers) = (keys.len(), places.len());
        return Err(PyValueError::new_err(format!("{keys} keys for {buffers} buffers")));
    }
    let memory = |&(start, len): &Place| {
        let start = NonNull::new(start as *mut u8).filter(|_| len > 0);
        let start = start.ok_or_else(|| PyValueError::new_err("buffers must not be empty"))?;
        // SAFETY: the caller gives places of memory that `owner` keeps, and writes to none of it meanwhile.
        Ok(unsafe { Memory::new(start, len, Arc::clone(owner)) })
    };
    places.iter().map(memory).collect()
}

/// The store without its buffers: these are places here.
#[pymodule(gil_used = false)]
mod _store {
    #[pymodule_export]
    use crate::{Store, StoreInUseError};
}
