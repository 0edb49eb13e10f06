//! The rotation of keys and queries where keys are kept in eight bits.
//!
//! In most heads a few numbers of each key are much larger than the others, and the scale of a row is that of its
//! largest. A Hadamard matrix spreads each number over the row, so the codes keep more of the others (QuaRot,
//! arXiv:2404.00456). Queries are rotated too: the products of both are what they were, but for rounding.

use prefixcache_cpu::Element;

/// Numbers that are rotated together: a Hadamard matrix has a power of two of rows. Rows have multiples of 16.
#[inline(always)]
fn block_len(dims: usize) -> usize {
    1 << dims.trailing_zeros()
}

/// Writes a row of keys, multiplied block by block with Sylvester's Hadamard matrix of 1 and -1.
///
/// The sums are of `f32` and in one order, so they are the same bits in every form.
#[inline(always)]
pub(crate) fn rotate_key<E: Element>(row: &[E], to: &mut [f32]) {
    rotate(row, 1.0, to);
}

/// Writes a row of queries, multiplied with the inverse of the same matrix.
#[inline(always)]
pub(crate) fn rotate_query<E: Element>(row: &[E], to: &mut [f32]) {
    // A power of two: exact.
    rotate(row, 1.0 / block_len(row.len()) as f32, to);
}

#[inline(always)]
fn rotate<E: Element>(row: &[E], factor: f32, to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(row) {
        *to = x.to_f32() * factor;
    }
    let mut len = block_len(row.len());
    while len > 8 {
        for part in to.chunks_exact_mut(len) {
            add_and_subtract(part);
        }
        len /= 2;
    }
    // Of a known length, these become shuffles of vectors.
    for eight in to.as_chunks_mut::<8>().0 {
        add_and_subtract(eight);
        eight.chunks_exact_mut(4).for_each(add_and_subtract);
        eight.chunks_exact_mut(2).for_each(add_and_subtract);
    }
}

/// One step of the fast transform: the halves become their sum and their difference.
#[inline(always)]
fn add_and_subtract(part: &mut [f32]) {
    let (left, right) = part.split_at_mut(part.len() / 2);
    for (a, b) in left.iter_mut().zip(right) {
        (*a, *b) = (*a + *b, *a - *b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_multiplied_with_the_matrix() {
        for dims in [16, 48, 64, 80, 512] {
            let block = block_len(dims);
            let row: Vec<f32> = (0..dims).map(|i| (i * i % 29) as f32 - 14.0).collect();
            let mut rotated = vec![0.0; dims];
            rotate_key(&row, &mut rotated);
            for (at, got) in rotated.iter().enumerate() {
                let first = at / block * block;
                let sign =
                    |i: usize| if (at & i).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                let want: f32 = (0..block).map(|i| sign(i) * row[first + i]).sum();
                assert_eq!(*got, want, "{dims}: {at}");
            }
            let mut back = vec![0.0; dims];
            rotate_query(&rotated, &mut back);
            assert_eq!(back, row);
        }
    }
}
