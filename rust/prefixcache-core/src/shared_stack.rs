//! What any thread leaves to one that takes all of it: the blocks of sequences that were dropped.
//!
//! Treiber's stack ("Systems Programming: Coping with Parallelism", 1986) without its pop: values are pushed one at a
//! time and taken together by one swap. So no link of a node is followed that others can still reach, and a thread
//! that is stalled anywhere keeps nobody from pushing (lock-free) or taking (wait-free).

use core::ptr::null_mut;

use crate::sync::{AtomicPtr, Fault, Ordering, planted};

use Ordering::{Acquire, Relaxed, Release};

/// Values on their way to whoever takes them.
#[derive(Debug)]
pub(crate) struct SharedStack<T> {
    top: AtomicPtr<Node<T>>,
}

#[derive(Debug)]
struct Node<T> {
    value: T,
    below: *mut Node<T>,
}

// SAFETY: values move from the threads that push to the one that takes, and no reference to one is handed out.
unsafe impl<T: Send> Send for SharedStack<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedStack<T> {}

impl<T> Default for SharedStack<T> {
    fn default() -> Self {
        Self { top: AtomicPtr::new(null_mut()) }
    }
}

impl<T> SharedStack<T> {
    /// Whether nothing waits. What another thread pushes at this moment may be overlooked.
    pub(crate) fn is_empty(&self) -> bool {
        // Relaxed: `take` acquires.
        self.top.load(Relaxed).is_null()
    }

    /// Leaves a value.
    pub(crate) fn push(&self, value: T) {
        // Relaxed: nothing is read through the pointer.
        let mut top = self.top.load(Relaxed);
        let node = Box::into_raw(Box::new(Node { value, below: top }));
        // Release: with the pointer the node is seen, and through the chain of exchanges those below.
        while let Err(now) = self.top.compare_exchange(top, node, Release, Relaxed) {
            if planted(Fault::BlindPush) {
                return self.top.store(node, Release);
            }
            top = now;
            // SAFETY: the node is this thread's until the exchange succeeds.
            unsafe { (*node).below = top };
        }
    }

    /// Takes all values, in the order in which they were pushed.
    pub(crate) fn take(&self) -> Vec<T> {
        let mut values = Vec::new();
        // Acquire: pairs with the pushes.
        let mut top = self.top.swap(null_mut(), Acquire);
        while !top.is_null() {
            // SAFETY: `push` made the pointer of a box, and since the swap this thread alone has it.
            let node = unsafe { Box::from_raw(top) };
            values.push(node.value);
            top = node.below;
        }
        values.reverse();
        values
    }
}

impl<T> Drop for SharedStack<T> {
    fn drop(&mut self) {
        self.take();
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;

    use super::*;
    use crate::sync::{in_parallel, model};

    /// Two threads leave values while a third takes what there is, and the rest at the end.
    fn pushes_with_take() {
        let stack = Arc::new(SharedStack::default());
        let pushing = [1, 2].map(|value| in_parallel(&stack, move |all| all.push(value)));
        let mut taken = stack.take();
        pushing.into_iter().for_each(|thread| thread.join().unwrap());
        taken.extend(stack.take());
        taken.sort_unstable();
        assert_eq!(taken, [1, 2], "a value was lost or doubled");
    }

    model!(pushes_with_take, fails with BlindPush("lost or doubled"));
}
