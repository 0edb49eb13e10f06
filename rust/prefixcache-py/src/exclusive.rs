//! A value that one call uses at a time. Nobody ever waits for it: a second call gets an error.

use std::sync::{Mutex, MutexGuard, TryLockError};

use prefixcache_core::error::Argument;

use crate::errors::{Failure, Result, in_use, panicked};

/// A value that is lent to one call at a time. A call that panics is the last one: what it leaves may be half done.
pub struct Exclusive<T>(Mutex<T>);

/// The use of an [`Exclusive`]'s value, until it is dropped.
pub type Using<'a, T> = MutexGuard<'a, T>;

impl<T> Exclusive<T> {
    pub fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// The value; none where another call is using it, or has panicked.
    pub fn try_use(&self) -> Option<Using<'_, T>> {
        self.0.try_lock().ok()
    }

    /// Fails, by the argument's name, where a call has panicked that was using the value.
    pub fn check(&self, argument: impl Into<Argument>) -> Result<()> {
        if self.0.is_poisoned() { Err(panicked(argument)) } else { Ok(()) }
    }

    /// The value; fails, by the argument's name, where another call is using it or has panicked.
    pub fn use_as(&self, argument: impl Into<Argument>) -> Result<Using<'_, T>> {
        self.0.try_lock().map_err(|error| unusable(error, argument))
    }
}

/// Why a lock was not to be had, by the name of what it is for.
pub fn unusable<G>(error: TryLockError<G>, argument: impl Into<Argument>) -> Failure {
    match error {
        TryLockError::WouldBlock => in_use(argument),
        TryLockError::Poisoned(_) => panicked(argument),
    }
}
