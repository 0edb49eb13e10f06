//! What each token computes alone.

use prefixcache_attention::KvElement;
use prefixcache_cpu::Rows;
use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_ops::PackedLinear;
use prefixcache_ops::experts::{self, Experts};
use prefixcache_ops::rowwise::{Gate, gated};

use crate::{Buffer, Step, Sum};

/// The feed-forward of a layer.
pub enum FeedForward<'a, E> {
    /// One gated MLP.
    Dense(Dense<'a, E>),
    /// A few of many gated MLPs, chosen for each token.
    Experts(Experts<'a, E>),
}

/// An MLP, gated or not.
pub struct Dense<'a, E> {
    /// E to 2 F: gates, then what they let pass; or E to F.
    pub gate_up: &'a PackedLinear<E>,
    /// What opens the gates, or becomes of F.
    pub gate: Gate,
    /// F to E
    pub down: &'a PackedLinear<E>,
}

/// Room for what passes between its kernels.
pub struct Scratch<E> {
    gate_up: Buffer<E>,
    opened: Buffer<E>,
    experts: experts::Scratch<E>,
}

impl<E: KvElement> Scratch<E> {
    pub fn new<'a>(
        rows: usize,
        all: impl Iterator<Item = &'a FeedForward<'a, E>> + Clone,
    ) -> Result<Self, OutOfMemory> {
        let dense = all.clone().filter_map(|one| match one {
            FeedForward::Dense(dense) => Some(dense),
            FeedForward::Experts(_) => None,
        });
        let experts = all.filter_map(|one| match one {
            FeedForward::Experts(experts) => Some(experts),
            FeedForward::Dense(_) => None,
        });
        Ok(Self {
            gate_up: Buffer::new(rows, dense.clone().map(|dense| dense.gate_up.outputs()))?,
            opened: Buffer::new(rows, dense.map(|dense| dense.down.inputs()))?,
            experts: experts::Scratch::new(rows, experts)?,
        })
    }
}

impl Step<'_> {
    /// Adds the MLP of the normalised stream to the stream.
    pub(crate) fn dense<E: KvElement>(
        &self,
        dense: &Dense<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
        sum: Sum<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let (wide, inner) = (dense.gate_up.outputs(), dense.down.inputs());
        self.linear(dense.gate_up, x, None, &scratch.gate_up.write(wide))?;
        let gates = scratch.gate_up.read(wide);
        gated(
            self.form,
            self.team,
            dense.gate,
            gates,
            &scratch.opened.write(inner),
        );
        let opened = scratch.opened.read(inner);
        self.add(sum, |residual, out| {
            self.linear(dense.down, opened, residual, out)
        })
    }

    /// Adds the experts' MLPs of the normalised stream to the stream.
    pub(crate) fn experts<E: KvElement>(
        &self,
        experts: &Experts<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
        sum: Sum<'_, E>,
    ) -> Result<(), OutOfMemory> {
        self.add(sum, |residual, out| {
            let scratch = &mut scratch.experts;
            experts.forward(self.form, self.team, x, residual, out, scratch)
        })
    }
}
