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
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ops::Deref;
    use std::ptr::NonNull;

    /// A slice that starts as zeroes, on cache lines of its own, and on huge pages if it is long.
    ///
    /// The system hands out big zeroed pieces as pages that exist only once touched, but only when
    /// asked for no more than its usual alignment: so this asks for a cache line (or a huge page) more
    /// than it needs and starts at the first boundary. What is left over is never touched.
    ///
    /// Pools are read and written all over: with pages of 4 KiB nearly every look at a block of a pool
    /// in use walks the page tables first.
    pub(crate) struct Zeroed<T> {
        start: NonNull<T>,
        len: usize,
        piece: NonNull<u8>,
        layout: Layout,
    }

    const LINE: usize = 64;

    /// A huge page of x86-64, and of AArch64 with pages of 4 KiB.
    const HUGE_PAGE: usize = 2 << 20;

    impl<T: Zeroable> Zeroed<T> {
        /// `len` zeroes, or nothing when there is no memory for them.
        pub(crate) fn new(len: usize) -> Option<Self> {
            const { assert!(align_of::<T>() <= LINE && size_of::<T>() > 0) };
            let used = len.checked_mul(size_of::<T>())?;
            let boundary = if used < HUGE_PAGE { LINE } else { HUGE_PAGE };
            let layout = Layout::from_size_align(used.checked_add(boundary)?, 16).ok()?;
            // SAFETY: the layout is not empty: it has at least LINE bytes.
            let piece = NonNull::new(unsafe { alloc_zeroed(layout) })?;
            let skip = piece.align_offset(boundary);
            // SAFETY: `align_offset` skips fewer than `boundary` bytes, and the piece has that many more
            // than the items need, so the start and all items lie within it.
            let start = unsafe { piece.add(skip) };
            if boundary == HUGE_PAGE {
                // SAFETY: `start` is on a page boundary, and the piece, which is this slice's alone,
                // has `used` bytes from there on.
                unsafe { advise_huge_pages(start, used / HUGE_PAGE * HUGE_PAGE) };
            }
            Some(Self {
                start: start.cast(),
                len,
                piece,
                layout,
            })
        }
    }

    /// Asks for huge pages where the system gives them only to who asks. A hint: refusal changes nothing
    /// but the time that accesses take.
    ///
    /// # Safety
    ///
    /// `start` must be on a page boundary, and `len` bytes from there on the caller's.
    unsafe fn advise_huge_pages(start: NonNull<u8>, len: usize) {
        #[cfg(all(target_os = "linux", not(miri)))]
        // SAFETY: by this function's contract; the advice changes no content of the pages.
        unsafe {
            libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
        }
        #[cfg(not(all(target_os = "linux", not(miri))))]
        let _ = (start, len);
    }

    impl<T> Deref for Zeroed<T> {
        type Target = [T];

        #[inline]
        fn deref(&self) -> &[T] {
            // SAFETY: `start` is aligned to LINE, which is enough for T; `len` items lie within the
            // piece, which lives as long as self; they were zeroed, which is a valid T (Zeroable),
            // and from then on changed only through shared references.
            unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
        }
    }

    impl<T> Drop for Zeroed<T> {
        fn drop(&mut self) {
            // SAFETY: the piece was allocated with this layout and is freed only here; a Zeroable
            // item needs no drop.
            unsafe { dealloc(self.piece.as_ptr(), self.layout) };
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
