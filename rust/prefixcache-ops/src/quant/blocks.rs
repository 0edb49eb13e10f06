//! The blocks of GGUF files: their formats, and reading one.

use std::fmt;

use prefixcache_cpu::CodeTable;
use prefixcache_cpu::f16::{e8m0_to_f32, f16_is_finite, f16_to_f32};

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
    /// 2 bits; scales and minimums of groups of 16, of 4 bits each.
    Q2K,
    /// 3 bits; scales of groups of 16, of 6 bits each.
    Q3K,
    /// 4 bits, which name one of 16 numbers, and a scale.
    IQ4NL,
    /// 4 bits, which name one of 16 numbers; scales of groups of 32, of 6 bits each.
    IQ4XS,
    /// 4 bits, which name one of 16 numbers, and a scale that is a power of two.
    MXFP4,
}

/// What the codes of a format count.
#[derive(Clone, Copy)]
enum Codes {
    /// They are the numbers.
    Unsigned,
    /// They are the numbers plus a power of two.
    Above(u8),
    /// The numbers in two's complement.
    Signed,
    /// They name numbers of a table.
    Of(&'static CodeTable),
}

/// Which scales a format has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scales {
    /// A scale for each block, a float16.
    Plain,
    /// A scale for each block, the exponent of a power of two.
    PowerOfTwo,
    /// A scale and a minimum for each block.
    Minimum,
    /// A scale for each block, times that of each group of 32.
    Group,
    /// A scale and a minimum for each block, times those of each group of 32.
    GroupMinimum,
    /// A scale for each block, times that of each group of 16.
    Sixteens,
    /// A scale and a minimum for each block, times those of each group of 16.
    SixteenMinimums,
}

impl Scales {
    /// Whether there are minimums.
    pub(crate) const fn have_minimums(self) -> bool {
        matches!(self, Self::Minimum | Self::GroupMinimum | Self::SixteenMinimums)
    }

    /// Bytes that are kept of a block's own scale and minimum.
    pub(crate) const fn block_bytes(self) -> usize {
        match self {
            Self::PowerOfTwo => 1,
            _ if self.have_minimums() => 4,
            _ => 2,
        }
    }

    /// Bytes that are kept of the scales and minimums of a group of 32.
    pub(crate) const fn group_bytes(self) -> usize {
        match self {
            Self::Plain | Self::PowerOfTwo | Self::Minimum => 0,
            Self::Group => 1,
            Self::GroupMinimum | Self::Sixteens | Self::SixteenMinimums => 2,
        }
    }
}

/// What a format is.
struct Row {
    name: &'static str,
    /// Numbers and bytes of a block.
    size: (usize, usize),
    /// Bits of a code.
    bits: u32,
    codes: Codes,
    scales: Scales,
    /// Where the scale of a block is; its minimum follows.
    scale_at: usize,
}

/// IQ4's numbers, which lie closer around zero.
static IQ4: CodeTable =
    CodeTable::new([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]);
/// The numbers of E2M1, twice; half of the scale is multiplied by them.
static E2M1: CodeTable = CodeTable::new([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);

impl Format {
    /// All formats.
    pub const ALL: [Self; 13] = {
        use Format::*;
        [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K, Q2K, Q3K, IQ4NL, IQ4XS, MXFP4]
    };

    /// Whether most files are made of it. For these more kernels are compiled, where one for any number
    /// of rows would be slower.
    pub(crate) const fn is_common(self) -> bool {
        use Format::{Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0};
        matches!(self, Q4_0 | Q4_1 | Q8_0 | Q4K | Q5K | Q6K)
    }

    const fn row(self) -> Row {
        use Codes::{Above, Of, Signed, Unsigned};
        use Scales::{Group, GroupMinimum, Minimum, Plain, PowerOfTwo, SixteenMinimums, Sixteens};
        let (name, size, bits, codes, scales, scale_at) = match self {
            Self::Q4_0 => ("Q4_0", (32, 18), 4, Above(8), Plain, 0),
            Self::Q4_1 => ("Q4_1", (32, 20), 4, Unsigned, Minimum, 0),
            Self::Q5_0 => ("Q5_0", (32, 22), 5, Above(16), Plain, 0),
            Self::Q5_1 => ("Q5_1", (32, 24), 5, Unsigned, Minimum, 0),
            Self::Q8_0 => ("Q8_0", (32, 34), 8, Signed, Plain, 0),
            Self::Q4K => ("Q4_K", (256, 144), 4, Unsigned, GroupMinimum, 0),
            Self::Q5K => ("Q5_K", (256, 176), 5, Unsigned, GroupMinimum, 0),
            Self::Q6K => ("Q6_K", (256, 210), 6, Above(32), Sixteens, 208),
            Self::Q2K => ("Q2_K", (256, 84), 2, Unsigned, SixteenMinimums, 80),
            Self::Q3K => ("Q3_K", (256, 110), 3, Above(4), Sixteens, 108),
            Self::IQ4NL => ("IQ4_NL", (32, 18), 4, Of(&IQ4), Plain, 0),
            Self::IQ4XS => ("IQ4_XS", (256, 136), 4, Of(&IQ4), Group, 0),
            Self::MXFP4 => ("MXFP4", (32, 17), 4, Of(&E2M1), PowerOfTwo, 0),
        };
        Row { name, size, bits, codes, scales, scale_at }
    }

    /// Its name in GGUF.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Numbers of a block.
    pub const fn block(self) -> usize {
        self.row().size.0
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        self.row().size.1
    }

    /// Bytes of a row of `inputs` numbers, which are whole blocks.
    pub const fn row_bytes(self, inputs: usize) -> usize {
        inputs / self.block() * self.bytes()
    }

    /// Bits of a code.
    pub(crate) const fn bits(self) -> u32 {
        self.row().bits
    }

    /// Which scales it has.
    pub(crate) const fn scales(self) -> Scales {
        self.row().scales
    }

    /// What is subtracted from a code as the file has it; a power of two.
    pub const fn zero(self) -> u8 {
        match self.row().codes {
            Codes::Above(zero) => zero,
            _ => 0,
        }
    }

    /// Whether codes less [`Self::zero`] are numbers of both signs.
    pub(crate) const fn is_signed(self) -> bool {
        matches!(self.row().codes, Codes::Above(_) | Codes::Signed)
    }

    /// The numbers that codes name, where they do.
    pub(crate) const fn table(self) -> Option<&'static CodeTable> {
        match self.row().codes {
            Codes::Of(table) => Some(table),
            _ => None,
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
            Self::Q4_0 | Self::IQ4NL => nibbles(block, 2),
            Self::MXFP4 => nibbles(block, 1),
            Self::IQ4XS => nibbles(block, 8 + 16 * group),
            // Four groups of two bits in 32 bytes.
            Self::Q2K => fields(block, 16 + 32 * (group / 4), 2 * (group % 4), 2, 0),
            Self::Q3K => joined(
                fields(block, 32 + 32 * (group / 4), 2 * (group % 4), 2, 0),
                fields(block, 0, group, 1, 2),
            ),
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

    /// Where scale and minimum of a block are.
    const fn scales_at(self) -> (usize, Option<usize>) {
        let Row { scales, scale_at, .. } = self.row();
        let minimum = if scales.have_minimums() { Some(scale_at + 2) } else { None };
        (scale_at, minimum)
    }

    /// Whether scale and minimum of the block that starts here are numbers, and the block's numbers too.
    pub fn is_finite(self, block: &[u8]) -> bool {
        let (scale, minimum) = self.scales_at();
        let finite = |at| match self.scales() {
            Scales::PowerOfTwo => block[at] <= MOST_E8M0,
            _ => f16_is_finite(half_at(block, at)),
        };
        finite(scale) && minimum.is_none_or(finite)
    }
}

/// The largest exponent of MXFP4 whose largest number is a number in `f32`; 255 is NaN.
const MOST_E8M0: u8 = 252;

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The scales of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockScales {
    /// Bits of the scale of the block: a float16, or the exponent of a power of two.
    pub d: u16,
    /// Bits of the float16 minimum: added in Q4_1 and Q5_1, subtracted in Q2_K, Q4_K and Q5_K.
    pub m: u16,
    /// What `d` is multiplied by, in Q4_K, Q5_K and IQ4_XS for each group of 32, in Q2_K, Q3_K and Q6_K
    /// for each group of 16.
    pub factors: [i8; 16],
    /// What `m` is multiplied by, in Q4_K and Q5_K for each group of 32, in Q2_K for each group of 16.
    pub minimums: [u8; 16],
}

impl BlockScales {
    /// Those of the block that starts here.
    ///
    /// # Panics
    /// There are fewer bytes than a block has.
    #[inline(always)]
    pub fn read(format: Format, bytes: &[u8]) -> Self {
        let (scale, minimum) = format.scales_at();
        let mut scales = Self {
            d: match format.scales() {
                Scales::PowerOfTwo => bytes[scale].into(),
                _ => half_at(bytes, scale),
            },
            m: minimum.map_or(0, |at| half_at(bytes, at)),
            factors: [1; 16],
            minimums: [0; 16],
        };
        match format {
            Format::Q4K | Format::Q5K => scales.read_groups(&bytes[4..16]),
            Format::Q6K => scales.factors = std::array::from_fn(|i| bytes[192 + i].cast_signed()),
            Format::Q2K => {
                scales.factors = std::array::from_fn(|i| (bytes[i] & 15).cast_signed());
                scales.minimums = std::array::from_fn(|i| bytes[i] >> 4);
            }
            Format::Q3K => {
                scales.factors = std::array::from_fn(|i| {
                    let low = bytes[96 + i % 8] >> (i / 8 * 4) & 15;
                    let upper = bytes[104 + i % 4] >> (i / 4 * 2) & 3;
                    (low | upper << 4).cast_signed() - 32
                });
            }
            Format::IQ4XS => {
                let upper = half_at(bytes, 2);
                for (group, factor) in scales.factors[..8].iter_mut().enumerate() {
                    let low = bytes[4 + group / 2] >> (group % 2 * 4) & 15;
                    let upper = (upper >> (2 * group) & 3) as u8;
                    *factor = (low | upper << 4).cast_signed() - 32;
                }
            }
            _ => {}
        }
        scales
    }

    /// What is kept of a group: the first [`Scales::group_bytes`] of these.
    #[inline(always)]
    pub(crate) fn of_group(&self, scales: Scales, group: usize) -> [u8; 2] {
        let Self { factors, minimums, .. } = self;
        match scales {
            Scales::Plain | Scales::PowerOfTwo | Scales::Minimum => [0; 2],
            Scales::Group | Scales::GroupMinimum => {
                [factors[group].cast_unsigned(), minimums[group]]
            }
            Scales::Sixteens | Scales::SixteenMinimums => {
                [2 * group, 2 * group + 1].map(|i| factors[i].cast_unsigned() | minimums[i] << 4)
            }
        }
    }

    /// What `d` stands for.
    pub fn scale(&self, format: Format) -> f32 {
        match format.scales() {
            Scales::PowerOfTwo => e8m0_to_f32(self.d as u8),
            _ => f16_to_f32(self.d),
        }
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
    /// What is multiplied by the scale, number by number.
    pub codes: [i8; MAX_BLOCK],
}

impl Block {
    /// Reads the block that starts here.
    ///
    /// # Panics
    /// There are fewer bytes than a block has.
    pub fn read(format: Format, bytes: &[u8]) -> Self {
        let mut block =
            Self { format, scales: BlockScales::read(format, bytes), codes: [0; MAX_BLOCK] };
        block.read_codes(bytes);
        block
    }

    fn read_codes(&mut self, bytes: &[u8]) {
        let zero = self.format.zero();
        let groups = self.codes.chunks_exact_mut(GROUP);
        for (group, to) in groups.take(self.format.block() / GROUP).enumerate() {
            let codes = self.format.codes(bytes, group).map(u64::to_le_bytes);
            for (to, code) in to.iter_mut().zip(codes.as_flattened()) {
                *to = match self.format.table() {
                    Some(table) => table.codes[usize::from(*code)],
                    None => code.wrapping_sub(zero).cast_signed(),
                };
            }
        }
    }

    /// What number `i`'s code is multiplied by; exact.
    pub fn scale(&self, i: usize) -> f32 {
        let group = match self.format.scales() {
            Scales::Sixteens | Scales::SixteenMinimums => 16,
            _ => GROUP,
        };
        self.scales.scale(self.format) * f32::from(self.scales.factors[i / group])
    }

    /// What is added to number `i`'s code times its scale; exact. `None` is nothing, not even a zero.
    pub fn offset(&self, i: usize) -> Option<f32> {
        let BlockScales { m, minimums, .. } = &self.scales;
        match self.format.scales() {
            Scales::Minimum => Some(f16_to_f32(*m)),
            Scales::GroupMinimum => Some(-(f16_to_f32(*m) * f32::from(minimums[i / GROUP]))),
            Scales::SixteenMinimums => Some(-(f16_to_f32(*m) * f32::from(minimums[i / 16]))),
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
