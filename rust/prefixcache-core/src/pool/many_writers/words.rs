//! How the pool's words change: by one read-modify-write, as any thread may change them.
//!
//! Each reads with Acquire and writes with Release. Some could do with less; one order for all of them is easier to
//! check, and on x86-64 it costs nothing.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

use Ordering::{AcqRel, Acquire, SeqCst};

/// Stores `new` if the word is `current`; otherwise fails with what the word is.
#[inline]
pub(super) fn exchange(word: &AtomicU64, current: u64, new: u64) -> Result<(), u64> {
    word.compare_exchange(current, new, AcqRel, Acquire).map(drop)
}

/// Adds, wrapping around, and returns what the word was before.
#[inline]
pub(super) fn add(word: &AtomicU64, amount: u64) -> u64 {
    word.fetch_add(amount, AcqRel)
}

/// Adds to a short word, wrapping around.
#[inline]
pub(super) fn add_short(word: &AtomicU32, amount: u32) {
    word.fetch_add(amount, AcqRel);
}

/// Keeps this thread's later loads from running before its earlier stores: of two threads that
/// each store, fence and load what the other stored, at least one sees the other's store.
#[inline]
pub(super) fn fence() {
    crate::sync::fence(SeqCst);
}
