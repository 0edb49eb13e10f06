//! Words as the bytes that they are made of.

/// The bytes of words.
pub fn bytes_of(words: &[u32]) -> &[u8] {
    // SAFETY: the words are readable as bytes, which need no alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

/// The bytes of words, to write to.
pub fn bytes_mut(words: &mut [u32]) -> &mut [u8] {
    // SAFETY: as above, and any bytes make words.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}
