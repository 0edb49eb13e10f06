//! Names of blocks in a recording: hashes under a key, which say nothing to whoever lacks the key.
//!
//! A recording has them in place of the cache's own hashes, which anybody can compute from a known prompt.
//! `docs/reference/recording.md` specifies them.

use std::fmt::{self, Write};

use prefixcache_core::error::InvalidArgument;
use prefixcache_core::policy::{Chain, NameBlocks};

use crate::lines::Fault;

/// Hexadecimal digits of a name.
const DIGITS: usize = 16;

/// The pseudonyms of blocks under one key.
#[derive(Clone)]
pub struct Pseudonyms {
    key: [u8; 32],
    block_size: usize,
}

impl fmt::Debug for Pseudonyms {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Pseudonyms").finish_non_exhaustive()
    }
}

impl Pseudonyms {
    /// Pseudonyms under a key that is used for nothing else. Fails for blocks without tokens.
    pub fn new(key: [u8; 32], block_size: usize) -> Result<Self, InvalidArgument> {
        if block_size == 0 {
            let reason = "must be at least 1, not 0";
            return Err(InvalidArgument::new("block_size", reason));
        }
        Ok(Self { key, block_size })
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The chains behind each of the full blocks of `tokens`, which follow those that `chain` stands for.
    pub fn extend(&self, mut chain: Chain, tokens: &[u32]) -> impl Iterator<Item = Chain> {
        tokens.chunks_exact(self.block_size).map(move |block| {
            chain = self.next(&chain, block);
            chain
        })
    }
}

impl NameBlocks for Pseudonyms {
    fn begin(&self, salt: Option<&str>) -> Chain {
        let mut bytes = vec![u8::from(salt.is_some())];
        bytes.extend_from_slice(salt.unwrap_or_default().as_bytes());
        blake3::keyed_hash(&self.key, &bytes).into()
    }

    fn next(&self, before: &Chain, tokens: &[u32]) -> Chain {
        let mut bytes = before.to_vec();
        bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        blake3::keyed_hash(&self.key, &bytes).into()
    }
}

/// Appends the name of the block that a chain ends with.
pub fn write(chain: &Chain, names: &mut String) {
    let [a, b, c, d, e, f, g, h, ..] = *chain;
    let name = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
    write!(names, "{name:0DIGITS$x}").expect("a string takes all");
}

/// The numbers that names stand for.
pub(crate) fn parse(names: &str) -> Result<Vec<u64>, Fault> {
    let digits = names.as_bytes();
    if !digits.len().is_multiple_of(DIGITS) || !digits.iter().all(u8::is_ascii_hexdigit) {
        let reason = format!("must be {DIGITS} hexadecimal digits for each block");
        return Err(Fault::new("names", reason));
    }
    let value = |digit: &u8| u64::from((*digit as char).to_digit(16).unwrap_or(0));
    let number = |name: &[u8]| name.iter().fold(0, |all, digit| all << 4 | value(digit));
    Ok(digits.chunks_exact(DIGITS).map(number).collect())
}
