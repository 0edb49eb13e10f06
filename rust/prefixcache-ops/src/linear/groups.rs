//! Products of rows in groups, each with parts of its own: what experts compute.

use std::ops::Range;

use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_cpu::{Element, Form, Rows, RowsMut, Team};

use super::{PackedLinear, Product};
use crate::panel::MAX_TASK_ROWS;

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
    /// There is no memory for quantized activations; nothing is written.
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
        team.run(tasks.len(), |task| {
            let task = &tasks[team.in_order(task, tasks.len())];
            product.multiply_in_group(&groups[task.group], task);
        });
        Ok(())
    }

    /// # Panics
    /// As [`PackedLinear::forward_groups`].
    fn check_groups(&self, groups: &[RowGroup], (rows, width): (usize, usize)) {
        let mut end = 0;
        for group in groups {
            assert!(end <= group.rows.start && group.rows.end <= rows, "rows of groups");
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
}

impl<E: Element, O: Element> Product<'_, E, O> {
    /// Computes a panel for all rows of its group.
    fn multiply_in_group(&self, group: &RowGroup, task: &GroupTask) {
        let part = &self.layer.parts[task.part];
        let first = self.layer.parts[group.parts.start].outputs.start;
        let rows = group.rows.clone();
        for start in rows.clone().step_by(MAX_TASK_ROWS) {
            let rows = start..(start + MAX_TASK_ROWS).min(rows.end);
            self.multiply_part(part, task.panel, first, rows);
        }
    }
}
