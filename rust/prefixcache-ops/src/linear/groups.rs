//! Products of rows in groups, each with parts of its own: what experts compute.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_cpu::{Element, Form, Rows, RowsMut, Team};

use super::{PackedLinear, Product};
use crate::panel::MAX_TASK_ROWS;
use crate::part::{Part, Storage};
use crate::quant::dequantized::{DequantizedPanels, words_of};
use crate::quant::packed::Line;

/// Rows of a product, and the parts of the layer that they are multiplied with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowGroup {
    /// Rows of x and of out.
    pub rows: Range<usize>,
    /// Numbers of the parts, which follow each other.
    pub parts: Range<usize>,
}

/// A panel of a part, for the rows of a group.
struct GroupTask {
    group: usize,
    part: usize,
    panel: usize,
}

impl<E: Element> PackedLinear<E> {
    /// Writes `x W^T + b` of the rows of each group, with the outputs of its parts alone, to the same rows
    /// of `out`. What a row becomes is what [`PackedLinear::forward`] makes of it in those columns, bit
    /// for bit. No weight of another part is read.
    ///
    /// # Errors
    /// There is no memory for quantized activations or dequantized panels; nothing is written.
    ///
    /// # Panics
    /// There are no such rows or parts, the parts of a group have not as many outputs as `out` has
    /// columns, rows are in two groups, or the layer is of `f32` and `out` is not.
    pub fn forward_groups<O: Element>(
        &self,
        form: Form,
        team: &Team,
        x: Rows<'_, E>,
        groups: &[RowGroup],
        out: &RowsMut<'_, O>,
    ) -> Result<(), OutOfMemory> {
        assert_eq!(x.shape(), (out.rows(), self.inputs), "shape of x");
        assert!(E::PER_WORD > 1 || O::PER_WORD == 1, "type of out");
        self.check_groups(groups, out.shape());
        let product = Product {
            layer: self,
            form,
            x,
            residual: None,
            out,
            quantized: self.quantized(form, team, x)?,
        };
        let tasks = self.group_tasks(groups);
        let workers = team.threads().min(tasks.len());
        let depth = self.inputs / E::PER_WORD;
        let mut dequantized = match self.groups_dequantize(form, groups) {
            true => Some(DequantizedPanels::with_room(workers, depth)?),
            false => None,
        };
        let places = dequantized.as_mut().map(DequantizedPanels::places);
        let next = AtomicUsize::new(0);
        team.run(workers, |worker| {
            let lines = match &places {
                // SAFETY: each worker has a place of its own.
                Some(places) => unsafe { places.part(worker, 0, depth) },
                None => &mut [],
            };
            // Relaxed: nothing but the number is passed on.
            while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                product.multiply_in_group(&groups[task.group], task, lines);
            }
        });
        Ok(())
    }

    /// # Panics
    /// As [`PackedLinear::forward_groups`].
    fn check_groups(&self, groups: &[RowGroup], (rows, width): (usize, usize)) {
        let mut end = 0;
        for group in groups {
            assert!(
                end <= group.rows.start && group.rows.end <= rows,
                "rows of groups"
            );
            end = group.rows.end.max(end);
            let parts = &self.parts[group.parts.clone()];
            let outputs: usize = parts.iter().map(|part| part.outputs.len()).sum();
            assert_eq!(outputs, width, "width of out");
        }
    }

    /// The panels of all groups, those of one part after each other.
    fn group_tasks(&self, groups: &[RowGroup]) -> Vec<GroupTask> {
        let with_rows = groups.iter().enumerate();
        let with_rows = with_rows.filter(|(_, group)| !group.rows.is_empty());
        let parts = with_rows.flat_map(|(number, group)| {
            let parts = group.parts.clone();
            parts.map(move |part| (number, part))
        });
        let panels = parts.flat_map(|(group, part)| {
            let panels = 0..self.parts[part].panels();
            panels.map(move |panel| GroupTask { group, part, panel })
        });
        panels.collect()
    }

    fn groups_dequantize(&self, form: Form, groups: &[RowGroup]) -> bool {
        groups.iter().any(|group| {
            let mut parts = self.parts[group.parts.clone()].iter();
            parts.any(|part| part.dequantizes(form, group.rows.len()))
        })
    }
}

impl<E: Element> Part<E> {
    /// Whether it is of blocks, and there are too many rows to dequantize them in registers.
    pub(super) fn dequantizes(&self, form: Form, rows: usize) -> bool {
        match &self.storage {
            Storage::Blocks(blocks) => !blocks.multiplies_few::<E>(form, rows),
            _ => false,
        }
    }
}

impl<E: Element, O: Element> Product<'_, E, O> {
    /// Computes a panel for all rows of its group. `lines` has room for a panel where it is dequantized.
    fn multiply_in_group(&self, group: &RowGroup, task: &GroupTask, lines: &mut [Line]) {
        let part = &self.layer.parts[task.part];
        let first = self.layer.parts[group.parts.start].outputs.start;
        let rows = group.rows.clone();
        let mut words = None;
        if let Storage::Blocks(blocks) = &part.storage
            && part.dequantizes(self.form, rows.len())
        {
            blocks.dequantize::<E>(self.form, task.panel, 0, lines);
            // SAFETY: all of its lines were just written.
            words = Some(unsafe { words_of(lines) });
        }
        for start in rows.clone().step_by(MAX_TASK_ROWS) {
            let rows = start..(start + MAX_TASK_ROWS).min(rows.end);
            self.multiply_part(part, task.panel, first, rows, words);
        }
    }
}
