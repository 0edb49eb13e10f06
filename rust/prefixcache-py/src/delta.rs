//! The Python class `DeltaMixer`.

use prefixcache_attention::{Attention, DeltaHeads, DeltaRule, HEAD_STEP, MAX_TAPS, StatePart};
use prefixcache_core::error::Argument;
use prefixcache_cpu::RowsMut;
use prefixcache_decoder as decoder;
use prefixcache_ops as ops;
use prefixcache_ops::rowwise::RmsNorm;
use pyo3::prelude::*;

use crate::arguments::{Number, One, Real, Value, or, whole_numbers};
use crate::cpu::{Matrix, numbers_at, numbers_if_given};
use crate::errors::{Result, ensure};
use crate::linear::{LayerElement, PackedLinear};
use crate::names;
use crate::parts::parts;

parts! {
    /// The gated delta rule, or Mamba-2, of a layer on the CPU: its linears, and float32 at these addresses.
    DeltaMixer(
        *, in_proj, key_heads, value_heads, key_dim, value_dim, taps, tiled=false, alike=None, conv,
        conv_bias=None, decay, time_bias, norm, skip=None, eps, out
    ) {
        in_proj: Py<PackedLinear>,
        key_heads: Number<names::KeyHeads>,
        value_heads: Number<names::ValueHeads>,
        key_dim: Number<names::KeyDim>,
        value_dim: Number<names::ValueDim>,
        taps: Number<names::Taps>,
        tiled: bool,
        alike: Option<Number<names::Alike>>,
        conv: Number<names::Conv>,
        conv_bias: Option<Number<names::ConvBias>>,
        decay: Number<names::Decay>,
        time_bias: Number<names::TimeBias>,
        norm: Number<names::Norm>,
        skip: Option<Number<names::Skip>>,
        eps: Real<names::Eps>,
        out: Py<PackedLinear>,
    }
    check
}

impl DeltaMixer {
    pub fn heads(&self) -> DeltaHeads {
        DeltaHeads {
            key_heads: self.key_heads.0,
            value_heads: self.value_heads.0,
            key_dim: self.key_dim.0,
            value_dim: self.value_dim.0,
            taps: self.taps.0,
            tiled: self.tiled,
            alike: or(self.alike, 1),
            corrects: self.skip.is_none(),
        }
    }

    fn check(&self) -> Result<()> {
        ensure!(
            self.heads().are_sound(),
            "value_heads",
            "must be a multiple of key_heads and these of alike, with key_dim and value_dim multiples of \
             {HEAD_STEP} and taps from 1 to {MAX_TAPS}"
        );
        Ok(())
    }

    pub fn linears(&self) -> [&PackedLinear; 2] {
        [self.in_proj.get(), self.out.get()]
    }

    pub fn fits(&self, hidden: usize) -> bool {
        let [in_proj, out] = self.linears();
        let of_heads =
            [self.heads().inputs(), self.heads().values()] == [in_proj.outputs, out.inputs];
        of_heads && [in_proj.inputs, out.outputs] == [hidden; 2]
    }

    /// Numbers of the norm's weight.
    fn normed(&self) -> usize {
        let heads = self.heads();
        if heads.corrects { heads.value_dim } else { heads.values() }
    }

    /// # Safety
    /// The weights are addresses of numbers of float32.
    pub unsafe fn read<'a, E: LayerElement>(
        &self,
        parts: Vec<StatePart<'a>>,
        guessed: RowsMut<'a, E>,
        next: &mut impl FnMut() -> &'a ops::PackedLinear<E>,
    ) -> Result<decoder::DeltaMixer<'a, E>> {
        let heads = self.heads();
        // SAFETY: the caller's promise.
        let rule = unsafe { self.rule()? };
        let norm = RmsNorm {
            weight: rule.norm,
            offset: 0.0,
            group: heads.values() / heads.key_heads * heads.alike,
            eps: self.eps.0,
        };
        Ok(decoder::DeltaMixer {
            in_proj: next(),
            rule,
            parts,
            norm: (!heads.corrects).then_some(norm),
            guessed,
            out: next(),
        })
    }

    /// # Safety
    /// The weights are addresses of numbers of float32.
    pub unsafe fn rule<'a>(&self) -> Result<DeltaRule<'a>> {
        let (heads, value_heads) = (self.heads(), self.value_heads.0);
        // SAFETY: the caller's promise.
        unsafe {
            let skip = numbers_if_given(self.skip, value_heads)?;
            Ok(DeltaRule {
                heads,
                conv: Matrix::dense(self.conv, heads.taps, heads.channels()).rows()?,
                conv_bias: numbers_if_given(self.conv_bias, heads.channels())?,
                decay: numbers_at(self.decay, value_heads)?,
                time_bias: numbers_at(self.time_bias, value_heads)?,
                norm: numbers_at(self.norm, self.normed())?,
                skip: skip.unwrap_or(&[]),
                eps: self.eps.0,
            })
        }
    }
}

/// Whether the plans of this attention list the pages that a state is read from.
pub fn sees_states(attention: &Attention) -> bool {
    attention.window_left.is_none_or(|left| left >= 1)
}

/// Where a part of a layer's state lies, in each page of a group.
pub struct StatePlace {
    pub layer: usize,
    pub group: usize,
    pub address: Number<names::States>,
    pub numbers: usize,
}

impl Value for StatePlace {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let wanted = "a layer, a group, an address and a number of float32 numbers";
        let [layer, group, address, numbers] = whole_numbers(argument, wanted, value)?;
        Ok(Self { layer, group, address: One::new(address), numbers })
    }
}
