//! The rotation of keys and queries where keys are kept in eight bits.
//!
//! In most heads a few numbers of each key are much larger than the others, and the scale of a row is that of its
//! largest. A Hadamard matrix spreads each number over the row, so the codes keep more of the others (QuaRot,
//! arXiv:2404.00456). Queries are rotated too: the products of both are what they were, but for rounding.

use std::ops::Range;

use prefixcache_cpu::memory::filled;
use prefixcache_cpu::{Element, Form, Kernel, Lanes, OutOfMemory, Rows, RowsMut, Team};

use crate::{Attention, MAX_HEAD_DIM};

/// Queries [T, H * D] as they are multiplied with rotated keys.
///
/// Apart from the kernel of attention: with this inside it, decode took 1.2 times as long, as its loops are compiled
/// another way.
pub(crate) fn rotated_queries<E: Element>(
    form: Form,
    team: &Team,
    attention: &Attention,
    queries: Rows<'_, E>,
) -> Result<Vec<E>, OutOfMemory> {
    let (tokens, width) = queries.shape();
    let mut rotated = filled(E::from_f32(0.0), tokens, width)?;
    let to = RowsMut::new(&mut rotated, width);
    team.run_rows(tokens, width, |tokens| {
        form.run(RotateQueries { dims: attention.head_dim, queries, to: &to, tokens });
    });
    Ok(rotated)
}

struct RotateQueries<'a, E> {
    dims: usize,
    queries: Rows<'a, E>,
    to: &'a RowsMut<'a, E>,
    tokens: Range<usize>,
}

impl<E: Element> Kernel for RotateQueries<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let mut rotated = [0.0; MAX_HEAD_DIM];
        for token in self.tokens {
            for (head, query) in self.queries.row(token).chunks_exact(self.dims).enumerate() {
                rotate_query(query, &mut rotated[..self.dims]);
                // SAFETY: a token belongs to one task, and its heads do not overlap.
                let to = unsafe { self.to.part(token, head * self.dims, self.dims) };
                for d in (0..self.dims).step_by(L::LANES) {
                    // SAFETY: a head's numbers are a multiple of LANES, and both hold as many.
                    unsafe {
                        let numbers = lanes.load(rotated.as_ptr().add(d));
                        E::store(lanes, to.as_mut_ptr().add(d), numbers);
                    }
                }
            }
        }
    }
}

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

/// Writes a head of a query, multiplied with the inverse of the same matrix.
#[inline(always)]
fn rotate_query<E: Element>(row: &[E], to: &mut [f32]) {
    // A power of two: exact.
    rotate(row, 1.0 / block_len(row.len()) as f32, to);
}

#[inline(always)]
fn rotate<E: Element>(row: &[E], factor: f32, to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(row) {
        *to = x.to_f32() * factor;
    }
    let mut len = block_len(row.len());
    let (eights, _) = to.as_chunks_mut();
    while len > 8 {
        for part in eights.chunks_exact_mut(len / 8) {
            add_and_subtract(part);
        }
        len /= 2;
    }
    for eight in eights {
        *eight = mixed::<1>(mixed::<2>(mixed::<4>(*eight)));
    }
}

/// One step of the fast transform: the halves become their sum and their difference.
#[inline(always)]
fn add_and_subtract(part: &mut [[f32; 8]]) {
    let (left, right) = part.split_at_mut(part.len() / 2);
    for (left, right) in left.iter_mut().zip(right) {
        let (a, b) = (*left, *right);
        for i in 0..8 {
            (left[i], right[i]) = (a[i] + b[i], a[i] - b[i]);
        }
    }
}

/// The same step within eight numbers, of neighbours that are `STRIDE` apart: a shuffle and a sum of vectors.
#[inline(always)]
fn mixed<const STRIDE: usize>(x: [f32; 8]) -> [f32; 8] {
    let mut mixed = [0.0; 8];
    for i in 0..8 {
        mixed[i] = x[i ^ STRIDE] + if i & STRIDE == 0 { x[i] } else { -x[i] };
    }
    mixed
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
