//! Blocks laid out for the kernels, and their products.
//!
//! A form multiplies them either in tiles (`tiles.rs`) or in strips (`strips.rs`) of columns; both have the same layout
//! (`layout.rs`).

use std::marker::PhantomData;
use std::ops::Range;

use prefixcache_cpu::{
    AlignedWords, Bf16, Element, Form, OutOfMemory, Rows, RowsMut, Team, WordSource,
};

use super::blocks::{Format, GROUP};
use super::formats::with_format;
use super::kernels::Product;
use super::layout::{self, Layout};
use super::{strips, tiles};
use crate::panel::{Line, PANEL, Sums, TaskRows};

/// How the numbers of a panel lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// As [`tiles`] says.
    Tiles,
    /// A column in each lane, as [`strips`] says, in strips of that number of columns.
    Strips(usize),
}

impl Order {
    /// The one in which the form multiplies with rows of this type.
    fn of<E: Element>(form: Form) -> Self {
        strips::strip_of_form::<E>(form).map_or(Self::Tiles, Self::Strips)
    }
}

/// Rows of blocks, laid out in panels.
pub struct PackedBlocks {
    words: AlignedWords,
    format: Format,
    order: Order,
    inputs: usize,
    outputs: usize,
}

impl PackedBlocks {
    /// The blocks of `outputs` rows of `inputs` numbers that lie in `memory`; zero words are zeros. They are
    /// laid out for products with rows of type `E` in `form` alone.
    ///
    /// # Panics
    /// `inputs` numbers are not whole blocks.
    pub fn new<E: Element>(
        memory: &impl WordSource,
        form: Form,
        format: Format,
        inputs: usize,
        outputs: usize,
    ) -> Result<Self, OutOfMemory> {
        assert!(inputs.is_multiple_of(format.block()), "whole blocks");
        let panels = outputs.div_ceil(PANEL);
        let words = panel_words(format, inputs).checked_mul(panels);
        Ok(Self {
            words: memory.words(words.ok_or(OutOfMemory)?)?,
            format,
            order: Order::of::<E>(form),
            inputs,
            outputs,
        })
    }

    /// Format of the blocks.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Their words, as they lie in memory.
    pub fn words(&self) -> &AlignedWords {
        &self.words
    }

    /// Lays out blocks, a row of them for each output.
    ///
    /// # Panics
    /// They are not as many, or not of `inputs` numbers.
    pub fn pack(&mut self, team: &Team, blocks: Rows<'_, u8>) {
        let width = self.format.row_bytes(self.inputs);
        assert_eq!(blocks.shape(), (self.outputs, width), "shape of the blocks");
        let (format, order) = (self.format, self.order);
        let words = panel_words(format, self.inputs);
        let panels = RowsMut::new(self.words.as_mut_slice(), words);
        team.run(panels.rows(), |panel| {
            // SAFETY: each task has a panel of its own.
            let to = unsafe { panels.part(panel, 0, words) };
            with_format!(format, F => match order {
                Order::Tiles => tiles::pack_panel::<F>(blocks, panel * PANEL, to),
                Order::Strips(strip) => {
                    strips::pack_panel::<F>(blocks, panel * PANEL, strip, to);
                }
            });
        });
    }

    /// Dequantizes a row.
    ///
    /// # Panics
    /// There is no such row, or `out` has not `inputs` numbers.
    pub fn read_row<E: Element>(&self, row: usize, out: &mut [E]) {
        assert!(row < self.outputs && out.len() == self.inputs, "row");
        let panel = self.panel(row / PANEL);
        let column = row % PANEL;
        with_format!(self.format, F => match self.order {
            Order::Tiles => layout::read_column::<E, F>(panel, PANEL, column, tiles::code_at::<F>, out),
            Order::Strips(width) => {
                let words = panel.len() / (PANEL / width);
                let strip = &panel[column / width * words..][..words];
                let code_at = |column, depth| strips::code_at::<F>(width, column, depth);
                layout::read_column::<E, F>(strip, width, column % width, code_at, out);
            }
        });
    }

    /// Whether products with `rows` rows are taken from registers by [`Self::multiply_few`]; with more
    /// rows, and in forms without such products, the blocks are dequantized first.
    pub fn multiplies_few<E: Element>(&self, form: Form, rows: usize) -> bool {
        match self.order {
            Order::Tiles => rows <= tiles::max_few(self.format) && form.dots_in_registers(),
            Order::Strips(strip) => E::PER_WORD == 1 && rows <= strips::max_few(self.format, strip),
        }
    }

    /// Adds the products of a few rows with a panel to the rows' sums, in the order of the depth.
    ///
    /// # Panics
    /// There is no such panel, a row of `x` has not `inputs` numbers, or [`Self::multiplies_few`] says no.
    pub fn multiply_few<E: Element>(
        &self,
        form: Form,
        panel: usize,
        rows: TaskRows<'_, E>,
        sums: &mut [Sums],
    ) {
        let first = rows.first;
        if let Some(x) = rows.x.of_type() {
            self.multiply_f32(form, panel, TaskRows { x, first }, sums);
        } else if let Some(x) = rows.x.of_type() {
            self.multiply_bf16(form, panel, TaskRows { x, first }, sums);
        }
    }

    /// Not generic, so that crates which use it need not compile the kernels of all formats again.
    fn multiply_f32(&self, form: Form, panel: usize, rows: TaskRows<'_, f32>, sums: &mut [Sums]) {
        let product = self.product(form, panel, rows);
        with_format!(self.format, F => product.multiply_strips::<F>(form, sums));
    }

    /// Not generic for the same reason.
    fn multiply_bf16(&self, form: Form, panel: usize, rows: TaskRows<'_, Bf16>, sums: &mut [Sums]) {
        let product = self.product(form, panel, rows);
        with_format!(self.format, F => product.multiply_tiles::<F>(form, sums));
    }

    fn product<'a, E: Element>(
        &'a self,
        form: Form,
        panel: usize,
        rows: TaskRows<'a, E>,
    ) -> Product<'a, E> {
        assert_eq!(self.order, Order::of::<E>(form), "laid out for another form");
        assert_eq!(rows.x.width(), self.inputs, "width of x");
        Product {
            panel: self.panel(panel).as_ptr().cast(),
            inputs: self.inputs,
            used: PANEL.min(self.outputs - panel * PANEL),
            rows,
        }
    }

    /// Writes a part of a panel as the lines of words that a dense panel has: the numbers of the depth from
    /// `start` on, of which there are as many as `to` has room for.
    ///
    /// # Panics
    /// There is no such panel, or these are not whole groups of 32 numbers of its depth.
    pub fn dequantize<E: Element>(&self, form: Form, panel: usize, start: usize, to: &mut [Line]) {
        let depth = start..start + to.len() * E::PER_WORD;
        assert!(depth.end <= self.inputs, "depth of the panel");
        assert!(start.is_multiple_of(GROUP) && depth.len().is_multiple_of(GROUP));
        assert_eq!(self.order, Order::of::<E>(form), "laid out for another form");
        let panel = self.panel(panel).as_ptr().cast();
        let groups = start / GROUP..depth.end / GROUP;
        match E::PER_WORD {
            1 => self.dequantize_f32(form, panel, groups, to),
            _ => self.dequantize_bf16(form, panel, groups, to),
        }
    }

    /// Not generic, as `multiply_f32`.
    fn dequantize_f32(&self, form: Form, panel: *const u8, groups: Range<usize>, to: &mut [Line]) {
        self.dequantize_lines::<f32>(form, panel, groups, to);
    }

    /// Not generic for the same reason.
    fn dequantize_bf16(&self, form: Form, panel: *const u8, groups: Range<usize>, to: &mut [Line]) {
        self.dequantize_lines::<Bf16>(form, panel, groups, to);
    }

    fn dequantize_lines<E: Element>(
        &self,
        form: Form,
        panel: *const u8,
        groups: Range<usize>,
        to: &mut [Line],
    ) {
        let inputs = self.inputs;
        with_format!(self.format, F => {
            let layout = PhantomData;
            match self.order {
                Order::Tiles => form.run(tiles::Dequantize::<E, F> { panel, groups, to, layout }),
                Order::Strips(_) => {
                    form.run(strips::Dequantize::<E, F> { panel, inputs, groups, to, layout });
                }
            }
        });
    }

    fn panel(&self, panel: usize) -> &[u32] {
        let words = panel_words(self.format, self.inputs);
        &self.words.as_slice()[panel * words..(panel + 1) * words]
    }
}

fn panel_words(format: Format, inputs: usize) -> usize {
    let bytes = with_format!(format, F => F::BLOCK_BYTES);
    inputs / format.block() * (bytes * PANEL / size_of::<u32>())
}
