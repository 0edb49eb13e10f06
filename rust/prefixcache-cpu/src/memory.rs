//! Memory whose size a caller chose: too much of it is an error, never the end of the process. Memory that is fetched before it is read.

/// There is not as much memory as was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("asks for more memory than there is")]
pub struct OutOfMemory;

/// `rows` rows of `width` copies of a value, one after the other.
pub fn filled<T: Copy>(value: T, rows: usize, width: usize) -> Result<Vec<T>, OutOfMemory> {
    let len = rows.checked_mul(width).ok_or(OutOfMemory)?;
    let mut all = Vec::new();
    all.try_reserve_exact(len).map_err(|_| OutOfMemory)?;
    all.resize(len, value);
    Ok(all)
}

/// Says that the cache line of an address, which may be any, is read soon.
#[inline(always)]
pub fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and it never fails.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_filled_where_there_is_memory() {
        assert_eq!(filled(7, 2, 3), Ok(vec![7; 6]));
        assert_eq!(filled(7, usize::MAX, 0), Ok(vec![]));
        for (rows, width) in [(1 << 32, 1 << 32), (1 << 31, 1 << 31), (1, 1 << 48)] {
            assert_eq!(filled(1.0_f32, rows, width), Err(OutOfMemory));
        }
    }
}
