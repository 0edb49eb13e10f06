//! The gated delta rule and Mamba-2 over states that lie in a cache.

use prefixcache_attention::{DeltaRule, KvElement, StatePart, delta_rule};
use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_cpu::{Rows, RowsMut};
use prefixcache_ops::PackedLinear;
use prefixcache_ops::rowwise::{RmsNorm, rms_norm};

use crate::{Buffer, Step, Sum};

/// What heads are made of, the rule, and what becomes of it.
pub struct DeltaMixer<'a, E> {
    /// E to queries, keys, values, z, b where the rule corrects, and a.
    pub in_proj: &'a PackedLinear<E>,
    /// The rule.
    pub rule: DeltaRule<'a>,
    /// Where its states lie, in the plans of the step.
    pub parts: Vec<StatePart<'a>>,
    /// Of the values: the norm of what heads make, where the rule has none.
    pub norm: Option<RmsNorm<'a, f32>>,
    /// Where the rule's inputs of the step's guesses are kept.
    pub guessed: RowsMut<'a, E>,
    /// Values to E
    pub out: &'a PackedLinear<E>,
}

impl<E: KvElement> DeltaMixer<'_, E> {
    /// Numbers of a token that the norm takes.
    fn before_norm(&self) -> usize {
        self.norm.map_or(0, |_| self.out.inputs())
    }

    /// Writes what heads read from their states, and the states.
    fn read_heads<O: KvElement>(
        &self,
        step: &Step<'_>,
        x: Rows<'_, E>,
        out: &RowsMut<'_, O>,
    ) -> Result<(), OutOfMemory> {
        let (rule, parts) = (&self.rule, &self.parts);
        delta_rule(step.form, step.team, rule, parts, step.guesses, x, out)
    }
}

/// Room for what passes between its kernels.
pub struct Scratch<E> {
    projected: Buffer<E>,
    gated: Buffer<f32>,
    read: Buffer<E>,
}

impl<E: KvElement> Scratch<E> {
    pub fn new<'a>(
        rows: usize,
        mixers: impl Iterator<Item = &'a DeltaMixer<'a, E>> + Clone,
    ) -> Result<Self, OutOfMemory> {
        Ok(Self {
            projected: Buffer::new(rows, mixers.clone().map(|mixer| mixer.in_proj.outputs()))?,
            gated: Buffer::new(rows, mixers.clone().map(|mixer| mixer.before_norm()))?,
            read: Buffer::new(rows, mixers.map(|mixer| mixer.out.inputs()))?,
        })
    }
}

impl Step<'_> {
    /// Adds what the rule makes of the normalised stream to the stream.
    pub(crate) fn read_states<E: KvElement>(
        &self,
        mixer: &DeltaMixer<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
        sum: Sum<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let (inputs, values) = (mixer.in_proj.outputs(), mixer.out.inputs());
        self.linear(mixer.in_proj, x, None, &scratch.projected.write(inputs))?;
        let (projected, out) = (scratch.projected.read(inputs), scratch.read.write(values));
        let guesses = mixer.parts[0].plan.guessed_rows(self.guesses);
        for (place, row) in guesses.enumerate() {
            // SAFETY: this thread alone uses the rows now.
            unsafe { mixer.guessed.part(place, 0, inputs) }.copy_from_slice(projected.row(row));
        }
        if let Some(norm) = mixer.norm {
            mixer.read_heads(self, projected, &scratch.gated.write(values))?;
            let gated = scratch.gated.read(values);
            rms_norm(self.form, self.team, norm, gated, None, &out);
        } else {
            mixer.read_heads(self, projected, &out)?;
        }
        let read = scratch.read.read(values);
        self.add(sum, |residual, out| self.linear(mixer.out, read, residual, out))
    }
}
