//! Names of blocks in a recording, as digits.

use prefixcache_core::naming::Chain;

use crate::lines::Fault;

/// Hexadecimal digits of a name.
const DIGITS: usize = 16;

/// Appends the name of the block that a chain ends with.
pub fn write(chain: &Chain, names: &mut String) {
    for byte in &chain[..DIGITS / 2] {
        let digit = |value: u8| char::from(b"0123456789abcdef"[usize::from(value)]);
        names.extend([digit(byte >> 4), digit(byte & 15)]);
    }
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
