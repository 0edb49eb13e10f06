//! Rows of activations as eight-bit codes.

use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_cpu::{ByteForm, ByteKernel, ByteLanes, Element, Rows, Team};

/// Numbers that share a scale.
pub const BLOCK: usize = 32;

/// Adding it to a number below 2^22 rounds that to an integer, ties to even, in the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// A block of activations, as the kernels read it.
///
/// A block whose scale would be no normal number counts as zeros. One with a number that is infinite
/// or NaN has a scale that is NaN, which makes all outputs of its row NaN, and no other's.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct ActivationBlock {
    /// From -127 to 127.
    pub codes: [i8; BLOCK],
    /// What a code is multiplied with.
    pub scale: f32,
    /// The scale times the sum of the codes.
    pub sum: f32,
    /// Minus the sum of the codes.
    pub minus_sum: i32,
    /// Minus the sum of the codes of each half: at most 16 * 127.
    pub minus_halves: [i16; 2],
}

impl ActivationBlock {
    /// A block of equal codes 0.
    const fn of_zeros(scale: f32) -> Self {
        Self { codes: [0; BLOCK], scale, sum: scale, minus_sum: 0, minus_halves: [0; 2] }
    }

    /// [`Self::minus_halves`] as a word.
    #[inline(always)]
    pub fn minus_pair(&self) -> i32 {
        let [first, second] = self.minus_halves;
        i32::from(second) << 16 | i32::from(first) & 0xffff
    }

    /// The block of these numbers.
    #[inline(always)]
    pub fn quantized(numbers: &[f32; BLOCK]) -> Self {
        // Without their signs, the bits of numbers are in the order of the numbers, NaN last.
        let mut highest = 0;
        for number in numbers {
            highest = highest.max(number.to_bits() & (u32::MAX >> 1));
        }
        let highest = f32::from_bits(highest);
        if !highest.is_finite() {
            return Self::of_zeros(f32::NAN);
        }
        let scale = highest / 127.0;
        if scale < f32::MIN_POSITIVE {
            return Self::of_zeros(0.0);
        }
        let inverse = 127.0 / highest;
        let mut codes = [0; BLOCK];
        let mut sums = [0; 2];
        for (half, sum) in sums.iter_mut().enumerate() {
            for i in half * BLOCK / 2..(half + 1) * BLOCK / 2 {
                let code = (numbers[i] * inverse + ROUND).to_bits() as i8;
                codes[i] = code;
                *sum += i32::from(code);
            }
        }
        let [first, second] = sums;
        Self {
            codes,
            scale,
            sum: scale * (first + second) as f32,
            minus_sum: -(first + second),
            minus_halves: [-first as i16, -second as i16],
        }
    }
}

/// Quantized rows.
pub struct QuantizedRows {
    blocks: Vec<ActivationBlock>,
    blocks_per_row: usize,
    /// Blocks from one row to the next: an odd number, since rows a multiple of a page apart would share a few
    /// lines of the first cache.
    stride: usize,
}

impl QuantizedRows {
    /// Quantizes each row of x.
    ///
    /// # Errors
    /// There is no memory for them.
    ///
    /// # Panics
    /// The width is no multiple of 32.
    pub fn new<E: Element>(
        form: ByteForm,
        team: &Team,
        x: Rows<'_, E>,
    ) -> Result<Self, OutOfMemory> {
        assert!(x.width().is_multiple_of(BLOCK), "whole blocks");
        let blocks_per_row = x.width() / BLOCK;
        let stride = blocks_per_row | 1;
        let count = x.rows().checked_mul(stride).ok_or(OutOfMemory)?;
        let mut blocks = Vec::new();
        blocks.try_reserve_exact(count).map_err(|_| OutOfMemory)?;
        let to = Destination(blocks.as_mut_ptr());
        team.run_rows(x.rows(), x.width(), |rows| form.run(Quantize { x, rows, stride, to: &to }));
        // SAFETY: the tasks have written the blocks of every row, `count` in all.
        unsafe { blocks.set_len(count) };
        Ok(Self { blocks, blocks_per_row, stride })
    }

    /// The blocks of row `row`.
    ///
    /// # Panics
    /// There is no such row.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &[ActivationBlock] {
        &self.blocks[row * self.stride..][..self.blocks_per_row]
    }

    /// Blocks from one row to the next.
    #[inline(always)]
    pub fn stride(&self) -> usize {
        self.stride
    }
}

/// Where the blocks of all rows go.
struct Destination(*mut ActivationBlock);

// SAFETY: each task writes the blocks of its own rows.
unsafe impl Sync for Destination {}

/// The rows of one task.
struct Quantize<'a, E> {
    x: Rows<'a, E>,
    rows: std::ops::Range<usize>,
    stride: usize,
    to: &'a Destination,
}

impl<E: Element> ByteKernel for Quantize<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: ByteLanes>(self, _lanes: L) {
        let blocks_per_row = self.x.width() / BLOCK;
        for row in self.rows {
            let first = row * self.stride;
            for (block, from) in self.x.row(row).chunks_exact(BLOCK).enumerate() {
                let mut numbers = [0.0; BLOCK];
                for (number, from) in numbers.iter_mut().zip(from) {
                    *number = from.to_f32();
                }
                let block = first + block;
                // SAFETY: there is room for the blocks of every row, and this one is written once.
                unsafe { self.to.0.add(block).write(ActivationBlock::quantized(&numbers)) };
            }
            for unused in blocks_per_row..self.stride {
                // SAFETY: as above.
                unsafe { self.to.0.add(first + unused).write(ActivationBlock::of_zeros(0.0)) };
            }
        }
    }
}
