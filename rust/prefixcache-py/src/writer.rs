//! Which threads may change a cache: any, or one at a time, which a second one is told.

use std::thread::{self, ThreadId};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arguments::Word;
use crate::exclusive::{Exclusive, Using};

/// The right to change a cache until it is dropped, and what belongs to its single writer.
pub type Writing<'a, T = ()> = Option<Using<'a, Seat<T>>>;

/// The writing thread of a single-writer cache, once there is one; nothing for a shared cache.
pub struct Writer<T = ()>(Option<Exclusive<Seat<T>>>);

/// The place of a single writer.
pub struct Seat<T> {
    thread: Option<ThreadId>,
    /// What the writer alone uses.
    pub own: T,
}

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

impl<T> Writer<T> {
    pub fn new(threads: Threads, own: T) -> Self {
        let single = threads == Threads::SingleWriter;
        Self(single.then(|| Exclusive::new(Seat { thread: None, own })))
    }

    /// Whether any thread may write at any time.
    pub fn is_shared(&self) -> bool {
        self.0.is_none()
    }

    /// The right to write; the first thread to ask becomes the writer.
    pub fn write(&self) -> PyResult<Writing<'_, T>> {
        let mut writing = self.pause()?;
        if let Some(seat) = &mut writing {
            let this = thread::current().id();
            if *seat.thread.get_or_insert(this) != this {
                return Err(second_writer());
            }
        }
        Ok(writing)
    }

    /// Keeps a single writer from writing, for a look at the whole structure.
    pub fn pause(&self) -> PyResult<Writing<'_, T>> {
        let Some(writer) = &self.0 else {
            return Ok(None);
        };
        writer.try_use().map(Some).ok_or_else(second_writer)
    }

    /// Makes the calling thread the writer.
    pub fn adopt(&self) -> PyResult<()> {
        if let Some(seat) = &mut self.pause()? {
            seat.thread = Some(thread::current().id());
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
