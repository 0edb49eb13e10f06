//! The Python class `DecoderStack`.

use std::sync::RwLockReadGuard;

use prefixcache_attention::{Attention, KvElement};
use prefixcache_core::error::Argument;
use prefixcache_decoder::{DecoderLayer, Scratch, Step};
use prefixcache_ops as ops;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::{List, Number, Numbers, OneOf, Real, Value, wrong_type};
use crate::attention::{PagedAttention, PlannedStep};
use crate::cpu::{Cpu, DType, Matrix, with_dtype};
use crate::errors::{IntoPyErr, out_of_range};
use crate::linear::{Layer, LayerElement, PackedLinear};
use crate::names;

/// The layers of a decoder on the CPU, one call a step.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DecoderStack {
    cpu: Py<Cpu>,
    dtype: DType,
    eps: f32,
    hidden: usize,
    layers: Vec<Weights>,
}

/// The weights of a layer; norms as addresses, 0 where there is none.
#[derive(FromPyObject)]
struct Weights(
    usize,
    Py<PackedLinear>,
    usize,
    Py<PackedLinear>,
    usize,
    Py<PackedLinear>,
    Py<PackedLinear>,
);

impl Value for Weights {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let form = "a tuple (input_norm, qkv, qk_norm, out, post_norm, gate_up, down) of addresses and linears";
        value
            .extract()
            .map_err(|_| wrong_type(argument, form, value))
    }
}

impl Weights {
    fn check(&self, number: usize, hidden: usize, dtype: DType) -> PyResult<()> {
        let Self(_, qkv, _, out, _, gate_up, down) = self;
        let [qkv, out, gate_up, down] = [qkv, out, gate_up, down].map(|layer| layer.get());
        let of_type = [qkv, out, gate_up, down].map(|layer| layer.dtype);
        let stream = [qkv.inputs, out.outputs, gate_up.inputs, down.outputs];
        let fits = gate_up.outputs == 2 * down.inputs;
        if fits && of_type == [dtype; 4] && stream == [hidden; 4] {
            return Ok(());
        }
        let reason = format!("has linears whose shapes or types do not fit in layer {number}");
        Err(out_of_range("layers", reason))
    }
}

/// A layer's linears, which nobody writes meanwhile: qkv, out, gate_up, down.
struct Linears<'a>([RwLockReadGuard<'a, Layer>; 4]);

impl<'a> Linears<'a> {
    fn of(weights: &'a Weights) -> PyResult<Self> {
        let Weights(_, qkv, _, out, _, gate_up, down) = weights;
        Ok(Self([
            qkv.get().read()?,
            out.get().read()?,
            gate_up.get().read()?,
            down.get().read()?,
        ]))
    }

    fn get<E: LayerElement>(&self, number: usize) -> &ops::PackedLinear<E> {
        E::of(&self.0[number]).expect("types were checked with the shapes")
    }
}

/// The tensors of a step.
struct Tensors {
    cos: Matrix,
    sin: Matrix,
    x: Matrix,
    caches: Vec<Matrix>,
}

impl DecoderStack {
    /// # Safety
    /// The addresses are those of numbers of type E, and of float32 for the angles.
    unsafe fn run<E: LayerElement + KvElement>(
        &self,
        attention: &Attention,
        planned: &PlannedStep,
        tensors: &Tensors,
        linears: &[Linears<'_>],
    ) -> PyResult<()> {
        let cpu = self.cpu.get();
        // SAFETY: the caller's promise.
        let (cos, sin, mut x) = unsafe {
            (
                tensors.cos.rows()?,
                tensors.sin.rows()?,
                tensors.x.rows_mut::<E>()?,
            )
        };
        let step = Step {
            form: cpu.form,
            team: &cpu.team,
            attention,
            eps: self.eps,
            plan: &planned.plan,
            slots: &planned.slots,
            cos,
            sin,
        };
        let mut scratch: Option<Scratch<E>> = None;
        for ((weights, linears), cache) in self.layers.iter().zip(linears).zip(&tensors.caches) {
            // SAFETY: the caller's promise.
            let layer = unsafe { self.layer::<E>(attention, weights, linears)? };
            let scratch = match &mut scratch {
                Some(scratch) => scratch,
                none => none.insert(
                    Scratch::new(x.rows(), attention, &layer).map_err(IntoPyErr::into_py_err)?,
                ),
            };
            // SAFETY: the caller's promise; each layer has a cache of its own.
            let mut cache = unsafe { cache.rows_mut::<E>()? };
            step.forward(&layer, &mut cache, &mut x, scratch)
                .map_err(IntoPyErr::into_py_err)?;
        }
        Ok(())
    }

    /// # Safety
    /// The norms are addresses of numbers of type E.
    unsafe fn layer<'a, E: LayerElement>(
        &self,
        attention: &Attention,
        weights: &Weights,
        linears: &'a Linears<'_>,
    ) -> PyResult<DecoderLayer<'a, E>> {
        let heads = (attention.heads() + attention.kv_heads()) * attention.head_dim();
        let vector = |name, address, width| {
            // SAFETY: the caller's promise.
            let rows = unsafe { Matrix::dense_at(name, address, 1, width).rows::<E>() };
            Ok::<_, PyErr>(rows?.row(0))
        };
        Ok(DecoderLayer {
            input_norm: vector("input_norm", weights.0, self.hidden)?,
            qkv: linears.get(0),
            qk_norm: match weights.2 {
                0 => None,
                address => Some(vector("qk_norm", address, heads)?),
            },
            out: linears.get(1),
            post_norm: vector("post_norm", weights.4, self.hidden)?,
            gate_up: linears.get(2),
            down: linears.get(3),
        })
    }

    fn check_heads(&self, attention: &Attention) -> PyResult<()> {
        let dims = attention.head_dim();
        let (queries, rest) = (attention.heads() * dims, 2 * attention.kv_heads() * dims);
        let fits = |layer: &Weights| {
            layer.1.get().outputs == queries + rest && layer.3.get().inputs == queries
        };
        match self.layers.iter().all(fits) {
            true => Ok(()),
            false => Err(out_of_range("attention", "must have the layers' heads")),
        }
    }
}

#[pymethods]
impl DecoderStack {
    /// A stack of `layers` over a residual stream of `hidden` numbers a token.
    ///
    /// A layer is (input_norm, qkv, qk_norm, out, post_norm, gate_up, down): linears, and the
    /// addresses of norms, 0 for no `qk_norm`.
    #[new]
    fn new(
        cpu: Py<Cpu>,
        dtype: OneOf<DType>,
        hidden: Number<names::Hidden>,
        eps: Real<names::Eps>,
        layers: List<names::Layers, Weights>,
    ) -> PyResult<Self> {
        let (dtype, hidden, eps, layers) = (dtype.0, hidden.0, eps.0, layers.0);
        for (number, layer) in layers.iter().enumerate() {
            layer.check(number, hidden, dtype)?;
        }
        Ok(Self {
            cpu,
            dtype,
            eps,
            hidden,
            layers,
        })
    }

    /// Take `x`, dense rows of the step that `attention` has planned, through all layers, in place.
    ///
    /// `caches` are the addresses of the layers' keys and values; `cos` and `sin` are dense float32
    /// of half a head a row.
    fn forward(
        &self,
        py: Python<'_>,
        attention: &PagedAttention,
        caches: Numbers<names::Caches>,
        cos: Number<names::Cos>,
        sin: Number<names::Sin>,
        x: Number<names::X>,
    ) -> PyResult<()> {
        if attention.dtype != self.dtype || caches.0.len() != self.layers.len() {
            return Err(PyValueError::new_err(
                "attention must be of the stack's type, with a cache for each layer",
            ));
        }
        self.check_heads(&attention.attention)?;
        let planned = attention.planned()?;
        let planned = PagedAttention::of_step(&planned)?;
        let rows = planned.plan.num_queries();
        let half = attention.attention.head_dim() / 2;
        let tensors = Tensors {
            cos: Matrix::dense(cos, rows, half),
            sin: Matrix::dense(sin, rows, half),
            x: Matrix::dense(x, rows, self.hidden),
            caches: caches
                .0
                .into_iter()
                .map(|address| attention.cache(planned, address))
                .collect(),
        };
        let linears: Vec<_> = self
            .layers
            .iter()
            .map(Linears::of)
            .collect::<PyResult<_>>()?;
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        py.detach(|| unsafe {
            with_dtype!(self.dtype, E => {
                self.run::<E>(&attention.attention, planned, &tensors, &linears)
            })
        })
    }
}
