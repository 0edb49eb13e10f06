//! The one place that names what threads share: atomics, [`Arc`], and a cell that is written once. They are the
//! standard library's, or loom's or shuttle's when these drive the schedule. There is no lock.

#[cfg(loom)]
use loom as primitives;
#[cfg(all(shuttle, not(loom)))]
use shuttle as primitives;
#[cfg(not(any(loom, shuttle)))]
use std as primitives;

pub(crate) use primitives::hint::spin_loop;
pub(crate) use primitives::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
pub(crate) use primitives::thread::yield_now;

pub(crate) use std::sync::Arc;

#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::OnceLock;

#[cfg(any(loom, shuttle))]
pub(crate) use once_lock::OnceLock;

/// The cell for model checkers, which do not see into the standard library's. What it holds is leaked.
#[cfg(any(loom, shuttle))]
mod once_lock {
    use core::ptr::null_mut;

    use super::AtomicPtr;
    use super::Ordering::{AcqRel, Acquire};

    #[derive(Debug)]
    pub(crate) struct OnceLock<T>(AtomicPtr<T>);

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            Self(AtomicPtr::new(null_mut()))
        }

        pub(crate) fn get(&self) -> Option<&T> {
            // Acquire: pairs with `set`, for the value.
            let value = self.0.load(Acquire);
            // SAFETY: what is not null was leaked by `set`, so it lives for ever and nobody changes it.
            unsafe { value.as_ref() }
        }

        pub(crate) fn set(&self, value: T) -> Result<(), T> {
            let new = Box::into_raw(Box::new(value));
            match self.0.compare_exchange(null_mut(), new, AcqRel, Acquire) {
                Ok(_) => Ok(()),
                // SAFETY: it is the box of above, which nobody else has seen.
                Err(_) => Err(*unsafe { Box::from_raw(new) }),
            }
        }

        pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
            if self.get().is_none() {
                let _ = self.set(make());
            }
            self.get().expect("it was set, here or elsewhere")
        }
    }
}

/// A value on cache lines of its own, so that writes to its neighbours do not slow its readers.
///
/// 128 bytes, as the prefetcher of current x86 processors fetches lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct OwnLine<T>(pub(crate) T);

/// Asks the processor to fetch the cache line of `value`, without waiting for it.
#[inline]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch reads nothing that the program can observe and faults on no address; this
    // one is moreover the address of a live reference. SSE, which has it, is part of x86_64.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch(core::ptr::from_ref(value).cast::<i8>(), _MM_HINT_T0);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = value;
}

/// Mistakes that tests put into the code, to show that the models would find them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The head passes a slot that is reserved and not yet written.
    PassPending,
    /// A release publishes the slot before the block's state.
    SlotBeforeState,
    /// A release writes its slot though its block may have left and the slot been reused.
    BlindSlotStore,
    /// The compactor moves a block to a slot before it makes the slot pending.
    MoveUnopened,
    /// The compactor moves a block without telling the count of the slot's segment.
    SkipReopened,
    /// The last two holders both believe that they are not the last.
    ForgetLastHolder,
    /// An eviction leaves the block hittable until its index entry is gone.
    EvictHashed,
    /// A pop of the free stack leaves the tag as it was.
    KeepTag,
    /// Blocks that were never handed out are taken though another thread has taken some since.
    BlindFresh,
    /// An insertion counts the buckets that it passed only after its entry stands.
    CountLate,
    /// A removal empties the entry without looking whether an insertion has taken its place.
    BlindRemoval,
    /// An insertion takes the place of an entry and leaves the counts of the buckets that it passed.
    KeepCounts,
    /// A touch believes the index without looking at the block again.
    SkipRecheck,
    /// A registration takes the epoch of now instead of the one its KV was computed in.
    EpochOfNow,
    /// A registration looks for a duplicate before its own entry stands.
    LookEarly,
    /// A registration has its final number before its entry stands.
    NumberEarly,
    /// A call takes or gives back blocks without looking whether a resize is running.
    EnterResize,
    /// A registration does not look whether its block left the pool meanwhile.
    RegisterRetired,
    /// Blocks that a resize takes out of the pool keep their content.
    KeepRetired,
    /// Content is found in the block that it moves to before it was copied there.
    MoveEarly,
    /// A lookup does not look again at an entry that changed while it looked at its block.
    LookOnce,
    /// A move does not look whether its block was touched since it began.
    BlindMove,
    /// A commit takes a credit for each key, hit or miss, for as long as it looks.
    CreditsForMisses,
    /// A commit that fails half way keeps the hits that it has taken.
    KeepHitsOfFailure,
    /// A demotion takes credits for all blocks that it may move, whether they are there or not.
    GreedyDemotion,
    /// A demotion stores the block's state without looking whether it has changed.
    BlindDemotion,
    /// A block loses its content by a store that does not look whether its state has changed.
    BlindBlank,
    /// An eviction takes a block for the one at its place without looking in which line it stands now.
    IgnoreClass,
    /// A block gets another class by a store that does not look whether its state has changed.
    BlindClass,
    /// The turn of a slot of evictions ends before the record stands in it.
    PublishEarly,
    /// A record of a loss takes the place of one that nobody has read.
    OverwriteRecord,
    /// Who loses a copy looks for others though its own may not be erased for them yet.
    LookBeforeErased,
    /// A thread that leaves a value does not look whether another has.
    BlindPush,
    /// A record keeps its number while its content changes.
    KeepNumber,
    /// A call that ends the order of evictions along a prompt does not note it.
    KeepOrder,
}

/// Whether `fault` is planted: never but in a test that asks for it.
#[inline]
pub(crate) fn planted(fault: Fault) -> bool {
    #[cfg(test)]
    return faults::PLANTED.get() == Some(fault);
    #[cfg(not(test))]
    {
        let _ = fault;
        false
    }
}

#[cfg(test)]
pub(crate) mod faults {
    use std::cell::Cell;

    use super::Fault;

    thread_local! {
        /// loom and shuttle run all threads of a model on the thread of its test.
        pub(super) static PLANTED: Cell<Option<Fault>> = const { Cell::new(None) };
    }

    #[cfg(loom)]
    pub(crate) fn any() -> bool {
        PLANTED.get().is_some()
    }

    /// Plants a fault for the rest of the test.
    pub(crate) fn plant(fault: Fault) {
        PLANTED.set(Some(fault));
    }
}

/// Checks all interleavings of `model` with up to two preemptions, or LOOM_MAX_PREEMPTIONS of them.
#[cfg(all(test, loom))]
pub(crate) fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(2));
    builder.max_branches = 20_000;
    builder.check(model);
}

/// Starts a thread of a model that has a part in what is shared.
#[cfg(all(test, loom))]
pub(crate) fn in_parallel<S: 'static, T: 'static>(
    shared: &loom::sync::Arc<S>,
    work: impl FnOnce(&S) -> T + 'static,
) -> loom::thread::JoinHandle<T> {
    let shared = shared.clone();
    loom::thread::spawn(move || work(&shared))
}

/// Tests all interleavings of a function, and that each of these faults fails it with this message.
#[cfg(all(test, loom))]
macro_rules! model {
    ($model:ident $(, fails with $($fault:ident($message:literal)),+)?) => {
        mod $model {
            #[test]
            fn holds() {
                crate::sync::check(super::$model);
            }

            $($(
                #[test]
                #[should_panic(expected = $message)]
                #[expect(non_snake_case, reason = "it is the fault's name")]
                fn $fault() {
                    crate::sync::faults::plant(crate::sync::Fault::$fault);
                    crate::sync::check(super::$model);
                }
            )+)?
        }
    };
}
#[cfg(all(test, loom))]
pub(crate) use model;
