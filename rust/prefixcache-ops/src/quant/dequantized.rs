//! Panels of blocks that are dequantized once, to be multiplied with many rows as dense ones are.

use prefixcache_cpu::{Element, Form, OutOfMemory, RowsMut, Team};

use super::packed::{Line, PackedBlocks};
use crate::panel::PANEL;

/// Bytes of dequantized panels for each thread: they are multiplied while caches still hold them.
const BYTES_A_THREAD: usize = 2 << 20;

/// Numbers of the depth that a task dequantizes: whole groups of every format.
const CHUNK: usize = 256;

/// Room for the words of some panels of a layer.
pub struct DequantizedPanels {
    lines: Vec<Line>,
    /// Lines of a panel.
    depth: usize,
    room: usize,
}

impl DequantizedPanels {
    /// Room for up to `panels` panels of `depth` lines, and for one in any case.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn new(team: &Team, panels: usize, depth: usize) -> Result<Self, OutOfMemory> {
        let most = BYTES_A_THREAD * team.threads() / (size_of::<Line>() * depth).max(1);
        Self::with_room(panels.min(most).max(1), depth)
    }

    /// Room for `room` panels of `depth` lines.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn with_room(room: usize, depth: usize) -> Result<Self, OutOfMemory> {
        let count = room.checked_mul(depth).ok_or(OutOfMemory)?;
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).map_err(|_| OutOfMemory)?;
        // SAFETY: there is room for them, and any bytes are such a line.
        unsafe { lines.set_len(count) };
        Ok(Self { lines, depth, room })
    }

    /// The places, a row of lines each.
    pub fn places(&mut self) -> RowsMut<'_, Line> {
        RowsMut::new(self.lines.as_mut_slice(), self.depth)
    }

    /// How many panels there is room for.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Dequantizes panels, each to the place that it is named with.
    ///
    /// # Panics
    /// There is no such place.
    pub fn dequantize<E: Element>(
        &mut self,
        team: &Team,
        form: Form,
        panels: &[(usize, &PackedBlocks, usize)],
    ) {
        let (depth, chunk) = (self.depth, CHUNK / E::PER_WORD);
        let chunks = depth.div_ceil(chunk);
        let places = self.places();
        team.run(panels.len() * chunks, |task| {
            let (place, blocks, panel) = panels[task / chunks];
            let first = task % chunks * chunk;
            // SAFETY: each task has a place and lines of its own.
            let to = unsafe { places.part(place, first, chunk.min(depth - first)) };
            blocks.dequantize::<E>(form, panel, first * E::PER_WORD, to);
        });
    }

    /// The words of the panel at a place.
    ///
    /// # Safety
    /// A panel was dequantized to this place.
    pub unsafe fn panel(&self, place: usize) -> &[u32] {
        let lines = &self.lines[place * self.depth..][..self.depth];
        // SAFETY: all of them were written, as the caller vouches.
        unsafe { words_of(lines) }
    }
}

/// The words of some lines.
///
/// # Safety
/// All of them were written.
pub unsafe fn words_of(lines: &[Line]) -> &[u32] {
    // SAFETY: a line is 64 words, which were written, as the caller vouches.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * PANEL) }
}
