//! The gated delta rule over states that lie in a cache.

use prefixcache_attention::{DeltaRule, KvElement, StatePart, delta_rule};
use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_cpu::{Rows, RowsMut};
use prefixcache_ops::PackedLinear;

use crate::{Buffer, Step, Sum};

/// What heads are made of, the delta rule, and what becomes of it.
pub struct DeltaMixer<'a, E> {
    /// E to queries, keys, values, z, b and a.
    pub in_proj: &'a PackedLinear<E>,
    /// The rule.
    pub rule: DeltaRule<'a>,
    /// Where its states lie, in the plans of the step.
    pub parts: Vec<StatePart<'a>>,
    /// Where the rule's inputs of the step's guesses are kept.
    pub guessed: RowsMut<'a, E>,
    /// Values to E
    pub out: &'a PackedLinear<E>,
}

/// Room for what passes between its kernels.
pub struct Scratch<E> {
    projected: Buffer<E>,
    read: Buffer<E>,
}

impl<E: KvElement> Scratch<E> {
    pub fn new<'a>(
        rows: usize,
        mixers: impl Iterator<Item = &'a DeltaMixer<'a, E>> + Clone,
    ) -> Result<Self, OutOfMemory> {
        Ok(Self {
            projected: Buffer::new(rows, mixers.clone().map(|mixer| mixer.in_proj.outputs()))?,
            read: Buffer::new(rows, mixers.map(|mixer| mixer.out.inputs()))?,
        })
    }
}

impl Step<'_> {
    /// Adds what the delta rule makes of the normalised stream to the stream.
    pub(crate) fn read_states<E: KvElement>(
        &self,
        mixer: &DeltaMixer<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
        sum: Sum<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let (inputs, values) = (mixer.in_proj.outputs(), mixer.out.inputs());
        self.linear(mixer.in_proj, x, None, &scratch.projected.write(inputs))?;
        let projected = scratch.projected.read(inputs);
        let guesses = mixer.parts[0].plan.guessed_rows(self.guesses);
        for (place, row) in guesses.enumerate() {
            // SAFETY: this thread alone uses the rows now.
            unsafe { mixer.guessed.part(place, 0, inputs) }.copy_from_slice(projected.row(row));
        }
        delta_rule(
            self.form,
            self.team,
            &mixer.rule,
            &mixer.parts,
            self.guesses,
            projected,
            &scratch.read.write(values),
        )?;
        let read = scratch.read.read(values);
        self.add(sum, |residual, out| {
            self.linear(mixer.out, read, residual, out)
        })
    }
}
