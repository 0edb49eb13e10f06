//! The blocks of GGUF files: their formats, and reading one.

use std::fmt;

use prefixcache_cpu::f16::{f16_is_finite, f16_to_f32};

/// The most numbers in a block.
pub const MAX_BLOCK: usize = 256;

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

/// A block as it was read: number i is [`Block::scale`] times `codes[i]`, plus [`Block::offset`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its format.
    pub format: Format,
    /// Bits of the float16 scale of the block.
    pub d: u16,
    /// Bits of the float16 minimum: added in Q4_1 and Q5_1, subtracted in Q4_K and Q5_K.
    pub m: u16,
    /// In Q4_K and Q5_K the scale of each group of 32, in Q6_K of each group of 16; times `d`.
    pub scales: [i8; 16],
    /// In Q4_K and Q5_K the minimum of each group of 32; times `m`.
    pub minimums: [u8; 8],
    /// What is multiplied by the scale, number by number; signed in Q4_0, Q5_0, Q8_0 and Q6_K.
    pub codes: [i8; MAX_BLOCK],
}

impl Block {
    /// Reads the block that starts here.
    ///
    /// # Panics
    /// There are fewer bytes than a block has.
    pub fn read(format: Format, bytes: &[u8]) -> Self {
        let (scale, minimum) = format.halves();
        let mut block = Self {
            format,
            d: half_at(bytes, scale),
            m: minimum.map_or(0, |at| half_at(bytes, at)),
            scales: [1; 16],
            minimums: [0; 8],
            codes: [0; MAX_BLOCK],
        };
        block.read_scales(bytes);
        block.read_codes(&bytes[..format.bytes()]);
        block
    }

    fn read_scales(&mut self, bytes: &[u8]) {
        match self.format {
            Format::Q4K | Format::Q5K => {
                let packed = &bytes[4..16];
                for group in 0..4 {
                    let (low, high) = (packed[group], packed[4 + group]);
                    let upper = packed[8 + group];
                    self.scales[group] = (low & 63).cast_signed();
                    self.minimums[group] = high & 63;
                    self.scales[4 + group] = (upper & 15 | low >> 2 & 0x30).cast_signed();
                    self.minimums[4 + group] = upper >> 4 | high >> 2 & 0x30;
                }
            }
            Format::Q6K => self.scales = std::array::from_fn(|i| bytes[192 + i].cast_signed()),
            _ => {}
        }
    }

    fn read_codes(&mut self, bytes: &[u8]) {
        let mut codes = [0; MAX_BLOCK];
        let codes = &mut codes[..self.format.block()];
        match self.format {
            Format::Q4_0 => nibbles(&bytes[2..], 16, codes),
            Format::Q4_1 => nibbles(&bytes[4..], 16, codes),
            Format::Q5_0 => {
                nibbles(&bytes[6..], 16, codes);
                fifth_bits(&bytes[2..6], codes);
            }
            Format::Q5_1 => {
                nibbles(&bytes[8..], 16, codes);
                fifth_bits(&bytes[4..8], codes);
            }
            Format::Q8_0 => codes.copy_from_slice(&bytes[2..]),
            Format::Q4K => nibbles(&bytes[16..], 32, codes),
            Format::Q5K => {
                nibbles(&bytes[48..], 32, codes);
                upper_bits(&bytes[16..48], 1, codes);
            }
            Format::Q6K => {
                nibbles(&bytes[..128], 64, codes);
                let halves = codes
                    .chunks_exact_mut(128)
                    .zip(bytes[128..192].chunks_exact(32));
                halves.for_each(|(codes, bits)| upper_bits(bits, 2, codes));
            }
        }
        let zero = match self.format {
            Format::Q4_0 => 8,
            Format::Q5_0 => 16,
            Format::Q6K => 32,
            _ => 0,
        };
        for (to, code) in self.codes.iter_mut().zip(codes) {
            *to = code.wrapping_sub(zero).cast_signed();
        }
    }

    /// What number `i`'s code is multiplied by; exact.
    pub fn scale(&self, i: usize) -> f32 {
        let group = if self.format == Format::Q6K { 16 } else { 32 };
        f16_to_f32(self.d) * f32::from(self.scales[i / group])
    }

    /// What is added to number `i`'s code times its scale; exact. `None` is nothing, not even a zero.
    pub fn offset(&self, i: usize) -> Option<f32> {
        match self.format {
            Format::Q4_1 | Format::Q5_1 => Some(f16_to_f32(self.m)),
            Format::Q4K | Format::Q5K => {
                Some(-(f16_to_f32(self.m) * f32::from(self.minimums[i / 32])))
            }
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

/// The nibbles of runs of `run` bytes: the low ones of a run, then its high ones.
fn nibbles(bytes: &[u8], run: usize, codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(run).zip(codes.chunks_exact_mut(2 * run)) {
        let (low, high) = codes.split_at_mut(run);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
            *low = byte & 15;
            *high = byte >> 4;
        }
    }
}

/// Bit i of four bytes above the nibble of code i.
fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (codes, byte) in codes.chunks_exact_mut(8).zip(bytes) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code |= (byte >> i & 1) << 4;
        }
    }
}

/// `count` bits of each of 32 bytes above the nibbles of 32 codes; the next bits for the next codes.
fn upper_bits(bytes: &[u8], count: usize, codes: &mut [u8]) {
    for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
        for (code, byte) in codes.iter_mut().zip(bytes) {
            *code |= (byte >> (run * count) & ((1 << count) - 1)) << 4;
        }
    }
}
