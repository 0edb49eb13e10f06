//! Panels of weights times quantized rows: which way for how many.

mod codes;
mod few;
mod many;
mod one;
mod panel;
mod scaling;
mod unpacked;
mod wide;

use std::marker::PhantomData;

use prefixcache_cpu::{ByteForm, ByteKernel, ByteLanes};

use self::few::{MAX_FEW, MAX_HEIGHT};
use self::many::tile_rows;
use self::panel::{Packed, Panel};
use self::wide::WIDE_ROWS;
use super::Int8Weight;
use super::activations::QuantizedRows;
use super::tiles::{TILE, TILES};
use crate::panel::Sums;
use crate::quant::formats::with_format;

/// Rows whose sums are kept in memory while a panel is multiplied: with its codes they stay in the first
/// cache.
const SUMMED_ROWS: usize = 24;

/// Rows from which on [`Panel::multiply_tiles`] is the faster way.
const MANY: usize = 16;

/// Rows from which on [`Panel::multiply_wide`] is the faster way, and rows whose sums it keeps
/// in memory: more than elsewhere, since codes are unpacked once for them.
const MANY_WIDE: usize = 12;
const SUMMED_WIDE_ROWS: usize = 48;

impl Int8Weight {
    /// Writes the sums of a panel and the rows of x from `first` on, as many as `sums` has.
    ///
    /// # Panics
    /// There is no such panel or row.
    pub fn multiply(
        &self,
        form: ByteForm,
        panel: usize,
        x: &QuantizedRows,
        first: usize,
        sums: &mut [Sums],
    ) {
        with_format!(self.format(), P => {
            let format = PhantomData;
            form.run(PanelTask::<P> { weight: self, panel, x, first, sums, format });
        });
    }
}

/// One panel, of a format that the compiler knows, times a few rows: a function for each format, which it compiles
/// faster than one for all.
struct PanelTask<'a, P> {
    weight: &'a Int8Weight,
    panel: usize,
    x: &'a QuantizedRows,
    first: usize,
    sums: &'a mut [Sums],
    format: PhantomData<P>,
}

impl<P: Packed> ByteKernel for PanelTask<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<L: ByteLanes>(mut self, lanes: L) {
        let panel = Panel::<P, L>::new(lanes, self.weight, self.panel);
        let mut first = self.first;
        if const { L::DOT_OF_FOUR && L::LANES == TILE }
            && panel.width == TILES
            && self.sums.len() >= MANY_WIDE
        {
            let in_tiles = self.sums.len() / WIDE_ROWS * WIDE_ROWS;
            let (many, few) = std::mem::take(&mut self.sums).split_at_mut(in_tiles);
            for sums in many.chunks_mut(SUMMED_WIDE_ROWS) {
                panel.multiply_wide(self.x, first, sums);
                first += sums.len();
            }
            self.sums = few;
        }
        // A kernel for each number of rows is compiled for the formats that most files are made of.
        if const { !L::DOT_OF_FOUR || !P::FORMAT.is_common() } {
            if let ([sums], true) = (&mut *self.sums, const { !L::DOT_OF_FOUR }) {
                return panel.multiply_one(self.x.row(first), sums);
            }
            let in_tiles = match const { tile_rows::<P, L>() } {
                0 => 0,
                _ if self.sums.len() < MANY => 0,
                rows => self.sums.len() / rows * rows,
            };
            let (many, few) = self.sums.split_at_mut(in_tiles);
            for sums in many.chunks_mut(SUMMED_ROWS) {
                panel.multiply_tiles(self.x, first, sums);
                first += sums.len();
            }
            for sums in few.chunks_mut(SUMMED_ROWS) {
                panel.multiply_in_memory(self.x, first, sums);
                first += sums.len();
            }
            return;
        }
        let unpacks_quickly = const { P::LAYOUT.bits == 4 && P::LAYOUT.blocks == 1 };
        let height = match self.sums.len() {
            // An eighth row for nothing would take longer than another pass.
            7 if unpacks_quickly => MAX_HEIGHT,
            few @ (4 | 7..=MAX_FEW) => few,
            _ => MAX_HEIGHT,
        };
        for sums in self.sums.chunks_mut(height) {
            match sums.len() {
                1 => panel.multiply::<1>(self.x, first, sums),
                2 => panel.multiply::<2>(self.x, first, sums),
                3 => panel.multiply::<MAX_HEIGHT>(self.x, first, sums),
                4 => panel.multiply::<4>(self.x, first, sums),
                _ => panel.multiply::<MAX_FEW>(self.x, first, sums),
            }
            first += sums.len();
        }
    }
}
