//! The blocks of GGUF files: their formats, and reading one.

use std::fmt;

use prefixcache_cpu::f16::{f16_is_finite, f16_to_f32};

/// The most numbers in a block.
pub const MAX_BLOCK: usize = 256;

/// Numbers whose codes are read at once.
pub const GROUP: usize = 32;

/// The codes of 32 numbers in a row, a byte each; the first is the lowest of the first word.
pub type GroupCodes = [u64; GROUP / 8];

/// A format of blocks, by its name in GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 4 bits and a scale.
    Q4_0,
    /// 4 bits, a scale and a minimum.
    Q4_1,
    /// 5 bits and a scale.
    Q5_0,
    /// 5 bits, a scale and a minimum.
    Q5_1,
    /// 8 bits and a scale.
    Q8_0,
    /// 4 bits; scales and minimums of groups of 32, of 6 bits each.
    Q4K,
    /// 5 bits; scales and minimums of groups of 32, of 6 bits each.
    Q5K,
    /// 6 bits; scales of groups of 16, of 8 bits each.
    Q6K,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 8] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Its name in GGUF.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Numbers of a block.
    pub const fn block(self) -> usize {
        match self {
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
            _ => 32,
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `inputs` numbers, which are whole blocks.
    pub const fn row_bytes(self, inputs: usize) -> usize {
        inputs / self.block() * self.bytes()
    }

    /// What is subtracted from a code as the file has it; a power of two.
    pub const fn zero(self) -> u8 {
        match self {
            Self::Q4_0 => 8,
            Self::Q5_0 => 16,
            Self::Q6K => 32,
            _ => 0,
        }
    }

    /// The codes of group `group` of the block that starts here, as the file has them.
    ///
    /// # Panics
    /// There are fewer bytes than a block has, or there is no such group.
    #[inline(always)]
    pub fn codes(self, block: &[u8], group: usize) -> GroupCodes {
        let block = &block[..self.bytes()];
        let (pair, second) = (group / 2, group % 2);
        match self {
            Self::Q4_0 => nibbles(block, 2),
            Self::Q4_1 => nibbles(block, 4),
            Self::Q5_0 => with_fifth_bits(nibbles(block, 6), block, 2),
            Self::Q5_1 => with_fifth_bits(nibbles(block, 8), block, 4),
            Self::Q8_0 => fields(block, 2, 0, 8, 0),
            Self::Q4K => fields(block, 16 + 32 * pair, 4 * second, 4, 0),
            Self::Q5K => joined(
                fields(block, 48 + 32 * pair, 4 * second, 4, 0),
                fields(block, 16, group, 1, 4),
            ),
            Self::Q6K => {
                // Of 64 bytes the low nibbles are two groups, the high ones the next two.
                let (half, quarter) = (group / 4, group % 4);
                joined(
                    fields(block, 64 * half + 32 * second, quarter / 2 * 4, 4, 0),
                    fields(block, 128 + 32 * half, 2 * quarter, 2, 4),
                )
            }
        }
    }

    /// Where the float16 numbers of a block start: its scale, and its minimum where it has one.
    const fn halves(self) -> (usize, Option<usize>) {
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => (0, None),
            Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K => (0, Some(2)),
            Self::Q6K => (208, None),
        }
    }

    /// Whether scale and minimum of the block that starts here are numbers.
    pub fn is_finite(self, block: &[u8]) -> bool {
        let (scale, minimum) = self.halves();
        let finite = |at| f16_is_finite(half_at(block, at));
        finite(scale) && minimum.is_none_or(finite)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The scales of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockScales {
    /// Bits of the float16 scale of the block.
    pub d: u16,
    /// Bits of the float16 minimum: added in Q4_1 and Q5_1, subtracted in Q4_K and Q5_K.
    pub m: u16,
    /// In Q4_K and Q5_K what `d` is multiplied by for each group of 32, in Q6_K for each group of 16.
    pub factors: [i8; 16],
    /// In Q4_K and Q5_K what `m` is multiplied by for each group of 32.
    pub minimums: [u8; 8],
}

impl BlockScales {
    /// Those of the block that starts here.
    ///
    /// # Panics
    /// There are fewer bytes than a block has.
    #[inline(always)]
    pub fn read(format: Format, bytes: &[u8]) -> Self {
        let (scale, minimum) = format.halves();
        let mut scales = Self {
            d: half_at(bytes, scale),
            m: minimum.map_or(0, |at| half_at(bytes, at)),
            factors: [1; 16],
            minimums: [0; 8],
        };
        match format {
            Format::Q4K | Format::Q5K => scales.read_groups(&bytes[4..16]),
            Format::Q6K => scales.factors = std::array::from_fn(|i| bytes[192 + i].cast_signed()),
            _ => {}
        }
        scales
    }

    /// Reads factors and minimums of 6 bits each.
    #[inline(always)]
    fn read_groups(&mut self, packed: &[u8]) {
        for group in 0..4 {
            let (low, high) = (packed[group], packed[4 + group]);
            let upper = packed[8 + group];
            self.factors[group] = (low & 63).cast_signed();
            self.minimums[group] = high & 63;
            self.factors[4 + group] = (upper & 15 | low >> 2 & 0x30).cast_signed();
            self.minimums[4 + group] = upper >> 4 | high >> 2 & 0x30;
        }
    }
}

/// A block as it was read: number i is [`Block::scale`] times `codes[i]`, plus [`Block::offset`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its format.
    pub format: Format,
    /// Its scales.
    pub scales: BlockScales,
    /// What is multiplied by the scale, number by number; signed in Q4_0, Q5_0, Q8_0 and Q6_K.
    pub codes: [i8; MAX_BLOCK],
}

impl Block {
    /// Reads the block that starts here.
    ///
    /// # Panics
    /// There are fewer bytes than a block has.
    pub fn read(format: Format, bytes: &[u8]) -> Self {
        let mut block = Self {
            format,
            scales: BlockScales::read(format, bytes),
            codes: [0; MAX_BLOCK],
        };
        block.read_codes(bytes);
        block
    }

    fn read_codes(&mut self, bytes: &[u8]) {
        let zero = self.format.zero();
        let groups = self.codes.chunks_exact_mut(GROUP);
        for (group, to) in groups.take(self.format.block() / GROUP).enumerate() {
            let codes = self.format.codes(bytes, group).map(u64::to_le_bytes);
            for (to, code) in to.iter_mut().zip(codes.as_flattened()) {
                *to = code.wrapping_sub(zero).cast_signed();
            }
        }
    }

    /// What number `i`'s code is multiplied by; exact.
    pub fn scale(&self, i: usize) -> f32 {
        let group = if self.format == Format::Q6K { 16 } else { 32 };
        f16_to_f32(self.scales.d) * f32::from(self.scales.factors[i / group])
    }

    /// What is added to number `i`'s code times its scale; exact. `None` is nothing, not even a zero.
    pub fn offset(&self, i: usize) -> Option<f32> {
        let BlockScales { m, minimums, .. } = &self.scales;
        match self.format {
            Format::Q4_1 | Format::Q5_1 => Some(f16_to_f32(*m)),
            Format::Q4K | Format::Q5K => Some(-(f16_to_f32(*m) * f32::from(minimums[i / GROUP]))),
            _ => None,
        }
    }

    /// Number `i`, rounded once.
    pub fn number(&self, i: usize) -> f32 {
        let product = self.scale(i) * f32::from(self.codes[i]);
        self.offset(i).map_or(product, |offset| product + offset)
    }
}

fn half_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Eight times the same byte.
const fn eight(byte: u8) -> u64 {
    u64::from_le_bytes([byte; 8])
}

/// Eight bytes from `at` on, the first the lowest.
#[inline(always)]
fn eight_at(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes[at..].first_chunk();
    u64::from_le_bytes(*bytes.expect("the bytes of a block"))
}

// Loops, since closures of array methods are not inlined reliably.

/// `count` bits of each of 32 bytes from bit `from` on, moved to bit `to`.
#[inline(always)]
fn fields(bytes: &[u8], at: usize, from: usize, count: usize, to: usize) -> GroupCodes {
    let mut words = GroupCodes::default();
    for (i, word) in words.iter_mut().enumerate() {
        *word = field(eight_at(bytes, at + 8 * i), from, count) << to;
    }
    words
}

/// `count` bits of each byte from bit `from` on.
#[inline(always)]
fn field(bytes: u64, from: usize, count: usize) -> u64 {
    bytes >> from & eight(u8::MAX >> (8 - count))
}

/// The nibbles of 16 bytes: the low ones, then the high ones.
#[inline(always)]
fn nibbles(bytes: &[u8], at: usize) -> GroupCodes {
    let mut words = GroupCodes::default();
    for (i, word) in words.iter_mut().enumerate() {
        *word = field(eight_at(bytes, at + 8 * (i % 2)), i / 2 * 4, 4);
    }
    words
}

/// Adds the bits of four bytes, each as the fifth one of a code.
#[inline(always)]
fn with_fifth_bits(mut codes: GroupCodes, bytes: &[u8], at: usize) -> GroupCodes {
    // Bit i of byte i.
    const DIAGONAL: u64 = 0x8040_2010_0804_0201;
    for (i, codes) in codes.iter_mut().enumerate() {
        let bits = eight(1).wrapping_mul(bytes[at + i].into()) & DIAGONAL;
        // A byte that is not zero carries into its highest bit.
        *codes |= field(bits + eight(0x7f), 7, 1) << 4;
    }
    codes
}

/// Codes, and their upper bits.
#[inline(always)]
fn joined(mut codes: GroupCodes, upper: GroupCodes) -> GroupCodes {
    for (codes, upper) in codes.iter_mut().zip(upper) {
        *codes |= upper;
    }
    codes
}
