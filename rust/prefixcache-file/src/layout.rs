//! The header: what the file is for, and where its parts lie.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use prefixcache_core::error::InvalidArgument;
use prefixcache_core::id::MAX_BLOCKS;
use thiserror::Error;
use twox_hash::XxHash3_64;

/// Names the arrangement of the bytes of header and records.
pub const FORMAT_VERSION: u64 = 3;

pub(crate) const HEADER_BYTES: usize = 4096;
pub(crate) const RECORD_BYTES: usize = 64;

/// The last of the header's words that are written once: the checksum of those before it.
const CHECK: usize = 11;
/// The words that change while the file is in use.
pub(crate) const EPOCH: usize = 12;
pub(crate) const NUM_USED: usize = 13;
/// Words before a block's tokens.
pub(crate) const TOKENS_HEAD: usize = 3;
/// Words of a block's hint: their check, the owner's two, the TTL, and when it ends.
pub(crate) const HINT_WORDS: usize = 5;
const ABOUT: usize = 1024;
const MOST_ABOUT: usize = 2048;

const MAGIC: u64 = u64::from_le_bytes(*b"pfxkvfil");
const ALIGNMENT: u64 = 2 << 20;
const MAX_TENSORS: u32 = 4096;
const MAX_BLOCK_BYTES: u64 = 1 << 32;
const MAX_BLOCK_TOKENS: u32 = 256;

/// What a file is for. Two processes share content only under one `digest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Stands for all that the bytes of a block depend on besides its hash.
    pub digest: [u8; 32],
    /// KV tensors.
    pub num_tensors: u32,
    /// Bytes of a block in each of them.
    pub block_bytes: u64,
    /// The most blocks that fit, the null block counted.
    pub capacity: u64,
    /// Tokens of a block, for which there is room next to its record; 0 for none.
    pub block_tokens: u32,
    /// A line for people; at most 2048 bytes of it are kept.
    pub about: String,
}

/// Why a file is not used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A layout that no file can have.
    #[error(transparent)]
    Invalid(#[from] InvalidArgument),
    /// The system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Something else, or not a file of this program.
    #[error("it is not a KV cache file, or its header is damaged")]
    NotOurs,
    /// Written by another version of the program.
    #[error("its format is version {0}, not {FORMAT_VERSION}")]
    OtherVersion(u64),
    /// The KV in it was computed in another way.
    #[error("its KV has another layout, or was computed by another program or processor")]
    OtherLayout,
    /// It has room for fewer blocks.
    #[error("it has room for {0} blocks, fewer than the pool may have")]
    TooSmall(u64),
    /// It ends early.
    #[error("it has {0} bytes and should have {1}")]
    CutShort(u64, u64),
}

impl Layout {
    /// Fails for sizes that no file can have.
    pub(crate) fn check(&self) -> Result<(), InvalidArgument> {
        if self.is_possible() {
            return Ok(());
        }
        let reason = format!("has sizes that no file can have: {self:?}");
        Err(InvalidArgument::new("layout", reason))
    }

    fn is_possible(&self) -> bool {
        (1..=MAX_TENSORS).contains(&self.num_tensors)
            && (1..=MAX_BLOCK_BYTES).contains(&self.block_bytes)
            && (2..=MAX_BLOCKS as u64).contains(&self.capacity)
            && self.block_tokens <= MAX_BLOCK_TOKENS
            && self.try_file_bytes().is_some()
    }

    /// Words of a block's tokens and what is before them; 0 where there are none.
    pub(crate) fn token_words(&self) -> usize {
        match self.block_tokens as usize {
            0 => 0,
            count => TOKENS_HEAD + count.div_ceil(2),
        }
    }

    /// Where the hints begin, behind the records.
    pub(crate) fn hints_at(&self) -> usize {
        HEADER_BYTES + RECORD_BYTES * self.capacity as usize
    }

    /// Where the tokens begin, behind the hints.
    pub(crate) fn tokens_at(&self) -> usize {
        self.hints_at() + 8 * HINT_WORDS * self.capacity as usize
    }

    /// Bytes of header, records, hints and tokens.
    pub(crate) fn table_bytes(&self) -> usize {
        self.tokens_at() + 8 * self.token_words() * self.capacity as usize
    }

    /// From one tensor to the next, and the start of the first.
    fn stride(&self) -> u64 {
        (self.capacity * self.block_bytes).next_multiple_of(ALIGNMENT)
    }

    /// Where a tensor begins.
    pub(crate) fn tensor_at(&self, tensor: u32) -> u64 {
        let first = (self.table_bytes() as u64).next_multiple_of(ALIGNMENT);
        first + u64::from(tensor) * self.stride()
    }

    fn try_file_bytes(&self) -> Option<u64> {
        let tensors = self.stride().checked_mul(self.num_tensors.into())?;
        let all = tensors.checked_add(self.tensor_at(0))?;
        (all <= i64::MAX as u64).then_some(all)
    }

    /// Bytes from the first to the last, holes included. The layout is checked.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.tensor_at(self.num_tensors)
    }

    /// The header of a new file of this layout.
    pub(crate) fn to_header(&self) -> Box<[u8; HEADER_BYTES]> {
        let mut bytes = Box::new([0; HEADER_BYTES]);
        let about = &self.about.as_bytes()[..self.about.len().min(MOST_ABOUT)];
        bytes[ABOUT..ABOUT + about.len()].copy_from_slice(about);
        bytes[40..72].copy_from_slice(&self.digest);
        let mut put = |at: usize, word: u64| bytes.as_chunks_mut().0[at] = word.to_le_bytes();
        put(0, MAGIC);
        put(1, FORMAT_VERSION);
        put(2, self.num_tensors.into());
        put(3, self.block_bytes);
        put(4, self.capacity);
        put(9, about.len() as u64);
        put(10, self.block_tokens.into());
        let check = header_check(&bytes);
        bytes.as_chunks_mut().0[CHECK] = check.to_le_bytes();
        bytes
    }

    /// What a header says. Never panics, whatever the bytes are.
    pub(crate) fn of_header(bytes: &[u8; HEADER_BYTES]) -> Result<Self, OpenError> {
        if word(bytes, 0) != MAGIC {
            return Err(OpenError::NotOurs);
        }
        if word(bytes, 1) != FORMAT_VERSION {
            return Err(OpenError::OtherVersion(word(bytes, 1)));
        }
        if word(bytes, CHECK) != header_check(bytes) {
            return Err(OpenError::NotOurs);
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(&bytes[40..72]);
        let about = (word(bytes, 9) as usize).min(MOST_ABOUT);
        let layout = Self {
            digest,
            num_tensors: u32::try_from(word(bytes, 2)).map_err(|_| OpenError::NotOurs)?,
            block_bytes: word(bytes, 3),
            capacity: word(bytes, 4),
            block_tokens: u32::try_from(word(bytes, 10)).map_err(|_| OpenError::NotOurs)?,
            about: String::from_utf8_lossy(&bytes[ABOUT..ABOUT + about]).into_owned(),
        };
        layout.check().map_err(|_| OpenError::NotOurs)?;
        Ok(layout)
    }
}

fn word(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(bytes.as_chunks().0[at])
}

/// Of all that is written once: the words before the check, and the text.
fn header_check(bytes: &[u8; HEADER_BYTES]) -> u64 {
    let words = XxHash3_64::oneshot_with_seed(FORMAT_VERSION, &bytes[..8 * CHECK]);
    XxHash3_64::oneshot_with_seed(words, &bytes[ABOUT..ABOUT + MOST_ABOUT])
}

/// The layout of a file.
///
/// Fails for a file that is not one of this version, or that ends early.
pub fn describe(file: &File) -> Result<Layout, OpenError> {
    let len = file.metadata()?.len();
    let mut bytes = Box::new([0; HEADER_BYTES]);
    if len < HEADER_BYTES as u64 {
        return Err(OpenError::NotOurs);
    }
    file.read_exact_at(&mut bytes[..], 0)?;
    let layout = Layout::of_header(&bytes)?;
    if len < layout.file_bytes() {
        return Err(OpenError::CutShort(len, layout.file_bytes()));
    }
    Ok(layout)
}
