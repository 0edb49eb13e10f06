//! Random numbers for the tests of this crate and of the kernels on it.

use prefixcache_cpu::Element;

/// Numbers from -1 to 1, a function of the seed and the index (xorshift64; Marsaglia, 2003).
pub fn noise<E: Element>(seed: u64, count: usize) -> Vec<E> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        E::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}
