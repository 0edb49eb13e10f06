//! Matrices that belong to someone else: rows of equal width at equal distances.

use std::any::TypeId;
use std::marker::PhantomData;
use std::ops::Range;

/// Rows to read.
#[derive(Clone, Copy)]
pub struct Rows<'a, T> {
    start: *const T,
    rows: usize,
    width: usize,
    stride: usize,
    owner: PhantomData<&'a [T]>,
}

// SAFETY: it stands for a `&[T]`, which goes to other threads when `T` may be shared.
unsafe impl<T: Sync> Send for Rows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// A slice as rows of `width`; a remainder is left out.
    pub fn new(numbers: &'a [T], width: usize) -> Self {
        let rows = numbers.len().checked_div(width).unwrap_or(0);
        // SAFETY: the rows lie in the slice, side by side.
        unsafe { Self::from_raw(numbers.as_ptr(), rows, width, width) }
    }

    /// `rows` rows of `width` numbers, one every `stride` numbers from `start`.
    ///
    /// # Safety
    /// Each of them stays readable, and nobody writes to it, while `'a` lasts.
    pub unsafe fn from_raw(start: *const T, rows: usize, width: usize, stride: usize) -> Self {
        Self { start, rows, width, stride, owner: PhantomData }
    }

    /// Number of rows.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Numbers in a row.
    #[inline(always)]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows, and numbers in a row.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.width)
    }

    /// These columns of every row.
    ///
    /// # Panics
    /// There are no such columns.
    pub fn columns(&self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.width);
        Self {
            // Wrapping: without a row it may point anywhere.
            start: self.start.wrapping_add(columns.start),
            width: columns.len(),
            ..*self
        }
    }

    /// The same rows, if they are of type `U`. So generic code calls functions that are not, which are
    /// compiled once and not in each crate that uses them.
    pub fn of_type<U: 'static>(self) -> Option<Rows<'a, U>>
    where
        T: 'static,
    {
        (TypeId::of::<T>() == TypeId::of::<U>()).then_some(Rows {
            start: self.start.cast(),
            rows: self.rows,
            width: self.width,
            stride: self.stride,
            owner: PhantomData,
        })
    }

    /// Row `row`.
    ///
    /// # Panics
    /// There is no such row.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [T] {
        assert!(row < self.rows);
        // SAFETY: the row is one of those that the maker vouched for.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.stride), self.width) }
    }
}

/// Rows to write, by several threads at once, each its own part.
pub struct RowsMut<'a, T> {
    /// Where they lie, at an address that may be written to.
    rows: Rows<'a, T>,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]`; sharing it gives no access without `part`'s promise.
unsafe impl<T: Send> Send for RowsMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for RowsMut<'_, T> {}

impl<'a, T> RowsMut<'a, T> {
    /// A slice as rows of `width`; a remainder is left out.
    pub fn new(numbers: &'a mut [T], width: usize) -> Self {
        let rows = numbers.len().checked_div(width).unwrap_or(0);
        // SAFETY: the rows lie in the slice, side by side, and it is borrowed mutably.
        unsafe { Self::from_raw(numbers.as_mut_ptr(), rows, width, width) }
    }

    /// `rows` rows of `width` numbers, one every `stride` numbers from `start`.
    ///
    /// # Safety
    /// Each of them stays writable, and nobody else reads or writes it, while `'a` lasts; and
    /// rows do not overlap.
    pub unsafe fn from_raw(start: *mut T, rows: usize, width: usize, stride: usize) -> Self {
        Self {
            // SAFETY: the caller's promise is more. Nothing is read through it but by `read`.
            rows: unsafe { Rows::from_raw(start, rows, width, stride) },
            owner: PhantomData,
        }
    }

    /// Number of rows.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows.rows
    }

    /// Numbers in a row.
    #[inline(always)]
    pub fn width(&self) -> usize {
        self.rows.width
    }

    /// Number of rows, and numbers in a row.
    pub fn shape(&self) -> (usize, usize) {
        self.rows.shape()
    }

    /// These columns of every row, for a while.
    ///
    /// # Panics
    /// There are no such columns.
    pub fn columns(&mut self, columns: Range<usize>) -> RowsMut<'_, T> {
        RowsMut { rows: self.rows.columns(columns), owner: PhantomData }
    }

    /// The same rows, if they are of type `U`: see [`Rows::of_type`].
    pub fn of_type<U: 'static>(&self) -> Option<&RowsMut<'a, U>>
    where
        T: 'static,
    {
        // SAFETY: it is the same type.
        (TypeId::of::<T>() == TypeId::of::<U>())
            .then(|| unsafe { &*std::ptr::from_ref(self).cast() })
    }

    /// The rows, to read for a while.
    pub fn read(&mut self) -> Rows<'_, T> {
        Rows { ..self.rows }
    }

    /// Columns `from..from + count` of row `row`.
    ///
    /// # Safety
    /// No other part that overlaps this one is in use.
    ///
    /// # Panics
    /// The part is not inside the matrix.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "parts are disjoint, as the caller vouches")]
    pub unsafe fn part(&self, row: usize, from: usize, count: usize) -> &mut [T] {
        let Rows { start, rows, width, stride, .. } = self.rows;
        assert!(row < rows && count <= width && from <= width - count);
        let start = start.cast_mut();
        // SAFETY: inside what the maker vouched for, and disjoint from every other part.
        unsafe { std::slice::from_raw_parts_mut(start.add(row * stride + from), count) }
    }

    /// Columns `from..from + count` of row `row`, to read.
    ///
    /// # Safety
    /// No part that overlaps this one is written while it is in use.
    ///
    /// # Panics
    /// The part is not inside the matrix.
    #[inline(always)]
    pub unsafe fn shared_part(&self, row: usize, from: usize, count: usize) -> &[T] {
        let Rows { start, rows, width, stride, .. } = self.rows;
        assert!(row < rows && count <= width && from <= width - count);
        // SAFETY: inside what the maker vouched for, and not written.
        unsafe { std::slice::from_raw_parts(start.add(row * stride + from), count) }
    }
}
