//! The Python class `DeltaMixer`.

use prefixcache_attention::{Attention, DeltaHeads, DeltaRule, HEAD_STEP, MAX_TAPS, StatePart};
use prefixcache_core::error::Argument;
use prefixcache_cpu::RowsMut;
use prefixcache_decoder as decoder;
use prefixcache_ops as ops;
use prefixcache_ops::rowwise::RmsNorm;
use pyo3::prelude::*;

use crate::arguments::{Number, Real, Value, wrong_type};
use crate::cpu::{DType, Matrix};
use crate::errors::out_of_range;
use crate::linear::{LayerElement, PackedLinear};
use crate::names;

/// The gated delta rule, or Mamba-2, of a layer on the CPU: its weights.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DeltaMixer {
    in_proj: Py<PackedLinear>,
    heads: DeltaHeads,
    conv: usize,
    conv_bias: Option<usize>,
    decay: usize,
    time_bias: usize,
    norm: usize,
    skip: Option<usize>,
    eps: f32,
    out: Py<PackedLinear>,
}

#[pymethods]
impl DeltaMixer {
    /// The rule between these linears: `value_heads` heads of values, which share `key_heads` of keys:
    /// neighbours one, or with `tiled` those that are `key_heads` apart.
    ///
    /// `in_proj` makes queries, keys, values, z, b and a of a token. At the addresses is float32: at
    /// `conv` [taps, channels], the oldest token's first, at `decay` and `time_bias` [value_heads], at
    /// `norm` [value_dim], to whose mean squares `eps` is added.
    ///
    /// With `skip` [value_heads] it is Mamba-2: `in_proj` makes C, B, x, z and dt, and `norm` has a number for
    /// all values: a group of it are those of `alike` key heads in a row, which have the same B and C.
    /// `conv_bias` is [channels].
    #[new]
    #[pyo3(signature = (
        *, in_proj, key_heads, value_heads, key_dim, value_dim, taps, tiled=false, alike=None, conv,
        conv_bias=None, decay, time_bias, norm, skip=None, eps, out
    ))]
    fn new(
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
    ) -> PyResult<Self> {
        let heads = DeltaHeads {
            key_heads: key_heads.0,
            value_heads: value_heads.0,
            key_dim: key_dim.0,
            value_dim: value_dim.0,
            taps: taps.0,
            tiled,
            alike: alike.map_or(1, |alike| alike.0),
            corrects: skip.is_none(),
        };
        if !heads.are_sound() {
            let reason = format!(
                "must be a multiple of key_heads and these of alike, with key_dim and value_dim multiples of \
                 {HEAD_STEP} and taps from 1 to {MAX_TAPS}"
            );
            return Err(out_of_range("value_heads", reason));
        }
        Ok(Self {
            in_proj,
            heads,
            conv: conv.0,
            conv_bias: conv_bias.map(|bias| bias.0),
            decay: decay.0,
            time_bias: time_bias.0,
            norm: norm.0,
            skip: skip.map(|skip| skip.0),
            eps: eps.0,
            out,
        })
    }
}

impl DeltaMixer {
    pub fn linears(&self) -> [&PackedLinear; 2] {
        [self.in_proj.get(), self.out.get()]
    }

    pub fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let linears = self.linears();
        let [in_proj, out] = linears;
        let of_type = linears.iter().all(|linear| linear.dtype == dtype);
        let of_heads = [self.heads.inputs(), self.heads.values()] == [in_proj.outputs, out.inputs];
        of_type && of_heads && [in_proj.inputs, out.outputs] == [hidden; 2]
    }

    /// Numbers of the norm's weight.
    fn normed(&self) -> usize {
        if self.heads.corrects { self.heads.value_dim } else { self.heads.values() }
    }

    /// Numbers of a state.
    pub fn state(&self) -> usize {
        self.heads.state()
    }

    /// Numbers of a token that pass the states.
    pub fn inputs(&self) -> usize {
        self.heads.inputs()
    }

    /// # Safety
    /// The weights are addresses of numbers of float32.
    pub unsafe fn read<'a, E: LayerElement>(
        &self,
        parts: Vec<StatePart<'a>>,
        guessed: RowsMut<'a, E>,
        [in_proj, out]: [&'a ops::PackedLinear<E>; 2],
    ) -> PyResult<decoder::DeltaMixer<'a, E>> {
        let heads = self.heads;
        // SAFETY: the caller's promise.
        let rule = unsafe { self.rule()? };
        let norm = RmsNorm {
            weight: rule.norm,
            offset: 0.0,
            group: heads.values() / heads.key_heads * heads.alike,
            eps: self.eps,
        };
        Ok(decoder::DeltaMixer {
            in_proj,
            rule,
            parts,
            norm: (!heads.corrects).then_some(norm),
            guessed,
            out,
        })
    }

    /// # Safety
    /// The weights are addresses of numbers of float32.
    pub unsafe fn rule<'a>(&self) -> PyResult<DeltaRule<'a>> {
        let rows = |name, address, count, width| {
            // SAFETY: the caller's promise.
            unsafe { Matrix::dense_at(name, address, count, width).rows::<f32>() }
        };
        let row = |name, address, width| Ok::<_, PyErr>(rows(name, address, 1, width)?.row(0));
        let (heads, value_heads) = (self.heads, self.heads.value_heads);
        let bias = |address| row("conv_bias", address, heads.channels());
        let skip = |address| row("skip", address, value_heads);
        Ok(DeltaRule {
            heads,
            conv: rows("conv", self.conv, heads.taps, heads.channels())?,
            conv_bias: self.conv_bias.map(bias).transpose()?,
            decay: row("decay", self.decay, value_heads)?,
            time_bias: row("time_bias", self.time_bias, value_heads)?,
            norm: row("norm", self.norm, self.normed())?,
            skip: self.skip.map(skip).transpose()?.unwrap_or(&[]),
            eps: self.eps,
        })
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
    pub address: usize,
    pub numbers: usize,
}

impl Value for StatePlace {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let four = value.extract::<[Bound<'_, PyAny>; 4]>();
        let wanted = "a layer, a group, an address and a number of float32 numbers";
        let [layer, group, address, numbers] =
            four.map_err(|_| wrong_type(argument, wanted, value))?;
        let read = |value| usize::read(argument, value);
        Ok(Self {
            layer: read(&layer)?,
            group: read(&group)?,
            address: read(&address)?,
            numbers: read(&numbers)?,
        })
    }
}
