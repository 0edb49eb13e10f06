//! Which threads may change a cache: any, or one at a time; a second one gets an error.

use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::thread::{self, ThreadId};

use pyo3::exceptions::PyRuntimeError;

use crate::arguments::Word;
use crate::errors::{Failure, Result};
use crate::exclusive::{Exclusive, Using};

/// What changes a cache or a pool, until that is closed: also by a call that panics, since what it leaves may be half
/// done.
pub struct Writer<T> {
    /// What it changes, for messages.
    name: &'static str,
    right: Right<T>,
    /// The end of a message, once it is closed.
    closed: OnceLock<&'static str>,
}

enum Right<T> {
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
pub struct Writing<'a, T> {
    right: RightInUse<'a, T>,
    closed: &'a OnceLock<&'static str>,
    /// Whether a panic was on its way before.
    was_panicking: bool,
}

enum RightInUse<'a, T> {
    One(Using<'a, Lent<T>>),
    Many(T),
}

impl<T> Deref for Writing<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.right {
            RightInUse::One(lent) => &lent.writer,
            RightInUse::Many(writer) => writer,
        }
    }
}

impl<T> DerefMut for Writing<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.right {
            RightInUse::One(lent) => &mut lent.writer,
            RightInUse::Many(writer) => writer,
        }
    }
}

impl<T> Drop for Writing<'_, T> {
    fn drop(&mut self) {
        if thread::panicking() && !self.was_panicking {
            let _ = self.closed.set("is closed: a call that was changing it panicked");
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
    pub fn one(name: &'static str, writer: T) -> Self {
        let thread = None;
        Self::new(name, Right::One(Exclusive::new(Lent { thread, writer })))
    }

    pub fn many(name: &'static str, make: impl Fn() -> T + Send + Sync + 'static) -> Self {
        Self::new(name, Right::Many(Box::new(make)))
    }

    fn new(name: &'static str, right: Right<T>) -> Self {
        Self { name, right, closed: OnceLock::new() }
    }

    /// Whether any thread may write at any time.
    pub fn is_shared(&self) -> bool {
        matches!(self.right, Right::Many(_))
    }

    /// Refuses every later call.
    pub fn close(&self) {
        let _ = self.closed.set("is closed");
    }

    /// Fails once it is closed.
    pub fn check_open(&self) -> Result<()> {
        let closed = |reason| PyRuntimeError::new_err(format!("{} {reason}", self.name)).into();
        self.closed.get().map_or(Ok(()), |reason| Err(closed(reason)))
    }

    /// The writer; the first thread to ask for the only one is the one that has it.
    pub fn write(&self) -> Result<Writing<'_, T>> {
        let mut writing = self.pause()?;
        if let RightInUse::One(lent) = &mut writing.right {
            let this = thread::current().id();
            if *lent.thread.get_or_insert(this) != this {
                return Err(second_writer());
            }
        }
        Ok(writing)
    }

    /// The writer, whichever thread has it, for a look at the whole structure.
    pub fn pause(&self) -> Result<Writing<'_, T>> {
        self.check_open()?;
        self.try_use().ok_or_else(second_writer)
    }

    /// The writer, where the calling thread has it, no call is using it and none has panicked.
    pub fn own(&self) -> Option<Writing<'_, T>> {
        self.check_open().ok()?;
        self.try_use().filter(|writing| match &writing.right {
            RightInUse::One(lent) => lent.thread == Some(thread::current().id()),
            RightInUse::Many(_) => true,
        })
    }

    fn try_use(&self) -> Option<Writing<'_, T>> {
        let right = match &self.right {
            Right::One(one) => RightInUse::One(one.try_use()?),
            Right::Many(make) => RightInUse::Many(make()),
        };
        let was_panicking = thread::panicking();
        Some(Writing { right, closed: &self.closed, was_panicking })
    }

    /// Makes the calling thread the one that writes.
    pub fn adopt(&self) -> Result<()> {
        if let RightInUse::One(lent) = &mut self.pause()?.right {
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
