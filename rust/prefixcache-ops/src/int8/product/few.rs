//! A few rows, whose sums stay in registers.

use prefixcache_cpu::ByteLanes;
use prefixcache_cpu::memory::prefetch;

use super::codes::four_steps;
use super::panel::{LINE, Packed, Panel};
use super::scaling::{Factors, Scaling, half_factors, header_of};
use crate::int8::activations::{ActivationBlock, QuantizedRows};
use crate::int8::tiles::{TILE, TILES};
use crate::panel::Sums;

/// Bytes from a block to what is fetched while it is multiplied.
const AHEAD: usize = 4096;

/// Rows of a register tile.
pub(super) const MAX_HEIGHT: usize = 3;

/// The most rows that are multiplied in one pass over a panel, their sums in memory: another pass
/// would unpack all codes again.
pub(super) const MAX_FEW: usize = 8;

impl<P: Packed, L: ByteLanes> Panel<P, L> {
    /// Multiplies it with up to `H` rows.
    #[inline(always)]
    pub(super) fn multiply<const H: usize>(
        &self,
        x: &QuantizedRows,
        first: usize,
        sums: &mut [Sums],
    ) {
        // Rows that there are not are the last one, computed for nothing.
        let last = first + sums.len() - 1;
        let rows = std::array::from_fn(|r| x.row(last.min(first + r)).as_ptr());
        // SAFETY: a row of x has the blocks of the panel's depth, and the groups are all that the panel has.
        unsafe {
            if const { L::LANES < TILE } {
                self.sums::<H, 2, TILES>(self.width * TILE / (2 * L::LANES), rows, sums);
            } else if self.width < TILES {
                self.sums::<H, 1, TILES>(self.width, rows, sums);
            } else if const { H == 1 || H > MAX_HEIGHT } {
                self.sums::<H, 1, TILES>(TILES, rows, sums);
            } else if const { P::LAYOUT.halves() && H > 2 } {
                // With sums of halves more would not fit into the registers.
                self.sums::<H, 2, 2>(2, rows, sums);
            } else {
                self.sums::<H, TILES, 1>(1, rows, sums);
            }
        }
    }

    /// Asks for what lies `ahead` of a block in `W` vectors: a few rows wait for memory otherwise.
    #[inline(always)]
    fn fetch<const W: usize>(&self, d: usize, group: usize, b: usize, ahead: usize) {
        let layout = const { P::LAYOUT };
        let bytes = W * L::LANES / TILE * (layout.unit() / layout.blocks);
        let unit = d * self.width + group * W * L::LANES / TILE;
        let at = self.units.wrapping_add(unit * layout.unit() + b * bytes + ahead);
        for line in 0..bytes.div_ceil(LINE) {
            prefetch(at.wrapping_add(line * LINE));
        }
    }

    /// Writes the sums of `H` rows, in `groups` groups of `W` vectors of outputs, `G` at most: a constant where panels
    /// are whole, so that sums stay in registers.
    ///
    /// # Safety
    /// Each row has the blocks of the panel's depth, and the panel has the units of the groups.
    #[inline(always)]
    unsafe fn sums<const H: usize, const W: usize, const G: usize>(
        &self,
        groups: usize,
        rows: [*const ActivationBlock; H],
        sums: &mut [Sums],
    ) {
        let (lanes, layout) = (self.lanes, const { P::LAYOUT });
        let outputs = W * L::LANES;
        debug_assert!(groups * outputs <= self.width * TILE, "units of the panel");
        let mut acc = [[[lanes.splat_f32(0.0); W]; H]; G];
        let steps = const { steps::<P, H>() };
        let ahead = if steps == 1 { AHEAD } else { steps * self.width * layout.unit() };
        for first in (0..self.depth).step_by(steps) {
            for (group, acc) in acc[..groups].iter_mut().enumerate() {
                for d in first..self.depth.min(first + steps) {
                    let mut columns = [(self.units, 0); W];
                    // SAFETY: the units lie in the panel, and their blocks in the rows.
                    unsafe {
                        for (j, column) in columns.iter_mut().enumerate() {
                            let output = group * outputs + j * L::LANES;
                            let unit = d * self.width + output / TILE;
                            *column = (self.units.add(unit * layout.unit()), output % TILE);
                        }
                        for b in 0..layout.blocks {
                            let x = rows.map(|row| row.add(d * layout.blocks + b));
                            self.fetch::<W>(d, group, b, ahead);
                            add_block::<P, L, H, W>(lanes, acc, &columns, &x, b);
                        }
                    }
                }
            }
        }
        for (group, acc) in acc[..groups].iter().enumerate() {
            for (sums, acc) in sums.iter_mut().zip(acc) {
                for (j, &acc) in acc.iter().enumerate() {
                    let to = &mut sums[group * outputs + j * L::LANES..][..L::LANES];
                    // SAFETY: the slice holds LANES numbers.
                    unsafe { lanes.store(to.as_mut_ptr(), acc) };
                }
            }
        }
    }
}

/// Units of the depth that are added to the sums of `H` rows in a group before it is the next group's
/// turn: the sums of [`MAX_FEW`] rows in all groups do not fit into the registers.
const fn steps<P: Packed, const H: usize>() -> usize {
    if H == MAX_FEW && P::LAYOUT.blocks == 1 { 4 } else { 1 }
}

/// Adds block `b` of a unit.
///
/// # Safety
/// Each of `columns` is a unit and the lane that its vector starts at.
#[inline(always)]
unsafe fn add_block<P: Packed, L: ByteLanes, const H: usize, const W: usize>(
    lanes: L,
    acc: &mut [[L::F; W]; H],
    columns: &[(*const u8, usize); W],
    x: &[*const ActivationBlock; H],
    b: usize,
) {
    let layout = const { P::LAYOUT };
    let at = layout.header() + b * layout.block();
    // SAFETY: the caller vouches for the units, whose parts these are, and for the rows.
    unsafe {
        let sums = code_sums::<P, L, H, W>(lanes, columns, x, at);
        for j in 0..W {
            let (unit, lane) = columns[j];
            let header = header_of::<P, L>(lanes, unit, lane);
            let scaling = Scaling::<P, L>::new(lanes, unit, at, lane, header);
            for r in 0..H {
                let x = Factors::new(lanes, &*x[r]);
                let sum = lanes.to_f32(sums[r][j]);
                acc[r][j] = scaling.add(lanes, sum, &x, acc[r][j]);
            }
        }
    }
}

/// The integer sums of a block: codes less their offset, times the codes of x; with the factors of
/// halves, where there are some.
///
/// # Safety
/// As of [`add_block`]; `at` is where the codes begin in a unit.
#[inline(always)]
unsafe fn code_sums<P: Packed, L: ByteLanes, const H: usize, const W: usize>(
    lanes: L,
    columns: &[(*const u8, usize); W],
    x: &[*const ActivationBlock; H],
    at: usize,
) -> [[L::I; W]; H] {
    let layout = const { P::LAYOUT };
    let halves = const { P::LAYOUT.halves() };
    let offset = |sum: i32| lanes.splat(sum.wrapping_mul(layout.offset));
    let mut first = [[lanes.splat(0); W]; H];
    let mut second = first;
    let mut high = [lanes.splat(0); W];
    // SAFETY: the caller vouches for the units and the rows.
    unsafe {
        if layout.offset != 0 {
            for r in 0..H {
                let x = &*x[r];
                if halves {
                    let [low, upper] = x.minus_halves;
                    (first[r], second[r]) = ([offset(low.into()); W], [offset(upper.into()); W]);
                } else {
                    first[r] = [offset(x.minus_sum); W];
                }
            }
        }
        for g in 0..4 {
            for j in 0..W {
                let codes = columns[j].0.add(at + 4 * columns[j].1);
                let (low, upper) = four_steps::<P, L>(lanes, codes, g, &mut high[j]);
                for r in 0..H {
                    let x = (*x[r]).codes.as_ptr().cast::<i32>();
                    let (x_low, x_upper) = (
                        lanes.splat(x.add(g).read_unaligned()),
                        lanes.splat(x.add(4 + g).read_unaligned()),
                    );
                    first[r][j] = lanes.dot(first[r][j], low, x_low);
                    let to = if halves { &mut second } else { &mut first };
                    to[r][j] = lanes.dot(to[r][j], upper, x_upper);
                }
            }
        }
        if halves {
            for j in 0..W {
                let (unit, lane) = columns[j];
                let [low, upper] = half_factors::<P, L>(lanes, unit, at, lane).0;
                for r in 0..H {
                    let low = lanes.mul(first[r][j], low);
                    first[r][j] = lanes.add(low, lanes.mul(second[r][j], upper));
                }
            }
        }
    }
    first
}
