//! y = x W^T + b, with the weight packed once.
//!
//! The weight lies in panels of 64 output columns, one line of words per step of the depth (see
//! [`prefixcache_cpu::tile`]). Each output element is one chain of additions over the depth, in
//! `f32`, so it is the same whether its row is computed alone or among a thousand. A few rows
//! stream the weight from memory once; many rows reuse each panel from the cache.
//!
//! Processors with AMX run the same code: AMX adds in blocks of 16 rows with an order of its own,
//! and would have to be used for every row count or for none.

use std::marker::PhantomData;
use std::ops::Range;

use prefixcache_cpu::memory::{OutOfMemory, filled};
use prefixcache_cpu::tile::{TileWork, dot_tile, heights, run_tile};
use prefixcache_cpu::{
    AlignedWords, Element, Form, Kernel, Lanes, Rows, RowsMut, Team, WeightMemory,
};

/// Output columns of a panel.
const PANEL: usize = 64;

/// Rows that one task computes with a panel: with the panel they stay in the second-level cache.
const MAX_TASK_ROWS: usize = 192;

/// Rows below which a task is not worth splitting.
const MIN_TASK_ROWS: usize = 24;

/// Tasks wanted for an even split over a few threads.
const ENOUGH_TASKS: usize = 24;

/// A linear layer's weight and bias, packed.
pub struct PackedLinear<E> {
    words: AlignedWords,
    bias: Vec<f32>,
    inputs: usize,
    outputs: usize,
    element: PhantomData<E>,
}

impl<E: Element> PackedLinear<E> {
    /// A layer of zeros, without a bias or with one, its weight in `memory`.
    ///
    /// # Errors
    /// There is no memory for the weight.
    ///
    /// # Panics
    /// `inputs` does not fill whole words (bfloat16: it is odd).
    pub fn zeroed(
        memory: &WeightMemory,
        inputs: usize,
        outputs: usize,
        with_bias: bool,
    ) -> Result<Self, OutOfMemory> {
        assert!(
            inputs.is_multiple_of(E::PER_WORD),
            "inputs must fill whole words"
        );
        let padded = outputs.checked_next_multiple_of(PANEL).ok_or(OutOfMemory)?;
        let words = padded.checked_mul(inputs / E::PER_WORD);
        Ok(Self {
            words: memory.zeroed(words.ok_or(OutOfMemory)?)?,
            bias: filled(0.0, usize::from(with_bias), padded)?,
            inputs,
            outputs,
            element: PhantomData,
        })
    }

    /// Packs rows of the weight, the first of which belongs to output `first`.
    ///
    /// # Panics
    /// They are not rows of `inputs` numbers, or there are no such outputs.
    pub fn copy_rows(&mut self, first: usize, weight: Rows<'_, E>) {
        assert_eq!(weight.width(), self.inputs, "width of the weight");
        assert!(self.has_outputs(first, weight.rows()), "outputs");
        let words = self.inputs / E::PER_WORD * PANEL;
        for row in 0..weight.rows() {
            let output = first + row;
            let start = output / PANEL * words;
            let panel = &mut self.words.as_mut_slice()[start..start + words];
            pack_column(weight.row(row), output % PANEL, panel);
        }
    }

    /// Sets the biases from output `first` on.
    ///
    /// # Panics
    /// The layer has no bias, or there are no such outputs.
    pub fn copy_bias(&mut self, first: usize, bias: &[E]) {
        assert!(
            self.has_bias() && self.has_outputs(first, bias.len()),
            "outputs with a bias"
        );
        for (to, from) in self.bias[first..].iter_mut().zip(bias) {
            *to = from.to_f32();
        }
    }

    fn has_outputs(&self, first: usize, count: usize) -> bool {
        first
            .checked_add(count)
            .is_some_and(|end| end <= self.outputs)
    }

    /// Whether a bias is added.
    pub fn has_bias(&self) -> bool {
        !self.bias.is_empty()
    }

    /// Numbers of an input row.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Numbers of an output row.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Writes `x W^T + b + residual` to `out`, rounded once, to the type of `out`.
    ///
    /// # Panics
    /// The shapes do not fit.
    pub fn forward<O: Element>(
        &self,
        form: Form,
        team: &Team,
        x: Rows<'_, E>,
        residual: Option<Rows<'_, O>>,
        out: &RowsMut<'_, O>,
    ) {
        assert_eq!(x.shape(), (out.rows(), self.inputs), "shape of x");
        assert_eq!(out.width(), self.outputs, "width of out");
        if let Some(residual) = &residual {
            assert_eq!(residual.shape(), out.shape(), "residual");
        }
        let split = Split::new(x.rows(), self.outputs.div_ceil(PANEL));
        team.run(split.tasks(), |task| {
            let (panel, rows) = split.task(task);
            form.run(PanelTask {
                layer: self,
                x,
                residual,
                out,
                panel,
                rows,
            });
        });
    }

    fn panel(&self, panel: usize) -> &[u32] {
        let words = self.inputs / E::PER_WORD * PANEL;
        &self.words.as_slice()[panel * words..(panel + 1) * words]
    }
}

/// Spreads one row of the weight over its column of a panel.
fn pack_column<E: Element>(row: &[E], column: usize, panel: &mut [u32]) {
    let words = row.as_ptr().cast::<u32>();
    for (w, line) in panel.chunks_exact_mut(PANEL).enumerate() {
        // SAFETY: the row holds as many whole words as the panel has lines.
        line[column] = unsafe { words.add(w).read_unaligned() };
    }
}

/// How a product is cut into tasks: panels times chunks of rows. No element depends on it.
struct Split {
    rows: usize,
    chunk: usize,
    chunks: usize,
    panels: usize,
}

impl Split {
    fn new(rows: usize, panels: usize) -> Self {
        let wanted = ENOUGH_TASKS
            .div_ceil(panels.max(1))
            .max(rows.div_ceil(MAX_TASK_ROWS));
        let chunk = rows.div_ceil(wanted).max(MIN_TASK_ROWS).next_multiple_of(6);
        Self {
            rows,
            chunk,
            chunks: rows.div_ceil(chunk),
            panels,
        }
    }

    fn tasks(&self) -> usize {
        self.panels * self.chunks
    }

    /// The panel and the rows of a task; neighbours share the panel.
    fn task(&self, task: usize) -> (usize, Range<usize>) {
        let first = task % self.chunks * self.chunk;
        (
            task / self.chunks,
            first..(first + self.chunk).min(self.rows),
        )
    }
}

/// One panel times a few rows.
struct PanelTask<'a, E, O> {
    layer: &'a PackedLinear<E>,
    x: Rows<'a, E>,
    residual: Option<Rows<'a, O>>,
    out: &'a RowsMut<'a, O>,
    panel: usize,
    rows: Range<usize>,
}

impl<E: Element, O: Element> Kernel for PanelTask<'_, E, O> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let used = PANEL.min(self.layer.outputs - self.panel * PANEL);
        for (first, height) in heights(self.rows.len()) {
            for column in (0..used).step_by(L::WIDTH * L::LANES) {
                let row = self.rows.start + first;
                run_tile(
                    height,
                    L::WIDTH,
                    Tile {
                        task: &self,
                        lanes,
                        row,
                        column,
                    },
                );
            }
        }
    }
}

/// A register tile: a few rows times a few vectors of the panel, from `row` and `column`.
struct Tile<'a, E, O, L> {
    task: &'a PanelTask<'a, E, O>,
    lanes: L,
    row: usize,
    column: usize,
}

impl<E: Element, O: Element, L: Lanes> TileWork for Tile<'_, E, O, L> {
    #[inline(always)]
    fn run<const H: usize, const W: usize>(self) {
        let (task, lanes) = (self.task, self.lanes);
        let depth = task.layer.inputs / E::PER_WORD;
        let rows = std::array::from_fn(|r| task.x.row(self.row + r).as_ptr().cast());
        let panel = &task.layer.panel(task.panel)[self.column..];
        let panels = std::array::from_fn(|c| panel[c * L::LANES..].as_ptr());
        let mut acc = [[lanes.splat(0.0); W]; H];
        // SAFETY: a row of x holds `depth` words, and a panel `depth` lines of 64 of which
        // `column` starts a group of W * LANES.
        unsafe { dot_tile::<E, L, H, W>(lanes, &mut acc, &rows, &panels, PANEL, depth) };
        for (r, sums) in acc.iter().enumerate() {
            for (c, &sum) in sums.iter().enumerate() {
                let column = task.panel * PANEL + self.column + c * L::LANES;
                if column < task.layer.outputs {
                    task.finish(lanes, self.row + r, column, sum);
                }
            }
        }
    }
}

impl<E: Element, O: Element> PanelTask<'_, E, O> {
    /// Adds bias and residual to a vector of sums and stores what of it lies inside the row.
    #[inline(always)]
    fn finish<L: Lanes>(&self, lanes: L, row: usize, column: usize, mut sum: L::V) {
        let count = L::LANES.min(self.layer.outputs - column);
        if self.layer.has_bias() {
            let bias = self.layer.bias[column..column + L::LANES].as_ptr();
            // SAFETY: the slice holds LANES numbers.
            sum = lanes.add(sum, unsafe { lanes.load(bias) });
        }
        if let Some(residual) = &self.residual {
            let numbers = residual.row(row)[column..column + count].as_ptr();
            // SAFETY: the slice holds `count` numbers.
            sum = lanes.add(sum, unsafe { O::load_some(lanes, numbers, count) });
        }
        // SAFETY: no other task has this row and panel, and the part holds `count` numbers.
        unsafe {
            let part = self.out.part(row, column, count);
            O::store_some(lanes, part.as_mut_ptr(), sum, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Split;

    #[test]
    fn tasks_cover_every_row_of_every_panel_once() {
        for rows in 0..400 {
            for panels in [1, 3, 9, 48, 768] {
                let split = Split::new(rows, panels);
                let mut seen = vec![0; rows * panels];
                for task in 0..split.tasks() {
                    let (panel, rows_of_task) = split.task(task);
                    rows_of_task.for_each(|row| seen[panel * rows + row] += 1);
                }
                assert!(
                    seen.iter().all(|&count| count == 1),
                    "{rows} rows, {panels} panels"
                );
            }
        }
    }
}
