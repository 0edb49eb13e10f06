//! The one dot-product tile that all matrix products are made of.
//!
//! A *panel* is a vector of columns laid out so that they are adjacent: word w of its column c stands
//! at `panel[w * stride + c]`. A row of activations is a sequence of words, two bfloat16 to a
//! word. Element (row, column) is a chain of additions along the depth, one word after the other:
//! it does not depend on the tile's height or width, nor on what else the tile holds.

use crate::element::Element;
use crate::lanes::Lanes;

/// The most rows of a tile.
pub const MAX_HEIGHT: usize = 6;

/// `acc[r][c] += sum over w of rows[r][w] * panels[c][w * stride..]`, in the order of w.
///
/// # Safety
/// Each row is readable for `depth` words, and each panel for `L::LANES` words at each of `depth`
/// multiples of `stride`.
#[inline(always)]
pub unsafe fn dot_tile<E: Element, L: Lanes, const H: usize, const W: usize>(
    lanes: L,
    acc: &mut [[L::V; W]; H],
    rows: &[*const u32; H],
    panels: &[*const u32; W],
    stride: usize,
    depth: usize,
) {
    for w in 0..depth {
        // SAFETY: w is below `depth`, so the caller vouches for these addresses.
        unsafe {
            let mut columns = [lanes.splat(0.0); W];
            for (column, panel) in columns.iter_mut().zip(panels) {
                *column = lanes.load(panel.add(w * stride).cast());
            }
            for r in 0..H {
                let x = lanes.splat_word(rows[r].add(w).read_unaligned());
                for c in 0..W {
                    acc[r][c] = E::dot(lanes, acc[r][c], columns[c], x);
                }
            }
        }
    }
}

/// Work on one tile, of a height and a width that the compiler knows.
pub trait TileWork {
    /// Computes a tile of `H` rows and `W` vectors.
    fn run<const H: usize, const W: usize>(self);
}

/// Runs the work with its height, 1 to [`MAX_HEIGHT`], and its width as constants: as many vectors as the
/// form has in a tile, or one.
///
/// # Panics
/// The tile is higher than that, or empty.
#[inline(always)]
pub fn run_tile<L: Lanes>(height: usize, is_wide: bool, work: impl TileWork) {
    match height {
        1 => run_width::<L, 1>(is_wide, work),
        2 => run_width::<L, 2>(is_wide, work),
        3 => run_width::<L, 3>(is_wide, work),
        4 => run_width::<L, 4>(is_wide, work),
        5 => run_width::<L, 5>(is_wide, work),
        6 => run_width::<L, 6>(is_wide, work),
        _ => panic!("a tile has 1 to {MAX_HEIGHT} rows"),
    }
}

#[inline(always)]
fn run_width<L: Lanes, const H: usize>(is_wide: bool, work: impl TileWork) {
    const { assert!(L::WIDTH == 2 || L::WIDTH == 4) };
    if !is_wide {
        work.run::<H, 1>();
    } else if const { L::WIDTH == 2 } {
        work.run::<H, 2>();
    } else {
        work.run::<H, 4>();
    }
}

/// Splits `vectors` into tiles of the form's width and, for what is left, of one vector.
///
/// Returns the first vector of each, and whether it is wide.
#[inline(always)]
pub fn widths<L: Lanes>(vectors: usize) -> impl Iterator<Item = (usize, bool)> {
    let wide = vectors - vectors % L::WIDTH;
    let starts = (0..wide).step_by(L::WIDTH).map(|start| (start, true));
    starts.chain((wide..vectors).map(|start| (start, false)))
}

/// Splits `rows` into the fewest tiles of at most [`MAX_HEIGHT`] rows, as even as they can be.
///
/// Returns the first row and the height of each.
#[inline(always)]
pub fn heights(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let tiles = rows.div_ceil(MAX_HEIGHT).max(1);
    let (base, longer) = (rows / tiles, rows % tiles);
    (0..tiles)
        .map(move |tile| (tile * base + tile.min(longer), base + usize::from(tile < longer)))
        .filter(|&(_, height)| height > 0)
}

#[cfg(test)]
mod tests {
    use super::heights;

    #[test]
    fn tiles_cover_every_row_once() {
        for rows in 0..100 {
            let mut next = 0;
            for (first, height) in heights(rows) {
                assert_eq!(first, next);
                assert!((1..=6).contains(&height));
                next += height;
            }
            assert_eq!(next, rows);
        }
    }
}
