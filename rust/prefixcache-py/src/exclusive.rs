//! A value that one call uses at a time. Nobody ever waits for it: a second call is told so.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// A value and the mark that says whether a call is using it.
pub struct Exclusive<T> {
    in_use: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a `Using`, of which at most one exists at a time (the
// exchange in `try_use`), so sharing an `Exclusive` only ever moves the use of a `T` between threads.
unsafe impl<T: Send> Sync for Exclusive<T> {}

impl<T> Exclusive<T> {
    pub fn new(value: T) -> Self {
        Self {
            in_use: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// The value, unless another call is using it.
    pub fn try_use(&self) -> Option<Using<'_, T>> {
        // Acquire: synchronizes with the Release of the last user's drop, so its writes are seen.
        let taken = self
            .in_use
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then_some(Using { owner: self })
    }
}

/// The use of an [`Exclusive`]'s value, until it is dropped.
pub struct Using<'a, T> {
    owner: &'a Exclusive<T>,
}

impl<T> Deref for Using<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `in_use` was taken by this `Using` alone and is given back only by its drop.
        unsafe { &*self.owner.value.get() }
    }
}

impl<T> DerefMut for Using<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and `&mut self` makes this the only reference through the `Using`.
        unsafe { &mut *self.owner.value.get() }
    }
}

impl<T> Drop for Using<'_, T> {
    fn drop(&mut self) {
        // Release: this user's writes come before the next user's `try_use`.
        self.owner.in_use.store(false, Ordering::Release);
    }
}
