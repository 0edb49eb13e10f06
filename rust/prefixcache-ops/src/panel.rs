//! Panels: the columns of a weight that one task computes with.

use std::mem::MaybeUninit;

use prefixcache_cpu::{Element, Rows};

/// Output columns of a panel.
pub const PANEL: usize = 64;

/// Rows that one task computes with a panel: with the panel they stay in the second-level cache.
pub const MAX_TASK_ROWS: usize = 192;

/// A row's sums for the columns of a panel.
pub type Sums = [f32; PANEL];

/// A word of each column of a panel.
#[repr(C, align(64))]
pub struct Line([MaybeUninit<u32>; PANEL]);

impl Line {
    /// One that is not written yet.
    pub const UNWRITTEN: Self = Self([MaybeUninit::uninit(); PANEL]);
}

/// The words of some lines.
///
/// # Safety
/// All of them were written.
pub unsafe fn words_of(lines: &[Line]) -> &[u32] {
    // SAFETY: a line is 64 words, which were written, as the caller vouches.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * PANEL) }
}

/// What a panel of blocks is multiplied with: some rows, as words.
#[derive(Clone, Copy)]
pub struct TaskRows<'a, E> {
    /// All rows of the product.
    pub x: Rows<'a, E>,
    /// The first of the task.
    pub first: usize,
}

impl<E: Element> TaskRows<'_, E> {
    /// The words of the task's row `row` from number `depth` on.
    #[inline(always)]
    pub fn words(&self, row: usize, depth: usize) -> *const u32 {
        self.x.row(self.first + row)[depth..].as_ptr().cast()
    }
}
