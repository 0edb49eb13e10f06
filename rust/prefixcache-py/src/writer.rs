//! Which threads may change a cache: any, or one at a time; a second one gets an error.

use std::ops::{Deref, DerefMut};
use std::thread::{self, ThreadId};

use pyo3::exceptions::PyRuntimeError;

use crate::arguments::Word;
use crate::errors::{Failure, Result};
use crate::exclusive::{Exclusive, Using};

/// What changes a cache or a pool.
pub enum Writer<T> {
    /// The only one, lent to one call of one thread at a time.
    One(Exclusive<Lent<T>>),
    /// Each call makes its own.
    Many(Box<dyn Fn() -> T + Send + Sync>),
}

/// The only writer, and the thread that writes, once there is one.
pub struct Lent<T> {
    thread: Option<ThreadId>,
    writer: T,
}

/// A writer until it is dropped.
pub enum Writing<'a, T> {
    One(Using<'a, Lent<T>>),
    Many(T),
}

impl<T> Deref for Writing<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::One(lent) => &lent.writer,
            Self::Many(writer) => writer,
        }
    }
}

impl<T> DerefMut for Writing<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::One(lent) => &mut lent.writer,
            Self::Many(writer) => writer,
        }
    }
}

/// Which threads may change a cache: one at a time, or any.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    SingleWriter,
    Shared,
}

impl Word for Threads {
    const ARGUMENT: &'static str = "threads";
    const WORDS: &'static [(&'static str, Self)] =
        &[("single_writer", Self::SingleWriter), ("shared", Self::Shared)];
}

impl<T> Writer<T> {
    pub fn one(writer: T) -> Self {
        let thread = None;
        Self::One(Exclusive::new(Lent { thread, writer }))
    }

    pub fn many(make: impl Fn() -> T + Send + Sync + 'static) -> Self {
        Self::Many(Box::new(make))
    }

    /// Whether any thread may write at any time.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Many(_))
    }

    /// The writer; the first thread to ask for the only one is the one that has it.
    pub fn write(&self) -> Result<Writing<'_, T>> {
        let mut writing = self.pause()?;
        if let Writing::One(lent) = &mut writing {
            let this = thread::current().id();
            if *lent.thread.get_or_insert(this) != this {
                return Err(second_writer());
            }
        }
        Ok(writing)
    }

    /// The writer, whichever thread has it, for a look at the whole structure.
    pub fn pause(&self) -> Result<Writing<'_, T>> {
        match self {
            Self::One(one) => one.try_use().map(Writing::One).ok_or_else(second_writer),
            Self::Many(make) => Ok(Writing::Many(make())),
        }
    }

    /// Makes the calling thread the one that writes.
    pub fn adopt(&self) -> Result<()> {
        if let Writing::One(lent) = &mut self.pause()? {
            lent.thread = Some(thread::current().id());
        }
        Ok(())
    }
}

fn second_writer() -> Failure {
    let reason = "another thread writes: call adopt_writer() in this one when that one is done, \
                  or ask for threads=\"shared\"";
    PyRuntimeError::new_err(reason).into()
}
