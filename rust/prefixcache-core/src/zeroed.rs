//! Big arrays of atomics that cost nothing until they are touched.

#[cfg(any(loom, shuttle))]
pub(crate) use eager::Zeroed;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use lazy::Zeroed;

/// Types whose value of all-zero bytes is valid and equals their default.
///
/// # Safety
///
/// All-zero bytes must be a valid value, and the type must not need to be dropped.
pub(crate) unsafe trait Zeroable: Default {}

// SAFETY: zero is a valid value of every atomic integer, and its default; none has a destructor.
unsafe impl Zeroable for crate::sync::AtomicU64 {}
// SAFETY: as above.
unsafe impl Zeroable for crate::sync::AtomicU32 {}

#[cfg(not(any(loom, shuttle)))]
mod lazy {
    use super::Zeroable;
    use memmap2::MmapMut;
    use std::ops::Deref;
    use std::ptr::NonNull;

    /// A slice that starts as zeroes, on cache lines of its own, and on huge pages if it is long.
    ///
    /// Its pages exist only once they are touched. A long slice starts at the first boundary of a huge
    /// page: what is left over before it is never touched.
    ///
    /// Pools are read and written all over: with pages of 4 KiB nearly every look at a block of a pool
    /// in use walks the page tables first.
    pub(crate) struct Zeroed<T> {
        start: NonNull<T>,
        len: usize,
        _pages: MmapMut,
    }

    /// A huge page of x86-64, and of AArch64 with pages of 4 KiB.
    const HUGE_PAGE: usize = 2 << 20;

    /// Less than any page, where every mapping starts.
    const LINE: usize = 64;

    impl<T: Zeroable> Zeroed<T> {
        /// `len` zeroes, or nothing when there is no memory for them.
        pub(crate) fn new(len: usize) -> Option<Self> {
            const { assert!(align_of::<T>() <= LINE && size_of::<T>() > 0) };
            let used = len.checked_mul(size_of::<T>())?;
            let boundary = if used < HUGE_PAGE { LINE } else { HUGE_PAGE };
            let mut pages = MmapMut::map_anon(used.checked_add(boundary)?).ok()?;
            let skip = pages.as_ptr().align_offset(boundary);
            #[cfg(target_os = "linux")]
            if boundary == HUGE_PAGE {
                // A hint: refusal changes nothing but the time that accesses take.
                let whole = used / HUGE_PAGE * HUGE_PAGE;
                let _ = pages.advise_range(memmap2::Advice::HugePage, skip, whole);
            }
            let start = NonNull::new(pages[skip..].as_mut_ptr().cast())?;
            Some(Self { start, len, _pages: pages })
        }
    }

    impl<T> Deref for Zeroed<T> {
        type Target = [T];

        #[inline]
        fn deref(&self) -> &[T] {
            // SAFETY: `start` is aligned to LINE, which is enough for T; fewer than `boundary` bytes
            // were skipped, and the mapping has that many more than `len` items need; it lives as long
            // as self; it began as zeroes, which is a valid T (Zeroable), and is changed only through
            // shared references to the items.
            unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
        }
    }

    // SAFETY: the slice owns its items, so it may move to another thread when they may.
    unsafe impl<T: Send> Send for Zeroed<T> {}
    // SAFETY: it gives out only shared references to the items.
    unsafe impl<T: Sync> Sync for Zeroed<T> {}

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::sync::{AtomicU64, Ordering};

        #[test]
        fn items_start_as_zeroes_on_a_cache_line() {
            for len in [0, 1, 7, 1000, 1 << 18, (1 << 18) + 1, 1 << 20] {
                let words = Zeroed::<AtomicU64>::new(len).unwrap();
                assert_eq!(words.len(), len);
                assert_eq!(words.as_ptr() as usize % LINE, 0);
                assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
            }
        }

        #[test]
        fn a_size_that_overflows_is_refused() {
            assert!(Zeroed::<AtomicU64>::new(usize::MAX / 4).is_none());
        }
    }
}

#[cfg(any(loom, shuttle))]
mod eager {
    use super::Zeroable;
    use std::ops::Deref;

    /// The same slice for the model checkers, whose atomics must each be made.
    pub(crate) struct Zeroed<T>(Box<[T]>);

    impl<T: Zeroable> Zeroed<T> {
        pub(crate) fn new(len: usize) -> Option<Self> {
            Some(Self((0..len).map(|_| T::default()).collect()))
        }
    }

    impl<T> Deref for Zeroed<T> {
        type Target = [T];

        fn deref(&self) -> &[T] {
            &self.0
        }
    }
}
