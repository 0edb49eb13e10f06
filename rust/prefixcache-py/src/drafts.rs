//! The Python classes `DraftIndex` and `DraftStream`.

use std::sync::atomic::{AtomicUsize, Ordering};

use prefixcache_drafts::{Index, SizeError, Source, Stream};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;

use crate::arguments::Number;
use crate::detach::run_on_tokens;
use crate::errors::{IntoPyErr, in_use, out_of_range};
use crate::exclusive::{Exclusive, Using};
use crate::names::{self, Name};
use crate::tokens::Tokens;

impl IntoPyErr for SizeError {
    fn into_py_err(self) -> PyErr {
        match self {
            Self::Memory(_) => PyMemoryError::new_err(self.to_string()),
            Self::Tokens(_) => out_of_range(names::MaxTokens::NAME, self.to_string()),
        }
    }
}

/// The recent text of all requests.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DraftIndex {
    index: Exclusive<Index>,
    /// What a reader of metrics sees without the index.
    num_tokens: AtomicUsize,
    num_bytes: usize,
}

impl DraftIndex {
    fn use_it(&self) -> PyResult<Using<'_, Index>> {
        self.index.try_use().ok_or_else(|| in_use("index"))
    }

    fn note(&self, index: &Index) {
        // Relaxed: a number for metrics, which says nothing of other memory.
        self.num_tokens.store(index.num_tokens(), Ordering::Relaxed);
    }
}

#[pymethods]
impl DraftIndex {
    #[new]
    fn new(max_tokens: Number<names::MaxTokens>) -> PyResult<Self> {
        let index = Index::new(max_tokens.0).map_err(IntoPyErr::into_py_err)?;
        Ok(Self {
            num_tokens: AtomicUsize::new(0),
            num_bytes: index.num_bytes(),
            index: Exclusive::new(index),
        })
    }

    fn stream(this: Bound<'_, Self>, scope: &[u8], shares: bool) -> PyResult<DraftStream> {
        let stream = this.get().use_it()?.stream(scope, shares);
        Ok(DraftStream { index: this.unbind(), stream: Exclusive::new(Some(stream)) })
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        // Relaxed: as in `note`.
        self.num_tokens.load(Ordering::Relaxed)
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.num_bytes
    }
}

/// The text of one request.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DraftStream {
    index: Py<DraftIndex>,
    /// None once it is closed.
    stream: Exclusive<Option<Stream>>,
}

impl DraftStream {
    fn use_it(&self) -> PyResult<Using<'_, Option<Stream>>> {
        self.stream.try_use().ok_or_else(|| in_use("stream"))
    }
}

fn closed() -> PyErr {
    PyRuntimeError::new_err("the stream is closed")
}

#[pymethods]
impl DraftStream {
    fn append(&self, py: Python<'_>, tokens: Tokens) -> PyResult<()> {
        let (shared, tokens) = (self.index.get(), tokens.0);
        let (index, stream) = (&mut *shared.use_it()?, &mut *self.use_it()?);
        let stream = stream.as_mut().ok_or_else(closed)?;
        run_on_tokens(py, tokens.len(), || index.append(stream, &tokens));
        shared.note(index);
        Ok(())
    }

    fn draft(
        &self,
        max_tokens: Number<names::MaxTokens>,
    ) -> PyResult<(Vec<u32>, usize, &'static str)> {
        let (mut using, stream) = (self.index.get().use_it()?, self.use_it()?);
        let draft = using.draft(stream.as_ref().ok_or_else(closed)?, max_tokens.0);
        let source = match draft.source {
            Source::Prompt => "prompt",
            Source::Cache => "cache",
        };
        Ok((draft.tokens, draft.matched, source))
    }

    fn close(&self) -> PyResult<()> {
        let index = self.index.get();
        let (mut using, mut stream) = (index.use_it()?, self.use_it()?);
        if let Some(stream) = stream.take() {
            using.close(stream);
        }
        index.note(&using);
        Ok(())
    }
}
