//! A value that one call uses at a time. Nobody ever waits for it: a second call gets an error.

use std::sync::{Mutex, MutexGuard, TryLockError};

use prefixcache_core::error::Argument;

use crate::errors::{Result, in_use};

/// A value that is lent to one call at a time.
pub struct Exclusive<T>(Mutex<T>);

/// The use of an [`Exclusive`]'s value, until it is dropped.
pub type Using<'a, T> = MutexGuard<'a, T>;

impl<T> Exclusive<T> {
    pub fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// The value, unless another call is using it.
    pub fn try_use(&self) -> Option<Using<'_, T>> {
        match self.0.try_lock() {
            Ok(using) => Some(using),
            // A call that used it panicked, and its caller knows: the next one is not refused.
            Err(TryLockError::Poisoned(using)) => Some(using.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The value; fails, by the argument's name, where another call is using it.
    pub fn use_as(&self, argument: impl Into<Argument>) -> Result<Using<'_, T>> {
        self.try_use().ok_or_else(|| in_use(argument))
    }
}
