//! Which threads may change a cache: any, or one at a time, which a second one is told.

use std::thread::{self, ThreadId};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arguments::Word;
use crate::exclusive::{Exclusive, Using};

/// The right to change a cache until it is dropped.
pub type Writing<'a> = Option<Using<'a, Option<ThreadId>>>;

/// The writing thread of a single-writer cache, once there is one; nothing for a shared cache.
pub struct Writer(Option<Exclusive<Option<ThreadId>>>);

/// Which threads may change a cache: one at a time, or any.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    SingleWriter,
    Shared,
}

impl Word for Threads {
    const ARGUMENT: &'static str = "threads";
    const WORDS: &'static [(&'static str, Self)] = &[
        ("single_writer", Self::SingleWriter),
        ("shared", Self::Shared),
    ];
}

impl Writer {
    pub fn new(threads: Threads) -> Self {
        let single = threads == Threads::SingleWriter;
        Self(single.then(|| Exclusive::new(None)))
    }

    /// The right to write; the first thread to ask becomes the writer.
    pub fn write(&self) -> PyResult<Writing<'_>> {
        let mut writing = self.pause()?;
        if let Some(writer) = &mut writing {
            let this = thread::current().id();
            if *writer.get_or_insert(this) != this {
                return Err(second_writer());
            }
        }
        Ok(writing)
    }

    /// Keeps a single writer from writing, for a look at the whole structure.
    pub fn pause(&self) -> PyResult<Writing<'_>> {
        let Some(writer) = &self.0 else {
            return Ok(None);
        };
        writer.try_use().map(Some).ok_or_else(second_writer)
    }

    /// Makes the calling thread the writer.
    pub fn adopt(&self) -> PyResult<()> {
        if let Some(writer) = &mut self.pause()? {
            **writer = Some(thread::current().id());
        }
        Ok(())
    }
}

fn second_writer() -> PyErr {
    PyRuntimeError::new_err(
        "another thread writes: call adopt_writer() in this one when that one is done, \
         or ask for threads=\"shared\"",
    )
}
