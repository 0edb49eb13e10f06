//! What the kernels of either order of columns share.

use prefixcache_cpu::Lanes;

use crate::panel::{PANEL, TaskRows};

/// Bytes that are asked for before they are dequantized: that takes so much computation that
/// loads alone keep too few lines in flight from memory.
pub(super) const AHEAD: usize = 4096;

/// A panel times the rows of a task.
pub(super) struct Product<'a, E> {
    pub(super) panel: *const u8,
    pub(super) inputs: usize,
    /// Columns of the panel that are outputs.
    pub(super) used: usize,
    pub(super) rows: TaskRows<'a, E>,
}

/// What becomes of the words that blocks are dequantized to, `C` vectors of columns at a time.
pub(super) trait TakeLines<L: Lanes, const C: usize> {
    /// Takes the words of the columns at word `line` of the group.
    ///
    /// # Safety
    /// There is such a word.
    unsafe fn take(&mut self, line: usize, words: [L::V; C]);
}

/// Stores lines in the dequantized panel.
pub(super) struct Store<L> {
    pub(super) lanes: L,
    /// Where the group's first line has these columns.
    pub(super) to: *mut u32,
}

impl<L: Lanes, const C: usize> TakeLines<L, C> for Store<L> {
    #[inline(always)]
    unsafe fn take(&mut self, line: usize, words: [L::V; C]) {
        for (c, &words) in words.iter().enumerate() {
            // SAFETY: the panel has this line, as the caller vouches.
            unsafe {
                let to = self.to.add(line * PANEL + c * L::LANES);
                self.lanes.store(to.cast(), words);
            }
        }
    }
}

/// Repeats for each pair of numbers of a group, known to the compiler.
macro_rules! for_pairs {
    ($pair:ident => $body:block) => {
        for_pairs!($pair, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($pair:ident, $body:block, $($number:literal)*) => {
        $({
            const $pair: usize = $number;
            $body
        })*
    };
}
pub(super) use for_pairs;

/// The lower and the upper four bits of bytes, as numbers.
///
/// # Safety
/// `LANES` bytes are readable.
#[inline(always)]
pub(super) unsafe fn nibbles<L: Lanes>(lanes: L, from: *const u8) -> (L::V, L::V) {
    // Adding it rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    // SAFETY: the caller's promise.
    let bytes = unsafe { lanes.load_u8(from) };
    // Less than half from the upper bits: the lower ones are a part of 16.
    let near = lanes.mul_add(bytes, lanes.splat(1.0 / 16.0), lanes.splat(-7.5 / 16.0));
    let upper = lanes.sub(lanes.add(near, lanes.splat(ROUND)), lanes.splat(ROUND));
    (lanes.mul_add(upper, lanes.splat(-16.0), bytes), upper)
}
