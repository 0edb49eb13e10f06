//! Panels of dense numbers.

use std::marker::PhantomData;

use prefixcache_cpu::{AlignedWords, Element, OutOfMemory, WordSource};

use crate::panel::PANEL;

/// Rows of a weight, packed: a panel has a line of words of its columns for each word of the depth
/// (see [`prefixcache_cpu::tile`]).
pub struct PackedDense<E> {
    words: AlignedWords,
    inputs: usize,
    element: PhantomData<E>,
}

impl<E: Element> PackedDense<E> {
    /// `outputs` rows of `inputs` numbers, which fill whole words: those that lie in `memory`.
    pub fn new(
        memory: &impl WordSource,
        inputs: usize,
        outputs: usize,
    ) -> Result<Self, OutOfMemory> {
        let padded = outputs.checked_next_multiple_of(PANEL).ok_or(OutOfMemory)?;
        let words = padded.checked_mul(inputs / E::PER_WORD);
        Ok(Self { words: memory.words(words.ok_or(OutOfMemory)?)?, inputs, element: PhantomData })
    }

    /// Their words, as they lie in memory.
    pub fn words(&self) -> &AlignedWords {
        &self.words
    }

    /// Packs row `row`.
    pub fn copy_row(&mut self, row: usize, numbers: &[E]) {
        let words = self.panel_words();
        let panel = &mut self.words.as_mut_slice()[row / PANEL * words..][..words];
        let from = numbers.as_ptr().cast::<u32>();
        for (w, line) in panel.chunks_exact_mut(PANEL).enumerate() {
            // SAFETY: the row holds as many whole words as the panel has lines.
            line[row % PANEL] = unsafe { from.add(w).read_unaligned() };
        }
    }

    /// Copies row `row` to `out`.
    pub fn read_row(&self, row: usize, out: &mut [E]) {
        let to = out.as_mut_ptr().cast::<u32>();
        for (w, line) in self.panel(row / PANEL).chunks_exact(PANEL).enumerate() {
            // SAFETY: `out` has room for as many whole words as the panel has lines.
            unsafe { to.add(w).write_unaligned(line[row % PANEL]) };
        }
    }

    /// The lines of a panel.
    pub fn panel(&self, panel: usize) -> &[u32] {
        let words = self.panel_words();
        &self.words.as_slice()[panel * words..(panel + 1) * words]
    }

    fn panel_words(&self) -> usize {
        self.inputs / E::PER_WORD * PANEL
    }
}
