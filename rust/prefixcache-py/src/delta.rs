//! The Python class `DeltaMixer`.

use prefixcache_attention::{Attention, DeltaHeads, DeltaRule, HEAD_STEP, MAX_TAPS, StatePart};
use prefixcache_core::error::Argument;
use prefixcache_cpu::RowsMut;
use prefixcache_decoder as decoder;
use prefixcache_ops as ops;
use pyo3::prelude::*;

use crate::arguments::{Number, Value, wrong_type};
use crate::cpu::{DType, Matrix};
use crate::errors::out_of_range;
use crate::linear::{LayerElement, PackedLinear};
use crate::names;

/// The gated delta rule of a layer on the CPU: its weights.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DeltaMixer {
    in_proj: Py<PackedLinear>,
    heads: DeltaHeads,
    conv: usize,
    decay: usize,
    time_bias: usize,
    norm: usize,
    out: Py<PackedLinear>,
}

#[pymethods]
impl DeltaMixer {
    /// The rule between these linears: `value_heads` heads of values, which share `key_heads` of keys:
    /// neighbours one, or with `tiled` those that are `key_heads` apart.
    ///
    /// `in_proj` makes queries, keys, values, z, b and a of a token. At the addresses is float32: at
    /// `conv` [taps, channels], the oldest token's first, at `decay` and `time_bias` [value_heads], at
    /// `norm` [value_dim].
    #[new]
    #[pyo3(signature = (
        *, in_proj, key_heads, value_heads, key_dim, value_dim, taps, tiled=false, conv, decay, time_bias,
        norm, out
    ))]
    fn new(
        in_proj: Py<PackedLinear>,
        key_heads: Number<names::KeyHeads>,
        value_heads: Number<names::ValueHeads>,
        key_dim: Number<names::KeyDim>,
        value_dim: Number<names::ValueDim>,
        taps: Number<names::Taps>,
        tiled: bool,
        conv: Number<names::Conv>,
        decay: Number<names::Decay>,
        time_bias: Number<names::TimeBias>,
        norm: Number<names::Norm>,
        out: Py<PackedLinear>,
    ) -> PyResult<Self> {
        let heads = DeltaHeads {
            key_heads: key_heads.0,
            value_heads: value_heads.0,
            key_dim: key_dim.0,
            value_dim: value_dim.0,
            taps: taps.0,
            tiled,
        };
        if !heads.are_sound() {
            let reason = format!(
                "must be a multiple of key_heads, with key_dim and value_dim multiples of {HEAD_STEP} and taps \
                 from 1 to {MAX_TAPS}"
            );
            return Err(out_of_range("value_heads", reason));
        }
        Ok(Self {
            in_proj,
            heads,
            conv: conv.0,
            decay: decay.0,
            time_bias: time_bias.0,
            norm: norm.0,
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
        eps: f32,
        parts: Vec<StatePart<'a>>,
        guessed: RowsMut<'a, E>,
        [in_proj, out]: [&'a ops::PackedLinear<E>; 2],
    ) -> PyResult<decoder::DeltaMixer<'a, E>> {
        Ok(decoder::DeltaMixer {
            in_proj,
            // SAFETY: the caller's promise.
            rule: unsafe { self.rule(eps)? },
            parts,
            guessed,
            out,
        })
    }

    /// # Safety
    /// The weights are addresses of numbers of float32.
    pub unsafe fn rule<'a>(&self, eps: f32) -> PyResult<DeltaRule<'a>> {
        let rows = |name, address, count, width| {
            // SAFETY: the caller's promise.
            unsafe { Matrix::dense_at(name, address, count, width).rows::<f32>() }
        };
        let heads = self.heads;
        Ok(DeltaRule {
            heads,
            conv: rows("conv", self.conv, heads.taps, heads.channels())?,
            decay: rows("decay", self.decay, 1, heads.value_heads)?.row(0),
            time_bias: rows("time_bias", self.time_bias, 1, heads.value_heads)?.row(0),
            norm: rows("norm", self.norm, 1, heads.value_dim)?.row(0),
            eps,
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
