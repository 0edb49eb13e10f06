//! y = x W^T + b, with the weight packed once.
//!
//! The weight lies in panels of 64 output columns. Each output element is one chain of additions over
//! the depth, in `f32`, so it is the same whether its row is computed alone or among a thousand. A few
//! rows stream the weight from memory once; many rows reuse each panel from the cache.
//!
//! A layer is made of parts, one for each tensor that a fused projection joins, which may be kept as
//! different things: dense numbers, or blocks that are dequantized as they are multiplied. What they are
//! kept as leaves no trace in the result, unless the layer quantizes its activations ([`crate::int8`]).
//!
//! Processors with AMX run the same code: AMX adds in blocks of 16 rows with an order of its own,
//! and would have to be used for every row count or for none.

#[cfg(test)]
mod balance;
mod groups;

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use prefixcache_cpu::memory::{OutOfMemory, filled};
use prefixcache_cpu::tile::{TileWork, dot_tile, heights, run_tile};
use prefixcache_cpu::{
    Bf16, ByteForm, Element, Form, Kernel, Lanes, MappedWords, Rows, RowsMut, Team, WordSource,
};

use crate::bytes::bytes_of;
use crate::dense::PackedDense;
use crate::int8::{Int8Weight, QuantizedRows};
use crate::panel::{Line, MAX_TASK_ROWS, PANEL, Sums, TaskRows, words_of};
use crate::part::{Activations, Part, Storage};
use crate::quant::blocks::Format;
use crate::quant::packed::PackedBlocks;
use crate::rowwise::{Gate, GatedPart, gated};

pub use groups::RowGroup;

/// Rows below which a task is not worth splitting.
const MIN_TASK_ROWS: usize = 24;

/// Tasks wanted for an even split over a few threads, and of each of many.
const ENOUGH_TASKS: usize = 24;
const TASKS_OF_A_THREAD: usize = 3;

/// Lines of a panel that are dequantized before they are multiplied: 16 KiB, so that the first cache holds
/// them.
const DEQUANTIZED_LINES: usize = 64;

/// Bytes above which no weight is asked for: more than processes can address.
const MOST_BYTES: usize = 1 << 47;

/// Why blocks cannot become a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlocksError {
    /// A row is no whole number of blocks.
    #[error("inputs must be a multiple of {block} for {0}", block = .0.block())]
    Inputs(Format),
    /// They are not the rows of one part.
    #[error("start and rows must be those of a whole part")]
    NoPart,
    /// What was laid out is of another part.
    #[error("num_bytes must be those of the part")]
    Size,
    /// A scale or minimum is NaN or infinite.
    #[error("blocks: row {0} has a scale that is no number")]
    Scale(usize),
    /// There is no memory for them.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
}

/// A linear layer's weight and bias, packed.
pub struct PackedLinear<E> {
    parts: Vec<Part<E>>,
    bias: Vec<f32>,
    inputs: usize,
    outputs: usize,
    activations: Activations,
}

impl<E: Element> PackedLinear<E> {
    /// A layer of zeros, without a bias or with one. `parts` has the outputs of each part,
    /// which takes memory for its weight once it is written.
    ///
    /// # Errors
    /// There is no memory for the bias, or no process has enough for the weight.
    ///
    /// # Panics
    /// `inputs` does not fill whole words (bfloat16: it is odd).
    pub fn new(inputs: usize, parts: &[usize], with_bias: bool) -> Result<Self, OutOfMemory> {
        assert!(inputs.is_multiple_of(E::PER_WORD), "inputs must fill whole words");
        let mut outputs = 0_usize;
        let mut made = Vec::new();
        for &count in parts {
            let end = outputs.checked_add(count).ok_or(OutOfMemory)?;
            made.push(Part { outputs: outputs..end, storage: Storage::Zeros });
            outputs = end;
        }
        let bytes =
            outputs.checked_mul(inputs).and_then(|numbers| numbers.checked_mul(size_of::<E>()));
        if bytes.is_none_or(|bytes| bytes > MOST_BYTES) {
            return Err(OutOfMemory);
        }
        // A vector of biases is read from any output on.
        let padded = outputs.checked_add(PANEL).ok_or(OutOfMemory)?;
        Ok(Self {
            parts: made,
            bias: filled(0.0, usize::from(with_bias), padded)?,
            inputs,
            outputs,
            activations: Activations::default(),
        })
    }

    /// The layer with these activations, whose weight is not written yet.
    pub fn with_activations(self, activations: Activations) -> Self {
        Self { activations, ..self }
    }

    /// Packs rows of the weight, the first of which belongs to output `first`.
    ///
    /// A part that held blocks becomes dense; those of its rows that are not written stay as they were.
    ///
    /// # Errors
    /// There is no memory for the weight; nothing is written.
    ///
    /// # Panics
    /// They are not rows of `inputs` numbers, or there are no such outputs.
    pub fn copy_rows(
        &mut self,
        memory: &impl WordSource,
        first: usize,
        weight: Rows<'_, E>,
    ) -> Result<(), OutOfMemory> {
        assert_eq!(weight.width(), self.inputs, "width of the weight");
        assert!(self.has_outputs(first, weight.rows()), "outputs");
        let rows = first..first + weight.rows();
        let made = self.parts.iter();
        let made = made.map(|part| part.made_dense(memory, self.inputs, &rows));
        let made: Vec<Option<PackedDense<E>>> = made.collect::<Result<_, _>>()?;
        for (part, made) in self.parts.iter_mut().zip(made) {
            if let Some(dense) = made {
                part.storage = Storage::Dense(dense);
            }
            part.copy_rows(first, weight);
        }
        Ok(())
    }

    /// Packs the blocks of a part, the one that starts at output `first`: a row of bytes an output. They
    /// are laid out for products in `form`.
    ///
    /// # Errors
    /// See [`BlocksError`]; nothing is written.
    ///
    /// # Panics
    /// A row has not the bytes of `inputs` numbers.
    pub fn copy_blocks(
        &mut self,
        memory: &impl WordSource,
        form: Form,
        team: &Team,
        first: usize,
        format: Format,
        blocks: Rows<'_, u8>,
    ) -> Result<(), BlocksError> {
        let inputs = self.inputs;
        let part = self.check_blocks(first, blocks.rows(), format)?;
        assert_eq!(blocks.width(), format.row_bytes(inputs), "bytes of a row");
        let finite = |row| {
            let mut of_row = blocks.row(row).chunks_exact(format.bytes());
            let finite = of_row.all(|block| format.is_finite(block));
            finite.then_some(()).ok_or(BlocksError::Scale(row))
        };
        team.try_run(blocks.rows(), finite)?;
        let part = &mut self.parts[part];
        if let Some(made) = part.made_blocks(memory, form, inputs, format, self.activations)? {
            part.storage = made;
        }
        part.copy_blocks(team, blocks);
        Ok(())
    }

    /// The weight of a part as it lies in memory; `None` where it was never written.
    ///
    /// # Panics
    /// There is no such part.
    pub fn laid_out(&self, part: usize) -> Option<&[u8]> {
        let words = self.parts[part].words();
        words.map(|words| bytes_of(words.as_slice()))
    }

    /// Takes for the weight of a part what [`Self::laid_out`] gave of one like it: with the same inputs,
    /// outputs, format, form and activations. Until the part is written again it stays in the file.
    ///
    /// # Errors
    /// It cannot be the weight of this part; nothing is changed.
    ///
    /// # Panics
    /// There is no such part.
    pub fn map_laid_out(
        &mut self,
        form: Form,
        part: usize,
        format: Option<Format>,
        words: &MappedWords,
    ) -> Result<(), BlocksError> {
        if let Some(format) = format.filter(|one| !self.inputs.is_multiple_of(one.block())) {
            return Err(BlocksError::Inputs(format));
        }
        self.parts[part]
            .take(words, form, self.inputs, format, self.activations)
            .map_err(|OutOfMemory| BlocksError::Size)
    }

    /// Which part `rows` rows of blocks from output `first` on are the weight of.
    ///
    /// # Errors
    /// They are not the rows of a part, or `inputs` numbers are not whole blocks.
    pub fn check_blocks(
        &self,
        first: usize,
        rows: usize,
        format: Format,
    ) -> Result<usize, BlocksError> {
        if !self.inputs.is_multiple_of(format.block()) {
            return Err(BlocksError::Inputs(format));
        }
        let is_part = |part: &Part<E>| part.outputs.start == first && part.outputs.len() == rows;
        self.parts.iter().position(is_part).ok_or(BlocksError::NoPart)
    }

    /// Writes rows `ids` of the weight to the rows of `out`, in the layer's type.
    ///
    /// # Panics
    /// There is no such row, or the shapes do not fit.
    pub fn read_rows(&self, team: &Team, ids: &[usize], out: &RowsMut<'_, E>) {
        assert_eq!(out.shape(), (ids.len(), self.inputs), "shape of out");
        team.run(ids.len(), |i| {
            let row = ids[i];
            let part = self.parts.iter().find(|part| part.outputs.contains(&row));
            // SAFETY: each task has a row of its own.
            let out = unsafe { out.part(i, 0, self.inputs) };
            part.expect("a row of the weight").read_row(row, out);
        });
    }

    /// Bytes of weight and bias as they are kept.
    pub fn num_bytes(&self) -> usize {
        let weights: usize = self.parts.iter().map(Part::num_bytes).sum();
        weights + size_of_val(self.bias.as_slice())
    }

    /// How many parts there are.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The formats of the parts; `None` where a part is dense.
    pub fn formats(&self) -> impl Iterator<Item = Option<Format>> {
        self.parts.iter().map(Part::format)
    }

    /// Sets the biases from output `first` on.
    ///
    /// # Panics
    /// The layer has no bias, or there are no such outputs.
    pub fn copy_bias(&mut self, first: usize, bias: &[E]) {
        assert!(self.has_bias() && self.has_outputs(first, bias.len()), "outputs with a bias");
        for (to, from) in self.bias[first..].iter_mut().zip(bias) {
            *to = from.to_f32();
        }
    }

    fn has_outputs(&self, first: usize, count: usize) -> bool {
        first.checked_add(count).is_some_and(|end| end <= self.outputs)
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
    /// # Errors
    /// There is no memory for quantized activations; nothing is written.
    ///
    /// # Panics
    /// The shapes do not fit, or the layer is of `f32` and `out` is not.
    pub fn forward<O: Element>(
        &self,
        form: Form,
        team: &Team,
        x: Rows<'_, E>,
        residual: Option<Rows<'_, O>>,
        out: &RowsMut<'_, O>,
    ) -> Result<(), OutOfMemory> {
        self.multiply(form, team, x, residual, out, |_, _| {})
    }

    /// Writes `x W^T + b` to `wide`, and to `out` what [`gated`] makes of it, bit for bit. For few rows the
    /// threads wait for each other once: who makes the last of a panel's gates and values opens them.
    ///
    /// # Errors
    /// There is no memory for quantized activations; nothing is written.
    ///
    /// # Panics
    /// The shapes do not fit.
    pub fn forward_gated(
        &self,
        form: Form,
        team: &Team,
        x: Rows<'_, E>,
        gate: Gate,
        wide: &mut RowsMut<'_, E>,
        out: &RowsMut<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let width = out.width();
        let whole = |part: &Part<E>| part.outputs.len().is_multiple_of(PANEL);
        let fits = width.is_multiple_of(PANEL) && self.parts.iter().all(whole);
        // Columns of many rows are read more slowly than the rows.
        if !fits || x.rows() > MIN_TASK_ROWS {
            self.forward(form, team, x, None, wide)?;
            gated(form, team, gate, wide.read(), out);
            return Ok(());
        }
        assert_eq!(wide.shape(), (out.rows(), gate.width() * width), "wide");
        let made: Vec<AtomicUsize> = (0..width / PANEL).map(|_| AtomicUsize::new(0)).collect();
        let wide = &*wide;
        self.multiply(form, team, x, None, wide, |panel, rows| {
            let panel = panel % made.len();
            // AcqRel: who counts last sees the columns that another thread has made.
            if made[panel].fetch_add(1, Ordering::AcqRel) + 1 == gate.width() {
                let columns = panel * PANEL..(panel + 1) * PANEL;
                // SAFETY: few rows are one task a panel, so the panels of both halves have been made, and
                // one task counts last.
                form.run(unsafe { GatedPart::new(gate, wide, out, rows, columns) });
            }
        })
    }

    /// Writes `x W^T + b + residual` to `out`, and calls `then` with the panel and the rows of each task that
    /// was done.
    fn multiply<O: Element>(
        &self,
        form: Form,
        team: &Team,
        x: Rows<'_, E>,
        residual: Option<Rows<'_, O>>,
        out: &RowsMut<'_, O>,
        then: impl Fn(usize, Range<usize>) + Sync,
    ) -> Result<(), OutOfMemory> {
        assert_eq!(x.shape(), (out.rows(), self.inputs), "shape of x");
        assert_eq!(out.width(), self.outputs, "width of out");
        assert!(E::PER_WORD > 1 || O::PER_WORD == 1, "type of out");
        if let Some(residual) = &residual {
            assert_eq!(residual.shape(), out.shape(), "residual");
        }
        let product = Product {
            layer: self,
            form,
            x,
            residual,
            out,
            quantized: self.quantized(form, team, x)?,
        };
        let panels = self.parts.iter().map(Part::panels).sum();
        let split = Split::new(x.rows(), panels, team.threads());
        team.run(split.tasks(), |task| {
            let (number, rows) = split.task(team.in_order(task, split.tasks()));
            let (part, panel) = self.part_of(number);
            product.multiply_part(part, panel, 0, rows.clone());
            then(number, rows);
        });
        Ok(())
    }

    /// The rows of x in eight bits, if there is a part that wants them so.
    fn quantized(
        &self,
        form: Form,
        team: &Team,
        x: Rows<'_, E>,
    ) -> Result<Option<QuantizedRows>, OutOfMemory> {
        let wanted = |part: &Part<E>| matches!(part.storage, Storage::Int8(_));
        if !self.parts.iter().any(wanted) {
            return Ok(None);
        }
        QuantizedRows::new(ByteForm::of(form), team, x).map(Some)
    }

    /// The part that panel `panel` of the layer is of, and which one it is there.
    fn part_of(&self, mut panel: usize) -> (&Part<E>, usize) {
        for part in &self.parts {
            if panel < part.panels() {
                return (part, panel);
            }
            panel -= part.panels();
        }
        unreachable!("the layer has as many panels as its parts")
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
    fn new(rows: usize, panels: usize, threads: usize) -> Self {
        let wanted = (TASKS_OF_A_THREAD * threads)
            .max(ENOUGH_TASKS)
            .div_ceil(panels.max(1))
            .max(rows.div_ceil(MAX_TASK_ROWS));
        let chunk = rows.div_ceil(wanted).max(MIN_TASK_ROWS).next_multiple_of(6);
        Self { rows, chunk, chunks: rows.div_ceil(chunk), panels }
    }

    fn tasks(&self) -> usize {
        self.panels * self.chunks
    }

    /// The panel and the rows of a task; neighbours share the panel.
    fn task(&self, task: usize) -> (usize, Range<usize>) {
        let first = task % self.chunks * self.chunk;
        (task / self.chunks, first..(first + self.chunk).min(self.rows))
    }
}

/// A layer times the rows of a call.
struct Product<'a, E, O> {
    layer: &'a PackedLinear<E>,
    form: Form,
    x: Rows<'a, E>,
    residual: Option<Rows<'a, O>>,
    out: &'a RowsMut<'a, O>,
    /// The rows of x for parts that want them in eight bits.
    quantized: Option<QuantizedRows>,
}

impl<E: Element, O: Element> Product<'_, E, O> {
    /// Computes the outputs of panel `panel` of a part. The first column of out is output `first`.
    fn multiply_part(&self, part: &Part<E>, panel: usize, first: usize, rows: Range<usize>) {
        let task = PanelTask {
            x: self.x,
            results: Results {
                bias: &self.layer.bias,
                outputs: part.outputs.clone(),
                first,
                residual: self.residual,
                out: self.out,
                panel,
                rows,
            },
        };
        match &part.storage {
            Storage::Zeros => task.finish_sums(self.form, |_| {}),
            Storage::Dense(dense) => task.multiply_dense(self.form, dense.panel(panel)),
            Storage::Blocks(blocks) => task.multiply_blocks(self.form, blocks),
            Storage::Int8(weight) => {
                let x = self.quantized.as_ref().expect("rows for this part");
                task.multiply_int8(self.form, weight, x);
            }
        }
    }
}

/// One panel of a part times a few rows.
struct PanelTask<'a, E, O> {
    x: Rows<'a, E>,
    results: Results<'a, O>,
}

/// Where the results of a task go, and what is added to its sums.
struct Results<'a, O> {
    /// Of all outputs; empty without a bias.
    bias: &'a [f32],
    /// Outputs of the part.
    outputs: Range<usize>,
    /// The output that is the first column of out.
    first: usize,
    residual: Option<Rows<'a, O>>,
    out: &'a RowsMut<'a, O>,
    panel: usize,
    rows: Range<usize>,
}

impl<'a, O: Element> Results<'a, O> {
    /// The same, if they are of type `U`.
    fn of_type<U: Element>(&self) -> Option<Results<'a, U>> {
        Some(Results {
            bias: self.bias,
            outputs: self.outputs.clone(),
            first: self.first,
            residual: self.residual.and_then(Rows::of_type),
            out: self.out.of_type()?,
            panel: self.panel,
            rows: self.rows.clone(),
        })
    }
}

/// Adds the products of rows with lines of a panel to the rows' sums, in the order of the depth.
struct AddLines<'a, E> {
    rows: TaskRows<'a, E>,
    /// Lines of 64 words, the first of which is of depth `start`.
    lines: &'a [u32],
    start: usize,
    /// Columns that are outputs.
    used: usize,
    sums: &'a mut [Sums],
}

impl<E: Element> Kernel for AddLines<'_, E> {
    type Output = ();

    const HAS_BF16: bool = E::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        for (row, height) in heights(self.sums.len()) {
            for column in (0..self.used).step_by(L::WIDTH * L::LANES) {
                let task = &mut self;
                run_tile::<L>(height, true, Tile { task, lanes, row, column });
            }
        }
    }
}

/// A register tile: a few rows times a few vectors of the panel, from `row` and `column`.
struct Tile<'t, 'a, E, L> {
    task: &'t mut AddLines<'a, E>,
    lanes: L,
    row: usize,
    column: usize,
}

impl<E: Element, L: Lanes> TileWork for Tile<'_, '_, E, L> {
    #[inline(always)]
    fn run<const H: usize, const W: usize>(self) {
        let (task, lanes) = (self.task, self.lanes);
        let sums = &mut task.sums[self.row..][..H];
        let rows = std::array::from_fn(|r| task.rows.words(self.row + r, task.start));
        let lines = &task.lines[self.column..];
        let panels = std::array::from_fn(|c| lines[c * L::LANES..].as_ptr());
        let depth = task.lines.len() / PANEL;
        let at = |c: usize| self.column + c * L::LANES;
        let mut acc = [[lanes.splat(0.0); W]; H];
        // SAFETY: a row of x holds `depth` words from `start` on, there are as many lines of 64, and
        // `column` starts a group of W * LANES of the 64 columns, as many as there are sums.
        unsafe {
            for (acc, sums) in acc.iter_mut().zip(&*sums) {
                for (c, acc) in acc.iter_mut().enumerate() {
                    *acc = lanes.load(sums.as_ptr().add(at(c)));
                }
            }
            dot_tile::<E, L, H, W>(lanes, &mut acc, &rows, &panels, PANEL, depth);
            for (sums, acc) in sums.iter_mut().zip(&acc) {
                for (c, &acc) in acc.iter().enumerate() {
                    lanes.store(sums.as_mut_ptr().add(at(c)), acc);
                }
            }
        }
    }
}

impl<'a, E: Element, O: Element> PanelTask<'a, E, O> {
    fn multiply_dense(self, form: Form, lines: &[u32]) {
        let (rows, used) = (self.rows(), self.results.used());
        self.finish_sums(form, |sums| {
            add_lines(form, AddLines { rows, lines, start: 0, used, sums });
        });
    }

    /// Dequantizes the blocks in registers for a few rows, and otherwise as many of them at a time as the
    /// first cache holds.
    fn multiply_blocks(self, form: Form, blocks: &PackedBlocks) {
        let (rows, used, panel) = (self.rows(), self.results.used(), self.results.panel);
        self.finish_sums(form, |sums| {
            if blocks.multiplies_few::<E>(form, sums.len()) {
                return blocks.multiply_few(form, panel, rows, sums);
            }
            let mut lines = [Line::UNWRITTEN; DEQUANTIZED_LINES];
            let inputs = rows.x.width();
            for start in (0..inputs).step_by(lines.len() * E::PER_WORD) {
                let count = lines.len().min((inputs - start) / E::PER_WORD);
                let lines = &mut lines[..count];
                blocks.dequantize::<E>(form, panel, start, lines);
                // SAFETY: all of them were just written.
                let lines = unsafe { words_of(lines) };
                add_lines(form, AddLines { rows, lines, start, used, sums });
            }
        });
    }

    fn rows(&self) -> TaskRows<'a, E> {
        TaskRows { x: self.x, first: self.results.rows.start }
    }

    fn multiply_int8(self, form: Form, weight: &Int8Weight, x: &QuantizedRows) {
        let (panel, first) = (self.results.panel, self.results.rows.start);
        // The sums are the same bits in every form, and so the results are to be.
        self.finish_sums(form.keeping_denormals(), |sums| {
            weight.multiply(ByteForm::of(form), panel, x, first, sums);
        });
    }

    /// Writes the outputs that the sums become to which `add` adds.
    fn finish_sums(self, form: Form, add: impl FnOnce(&mut [Sums])) {
        let mut sums: [MaybeUninit<Sums>; MAX_TASK_ROWS] = [const { MaybeUninit::uninit() }; _];
        let sums = &mut sums[..self.results.rows.len()];
        for sum in &mut *sums {
            sum.write([0.0; PANEL]);
        }
        // SAFETY: all of them were written; the type is the same but for that.
        let sums = unsafe { &mut *(std::ptr::from_mut(sums) as *mut [Sums]) };
        add(sums);
        self.results.finish_all(form, sums);
    }
}

/// Writes the outputs that a task's sums become.
struct Finish<'a, O> {
    results: Results<'a, O>,
    sums: &'a [Sums],
}

impl<O: Element> Kernel for Finish<'_, O> {
    type Output = ();

    const HAS_BF16: bool = O::PER_WORD > 1;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let first = self.results.rows.start;
        self.results.finish_rows(lanes, first, self.sums);
    }
}

impl<O: Element> Results<'_, O> {
    /// Columns of the panel that are outputs.
    fn used(&self) -> usize {
        PANEL.min(self.outputs.len() - self.panel * PANEL)
    }

    /// Writes the outputs that the sums become.
    fn finish_all(&self, form: Form, sums: &[Sums]) {
        if let Some(results) = self.of_type() {
            finish_f32(form, Finish { results, sums });
        } else if let Some(results) = self.of_type() {
            finish_bf16(form, Finish { results, sums });
        }
    }

    /// Writes the outputs that the sums of rows from `first` on become.
    #[inline(always)]
    fn finish_rows<L: Lanes>(&self, lanes: L, first: usize, sums: &[Sums]) {
        for (row, sums) in (first..).zip(sums) {
            for (i, sums) in sums.chunks_exact(L::LANES).enumerate() {
                // SAFETY: the chunk holds LANES numbers.
                let sums = unsafe { lanes.load(sums.as_ptr()) };
                self.finish(lanes, row, i * L::LANES, sums);
            }
        }
    }

    /// Adds bias and residual to the sums of a vector of the panel's columns and stores what of it lies
    /// inside the part.
    #[inline(always)]
    fn finish<L: Lanes>(&self, lanes: L, row: usize, column: usize, mut sum: L::V) {
        let column = self.outputs.start + self.panel * PANEL + column;
        if column >= self.outputs.end {
            return;
        }
        let count = L::LANES.min(self.outputs.end - column);
        if !self.bias.is_empty() {
            let bias = self.bias[column..column + L::LANES].as_ptr();
            // SAFETY: the slice holds LANES numbers.
            sum = lanes.add(sum, unsafe { lanes.load(bias) });
        }
        let column = column - self.first;
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

fn add_lines<E: Element>(form: Form, task: AddLines<'_, E>) {
    let AddLines { rows: TaskRows { x, first }, lines, start, used, sums } = task;
    if let Some(x) = x.of_type() {
        let rows = TaskRows { x, first };
        add_f32_lines(form, AddLines { rows, lines, start, used, sums });
    } else if let Some(x) = x.of_type() {
        let rows = TaskRows { x, first };
        add_bf16_lines(form, AddLines { rows, lines, start, used, sums });
    }
}

// Not generic, so that crates which use them need not compile the kernels again.

fn add_f32_lines(form: Form, task: AddLines<'_, f32>) {
    form.run(task);
}

fn add_bf16_lines(form: Form, task: AddLines<'_, Bf16>) {
    form.run(task);
}

fn finish_f32(form: Form, finish: Finish<'_, f32>) {
    form.run(finish);
}

fn finish_bf16(form: Form, finish: Finish<'_, Bf16>) {
    form.run(finish);
}

#[cfg(test)]
mod tests {
    use super::Split;

    #[test]
    fn tasks_cover_every_row_of_every_panel_once() {
        for rows in 0..400 {
            for (panels, threads) in [(1, 1), (3, 16), (9, 64), (48, 2), (768, 4)] {
                let split = Split::new(rows, panels, threads);
                let mut seen = vec![0; rows * panels];
                for task in 0..split.tasks() {
                    let (panel, rows_of_task) = split.task(task);
                    rows_of_task.for_each(|row| seen[panel * rows + row] += 1);
                }
                assert!(seen.iter().all(|&count| count == 1), "{rows} rows, {panels} panels");
            }
        }
    }
}
