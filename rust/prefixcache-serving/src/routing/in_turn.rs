//! A value that calls use one after the other.

use std::sync::Mutex;

use thiserror::Error;

/// A call has panicked that was using the value: what it left may be half done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a call that was using it panicked")]
pub struct Panicked;

/// A value that is lent to one call after the other. A call that panics is the last one.
pub struct InTurn<T>(Mutex<T>);

impl<T> InTurn<T> {
    /// A value that nobody uses.
    pub fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Does `work` with the value, once no other call uses it.
    ///
    /// # Errors
    /// [`Panicked`] if a call has panicked, before this one or while it waited.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Result<R, Panicked> {
        let mut value = self.0.lock().map_err(|_| Panicked)?;
        Ok(work(&mut value))
    }
}
