//! What the kernels of either order of columns share.

use std::marker::PhantomData;

use prefixcache_cpu::{Element, Lanes};

use super::blocks::Scales;
use super::layout::{Layout, table};
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

/// Sums of `H` rows and `C` vectors.
pub(super) struct Multiply<L: Lanes, E, const H: usize, const C: usize> {
    pub(super) lanes: L,
    /// The words of the group.
    pub(super) rows: [*const u32; H],
    pub(super) sums: [[L::V; C]; H],
    pub(super) element: PhantomData<E>,
}

impl<L: Lanes, E: Element, const H: usize, const C: usize> TakeLines<L, C>
    for Multiply<L, E, H, C>
{
    #[inline(always)]
    unsafe fn take(&mut self, line: usize, words: [L::V; C]) {
        // By references: to iterate over arrays themselves keeps the sums in memory.
        for r in 0..H {
            // SAFETY: the row has this word, as the caller vouches.
            let x = unsafe { self.rows[r].add(line).read_unaligned() };
            let x = self.lanes.splat_word(x);
            for (sum, &words) in self.sums[r].iter_mut().zip(&words) {
                *sum = self.lanes.in_register(E::dot(self.lanes, *sum, words, x));
            }
        }
    }
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

/// Evaluates an expression with a constant for the bits of a field.
macro_rules! with_field {
    ($bits:expr, $BITS:ident => $body:expr) => {
        with_field!($bits, $BITS, $body, 2 3 4 5 6)
    };
    ($bits:expr, $BITS:ident, $body:expr, $($bit:literal)*) => {
        match $bits {
            $($bit => {
                const $BITS: u32 = $bit;
                $body
            })*
            _ => {
                const $BITS: u32 = 8;
                $body
            }
        }
    };
}
pub(super) use with_field;

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

/// The numbers that codes are, from bit `at` on of the words at `from`; the bits that follow stand `line` words on.
///
/// # Safety
/// A vector is readable at both, as far as it has such bits.
#[inline(always)]
pub(super) unsafe fn numbers<F: Layout, L: Lanes>(
    lanes: L,
    from: *const u32,
    line: usize,
    mut at: u32,
    signed: bool,
) -> L::V {
    // SAFETY: the caller's promise.
    let mut words = unsafe { lanes.load(from.cast()) };
    if at + F::BITS > 32 {
        // SAFETY: as above.
        let next = unsafe { lanes.load(from.add(line).cast()) };
        words = lanes.join(words, next, at);
        at = 0;
    }
    if F::TABLE.is_some() {
        return lanes.lookup(table::<F>(), words, at);
    }
    with_field!(F::BITS, BITS => match signed {
        true => lanes.field::<BITS, true>(words, at),
        false => lanes.field::<BITS, false>(words, at),
    })
}

/// The scales of a vector of columns, and what is added to products where the format has minimums: of the first 16 of the
/// depth, and of the others. `header` and `group` are where those of `width` columns start.
///
/// # Safety
/// The columns from `column` on are there, a vector of them.
#[inline(always)]
pub(super) unsafe fn scales<F: Layout, L: Lanes>(
    lanes: L,
    header: *const u8,
    group: *const u8,
    width: usize,
    column: usize,
) -> [[L::V; 2]; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let half =
            |start: usize| lanes.load_f16(header.add(start * width).cast::<u16>().add(column));
        let byte = |start: usize| group.add(start * width + column);
        let d = match F::SCALES {
            Scales::PowerOfTwo => lanes.load_e8m0(header.add(column)),
            _ => half(0),
        };
        let none = [lanes.splat(0.0); 2];
        match F::SCALES {
            Scales::Plain | Scales::PowerOfTwo => [[d; 2], none],
            Scales::Group => [[lanes.mul(d, lanes.load_i8(byte(0).cast())); 2], none],
            Scales::Minimum => [[d; 2], [half(2); 2]],
            Scales::GroupMinimum => {
                let scale = lanes.mul(d, lanes.load_u8(byte(0)));
                let offset = lanes.mul(half(2), lanes.load_u8(byte(1)));
                [[scale; 2], [offset; 2]]
            }
            Scales::Sixteens => {
                let [first, second] =
                    [lanes.load_i8(byte(0).cast()), lanes.load_i8(byte(1).cast())];
                [[lanes.mul(d, first), lanes.mul(d, second)], none]
            }
            Scales::SixteenMinimums => {
                let minimum = half(2);
                let [mut scales, mut offsets] = [[d; 2]; 2];
                // A closure is not inlined here, and then runs without the form's instructions.
                for sixteen in 0..2 {
                    let (scale, factor) = nibbles(lanes, byte(sixteen));
                    scales[sixteen] = lanes.mul(d, scale);
                    offsets[sixteen] = lanes.mul(minimum, factor);
                }
                [scales, offsets]
            }
        }
    }
}

/// The lower and the upper four bits of bytes, as numbers.
///
/// # Safety
/// `LANES` bytes are readable.
#[inline(always)]
unsafe fn nibbles<L: Lanes>(lanes: L, from: *const u8) -> (L::V, L::V) {
    // Adding it rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    // SAFETY: the caller's promise.
    let bytes = unsafe { lanes.load_u8(from) };
    // Less than half from the upper bits: the lower ones are a part of 16.
    let near = lanes.mul_add(bytes, lanes.splat(1.0 / 16.0), lanes.splat(-7.5 / 16.0));
    let upper = lanes.sub(lanes.add(near, lanes.splat(ROUND)), lanes.splat(ROUND));
    (lanes.mul_add(upper, lanes.splat(-16.0), bytes), upper)
}
