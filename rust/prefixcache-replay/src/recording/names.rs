//! Names of blocks: keyed hashes, which tell nothing to whoever lacks the key.

/// Hexadecimal digits of a name.
pub(super) const DIGITS: usize = 16;

/// What the name of a request's next block follows from.
pub type Chain = [u8; 32];

/// Names blocks for one recording.
#[derive(Clone)]
pub struct Namer {
    key: [u8; 32],
    block_size: usize,
}

impl Namer {
    /// A namer with a key that is used for nothing else. A block has at least one token.
    #[must_use]
    pub fn new(key: [u8; 32], block_size: usize) -> Self {
        Self {
            key,
            block_size: block_size.max(1),
        }
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The chain before the first block of requests with this cache salt.
    #[must_use]
    pub fn begin(&self, salt: Option<&str>) -> Chain {
        let mut bytes = vec![u8::from(salt.is_some())];
        bytes.extend_from_slice(salt.unwrap_or_default().as_bytes());
        blake3::keyed_hash(&self.key, &bytes).into()
    }

    /// Appends the names of the full blocks of `tokens`, which follow those that `chain` stands for.
    pub fn extend(&self, chain: &mut Chain, tokens: &[u32], names: &mut String) {
        let mut bytes = Vec::with_capacity(chain.len() + 4 * self.block_size);
        for block in tokens.chunks_exact(self.block_size) {
            bytes.clear();
            bytes.extend_from_slice(chain);
            bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
            *chain = blake3::keyed_hash(&self.key, &bytes).into();
            for byte in &chain[..DIGITS / 2] {
                let digit = |value: u8| char::from(b"0123456789abcdef"[usize::from(value)]);
                names.extend([digit(byte >> 4), digit(byte & 15)]);
            }
        }
    }
}

/// The numbers that names stand for.
pub(super) fn parse(names: &str) -> Result<Vec<u64>, String> {
    let digits = names.as_bytes();
    if !digits.len().is_multiple_of(DIGITS) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(format!(
            "names must be {DIGITS} hexadecimal digits for each block"
        ));
    }
    let value = |digit: &u8| u64::from((*digit as char).to_digit(16).unwrap_or(0));
    let number = |name: &[u8]| name.iter().fold(0, |all, digit| all << 4 | value(digit));
    Ok(digits.chunks_exact(DIGITS).map(number).collect())
}
