//! A part of a layer's outputs, whose weight is one tensor of a checkpoint.

use std::ops::Range;

use prefixcache_cpu::{AlignedWords, Element, Form, OutOfMemory, Rows, Team, WordSource};

use crate::dense::PackedDense;
use crate::int8::Int8Weight;
use crate::panel::PANEL;
use crate::quant::blocks::Format;
use crate::quant::packed::PackedBlocks;

/// What parts that hold blocks are multiplied with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// The activations.
    #[default]
    Exact,
    /// The activations quantized to eight bits, as [`crate::int8`] says.
    Int8,
}

/// What the numbers of a part are kept as.
pub enum Storage<E> {
    /// All are zero; nothing is kept.
    Zeros,
    /// As numbers of the layer's type.
    Dense(PackedDense<E>),
    /// As blocks, exactly.
    Blocks(PackedBlocks),
    /// As blocks, for activations of eight bits.
    Int8(Int8Weight),
}

/// Outputs that belong together, and their weight.
pub struct Part<E> {
    /// Which outputs of the layer they are.
    pub outputs: Range<usize>,
    /// The weight.
    pub storage: Storage<E>,
}

impl<E: Element> Part<E> {
    /// Panels of the weight.
    pub fn panels(&self) -> usize {
        self.outputs.len().div_ceil(PANEL)
    }

    /// The words of the weight, as they lie in memory; `None` where nothing is kept.
    pub fn words(&self) -> Option<&AlignedWords> {
        match &self.storage {
            Storage::Zeros => None,
            Storage::Dense(dense) => Some(dense.words()),
            Storage::Blocks(blocks) => Some(blocks.words()),
            Storage::Int8(blocks) => Some(blocks.words()),
        }
    }

    /// Bytes of the weight.
    pub fn num_bytes(&self) -> usize {
        self.words().map_or(0, |words| size_of_val(words.as_slice()))
    }

    /// Whether it may be written where it lies.
    fn is_own(&self) -> bool {
        self.words().is_some_and(|words| !words.are_mapped())
    }

    /// Format of its blocks, if that is what it is kept as.
    pub fn format(&self) -> Option<Format> {
        match &self.storage {
            Storage::Blocks(blocks) => Some(blocks.format()),
            Storage::Int8(blocks) => Some(blocks.format()),
            _ => None,
        }
    }

    /// The rows among `rows` of the layer that are of this part.
    pub fn overlap(&self, rows: &Range<usize>) -> Range<usize> {
        let start = rows.start.max(self.outputs.start);
        start..rows.end.min(self.outputs.end).max(start)
    }

    /// Storage for dense numbers, where it has none of its own and some of `rows` are its rows.
    ///
    /// Those of its rows that are not among them have the numbers that they had.
    pub fn made_dense(
        &self,
        memory: &impl WordSource,
        inputs: usize,
        rows: &Range<usize>,
    ) -> Result<Option<PackedDense<E>>, OutOfMemory> {
        let written = self.overlap(rows);
        if written.is_empty() || (self.is_own() && self.format().is_none()) {
            return Ok(None);
        }
        let mut dense = PackedDense::new(memory, inputs, self.outputs.len())?;
        let mut numbers = vec![E::from_f32(0.0); inputs];
        for row in self.outputs.clone().filter(|row| !written.contains(row)) {
            self.read_row(row, &mut numbers);
            dense.copy_row(row - self.outputs.start, &numbers);
        }
        Ok(Some(dense))
    }

    /// Storage for blocks of this format, where it has none of its own.
    pub fn made_blocks(
        &self,
        memory: &impl WordSource,
        form: Form,
        inputs: usize,
        format: Format,
        activations: Activations,
    ) -> Result<Option<Storage<E>>, OutOfMemory> {
        if self.is_own() && self.format() == Some(format) {
            return Ok(None);
        }
        self.blocks_in(memory, form, inputs, format, activations).map(Some)
    }

    /// Blocks of this format that lie in `memory`.
    fn blocks_in(
        &self,
        memory: &impl WordSource,
        form: Form,
        inputs: usize,
        format: Format,
        activations: Activations,
    ) -> Result<Storage<E>, OutOfMemory> {
        let outputs = self.outputs.len();
        match activations {
            Activations::Exact => {
                PackedBlocks::new::<E>(memory, form, format, inputs, outputs).map(Storage::Blocks)
            }
            Activations::Int8 => {
                Int8Weight::new(memory, format, inputs, outputs).map(Storage::Int8)
            }
        }
    }

    /// Takes what lies in `memory`, laid out as such parts are, for its weight.
    pub fn take(
        &mut self,
        memory: &impl WordSource,
        form: Form,
        inputs: usize,
        format: Option<Format>,
        activations: Activations,
    ) -> Result<(), OutOfMemory> {
        self.storage = match format {
            None => Storage::Dense(PackedDense::new(memory, inputs, self.outputs.len())?),
            Some(format) => self.blocks_in(memory, form, inputs, format, activations)?,
        };
        Ok(())
    }

    /// Packs those of the dense rows from `first` on that are of this part, which is dense.
    pub fn copy_rows(&mut self, first: usize, weight: Rows<'_, E>) {
        let rows = self.overlap(&(first..first + weight.rows()));
        if let Storage::Dense(dense) = &mut self.storage {
            for row in rows {
                dense.copy_row(row - self.outputs.start, weight.row(row - first));
            }
        }
    }

    /// Packs its blocks; it has storage for them.
    pub fn copy_blocks(&mut self, team: &Team, rows: Rows<'_, u8>) {
        match &mut self.storage {
            Storage::Blocks(blocks) => blocks.pack(team, rows),
            Storage::Int8(blocks) => blocks.pack(team, rows),
            Storage::Zeros | Storage::Dense(_) => {}
        }
    }

    /// Reads row `row` of the layer, which is of this part.
    pub fn read_row(&self, row: usize, out: &mut [E]) {
        let row = row - self.outputs.start;
        match &self.storage {
            Storage::Zeros => out.fill(E::from_f32(0.0)),
            Storage::Dense(dense) => dense.read_row(row, out),
            Storage::Blocks(blocks) => blocks.read_row(row, out),
            Storage::Int8(blocks) => blocks.read_row(row, out),
        }
    }
}
