//! The Python classes `DraftIndex` and `DraftStream`.

use std::sync::atomic::{AtomicUsize, Ordering};

use prefixcache_serving::drafts::{Index, SizeError, Source, Stream};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;

use crate::arguments::Number;
use crate::detach::run_on_tokens;
use crate::errors::{Failure, Result, out_of_range};
use crate::exclusive::Exclusive;
use crate::names::{self, Name};
use crate::tokens::Tokens;

impl From<SizeError> for Failure {
    fn from(error: SizeError) -> Self {
        match error {
            SizeError::Memory(_) => PyMemoryError::new_err(error.to_string()).into(),
            SizeError::Tokens(_) => out_of_range(names::MaxTokens::NAME, error.to_string()),
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
    fn note(&self, index: &Index) {
        // Relaxed: a number for metrics, which says nothing of other memory.
        self.num_tokens.store(index.num_tokens(), Ordering::Relaxed);
    }
}

#[pymethods]
impl DraftIndex {
    #[new]
    fn new(max_tokens: Number<names::MaxTokens>) -> Result<Self> {
        let index = Index::new(max_tokens.0)?;
        Ok(Self {
            num_tokens: AtomicUsize::new(0),
            num_bytes: index.num_bytes(),
            index: Exclusive::new(index),
        })
    }

    fn stream(this: Bound<'_, Self>, scope: &[u8], shares: bool) -> Result<DraftStream> {
        let stream = this.get().index.use_as("index")?.stream(scope, shares);
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

fn closed() -> Failure {
    PyRuntimeError::new_err("the stream is closed").into()
}

#[pymethods]
impl DraftStream {
    fn append(&self, py: Python<'_>, tokens: Tokens) -> Result<()> {
        let (shared, tokens) = (self.index.get(), tokens.0);
        let (index, stream) =
            (&mut *shared.index.use_as("index")?, &mut *self.stream.use_as("stream")?);
        let stream = stream.as_mut().ok_or_else(closed)?;
        run_on_tokens(py, tokens.len(), || index.append(stream, &tokens));
        shared.note(index);
        Ok(())
    }

    fn draft(
        &self,
        max_tokens: Number<names::MaxTokens>,
    ) -> Result<(Vec<u32>, usize, &'static str)> {
        let mut using = self.index.get().index.use_as("index")?;
        let stream = self.stream.use_as("stream")?;
        let draft = using.draft(stream.as_ref().ok_or_else(closed)?, max_tokens.0);
        let source = match draft.source {
            Source::Prompt => "prompt",
            Source::Cache => "cache",
        };
        Ok((draft.tokens, draft.matched, source))
    }

    fn close(&self) -> Result<()> {
        let index = self.index.get();
        let mut using = index.index.use_as("index")?;
        let mut stream = self.stream.use_as("stream")?;
        if let Some(stream) = stream.take() {
            using.close(stream);
        }
        index.note(&using);
        Ok(())
    }
}
