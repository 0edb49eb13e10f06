//! What each token computes alone.

use prefixcache_attention::KvElement;
use prefixcache_cpu::Rows;
use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_ops::PackedLinear;
use prefixcache_ops::experts::{self, Experts};
use prefixcache_ops::rowwise::{Gate, RmsNorm};

use crate::{Buffer, Step, Sum};

/// The feed-forward of a layer.
pub enum FeedForward<'a, E> {
    /// One gated MLP.
    Dense(Dense<'a, E>),
    /// A few of many gated MLPs, chosen for each token.
    Experts(Experts<'a, E>),
    /// Both, whose results are added.
    DenseAndExperts(DenseAndExperts<'a, E>),
}

impl<'a, E> FeedForward<'a, E> {
    fn dense(&self) -> Option<&Dense<'a, E>> {
        match self {
            Self::Dense(dense) => Some(dense),
            Self::Experts(_) => None,
            Self::DenseAndExperts(both) => Some(&both.dense),
        }
    }

    fn experts(&self) -> Option<&Experts<'a, E>> {
        match self {
            Self::Dense(_) => None,
            Self::Experts(experts) => Some(experts),
            Self::DenseAndExperts(both) => Some(&both.experts),
        }
    }
}

/// A gated MLP and experts next to it. Each reads the stream through a norm of E numbers and has a norm
/// of what it makes; the router has a norm of its own.
pub struct DenseAndExperts<'a, E> {
    /// Of what the MLP reads.
    pub dense_norm: RmsNorm<'a, E>,
    /// The MLP.
    pub dense: Dense<'a, E>,
    /// Of what the MLP makes.
    pub dense_out_norm: RmsNorm<'a, E>,
    /// Of what the router reads.
    pub router_norm: RmsNorm<'a, E>,
    /// Of what the experts read.
    pub experts_norm: RmsNorm<'a, E>,
    /// The experts.
    pub experts: Experts<'a, E>,
    /// Of what the experts make.
    pub experts_out_norm: RmsNorm<'a, E>,
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
    /// Of an MLP: its gates with what they let pass, and what passed.
    dense: [Buffer<E>; 2],
    experts: experts::Scratch<E>,
    /// Of an MLP and experts: what each reads, and what it makes.
    inputs: [Buffer<E>; 2],
    made: [Buffer<E>; 2],
}

impl<E: KvElement> Scratch<E> {
    pub fn new<'a>(
        rows: usize,
        all: impl Iterator<Item = &'a FeedForward<'a, E>> + Clone,
    ) -> Result<Self, OutOfMemory> {
        let dense = all.clone().filter_map(FeedForward::dense);
        let experts = all.clone().filter_map(FeedForward::experts);
        let hidden = all.filter_map(|one| match one {
            FeedForward::DenseAndExperts(both) => Some(both.dense.down.outputs()),
            _ => None,
        });
        let buffer = || Buffer::new(rows, hidden.clone());
        Ok(Self {
            dense: [
                Buffer::new(rows, dense.clone().map(|dense| dense.gate_up.outputs()))?,
                Buffer::new(rows, dense.map(|dense| dense.down.inputs()))?,
            ],
            experts: experts::Scratch::new(rows, experts)?,
            inputs: [buffer()?, buffer()?],
            made: [buffer()?, buffer()?],
        })
    }
}

impl Step<'_> {
    /// Adds what the feed-forward makes of the normalised stream to the stream.
    pub(crate) fn fed<E: KvElement>(
        &self,
        feed_forward: &FeedForward<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
        sum: Sum<'_, E>,
    ) -> Result<(), OutOfMemory> {
        match feed_forward {
            FeedForward::Dense(dense) => self.dense(dense, x, &mut scratch.dense, sum),
            FeedForward::Experts(experts) => self.add(sum, |residual, out| {
                let scratch = &mut scratch.experts;
                experts.forward(self.form, self.team, x, x, residual, out, scratch)
            }),
            FeedForward::DenseAndExperts(both) => self.dense_and_experts(both, x, scratch, sum),
        }
    }

    fn dense<E: KvElement>(
        &self,
        dense: &Dense<'_, E>,
        x: Rows<'_, E>,
        [gate_up, opened]: &mut [Buffer<E>; 2],
        sum: Sum<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let (wide, inner) = (dense.gate_up.outputs(), dense.down.inputs());
        let (mut wide, out) = (gate_up.write(wide), opened.write(inner));
        (dense.gate_up).forward_gated(self.form, self.team, x, dense.gate, &mut wide, &out)?;
        let opened = opened.read(inner);
        self.add(sum, |residual, out| self.linear(dense.down, opened, residual, out))
    }

    /// Each reads the stream as its norm makes it.
    fn dense_and_experts<E: KvElement>(
        &self,
        both: &DenseAndExperts<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
        sum: Sum<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let width = x.width();
        let [first, second] = &mut scratch.inputs;
        let [made, dense] = &mut scratch.made;
        self.norm(both.dense_norm, x, None, &first.write(width));
        let of_dense = Sum {
            residual: None,
            norm: Some(both.dense_out_norm),
            projected: made,
            out: &dense.write(width),
        };
        self.dense(&both.dense, first.read(width), &mut scratch.dense, of_dense)?;
        self.norm(both.router_norm, x, None, &first.write(width));
        self.norm(both.experts_norm, x, None, &second.write(width));
        both.experts.forward(
            self.form,
            self.team,
            first.read(width),
            second.read(width),
            None,
            &made.write(width),
            &mut scratch.experts,
        )?;
        let (made, dense) = (made.read(width), dense.read(width));
        self.add(sum, |residual, out| {
            assert!(residual.is_none(), "the sum has a norm");
            self.norm(both.experts_out_norm, made, Some(dense), out);
            Ok(())
        })
    }
}
