//! The Python classes `DecoderLayer` and `DecoderStack`.

use std::sync::RwLockReadGuard;

use prefixcache_attention::{Attention, KvElement};
use prefixcache_core::error::Argument;
use prefixcache_decoder::{self as decoder, Group, Rotation, Scratch, Step};
use prefixcache_ops as ops;
use prefixcache_ops::rowwise::{Gate, RmsNorm};
use pyo3::prelude::*;

use crate::arguments::{List, Number, Numbers, OneOf, Real, Value, wrong_type};
use crate::attention::{PagedAttention, PlannedStep};
use crate::cpu::{Cpu, DType, Matrix, with_dtype};
use crate::errors::{IntoPyErr, out_of_range};
use crate::linear::{Layer, LayerElement, PackedLinear};
use crate::names;

/// A layer of a decoder on the CPU: its weights, and what layers differ in.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DecoderLayer {
    norms: Norms,
    qkv: Py<PackedLinear>,
    out: Py<PackedLinear>,
    gate_up: Py<PackedLinear>,
    gate: Gate,
    down: Py<PackedLinear>,
    rope: usize,
    query_rope: usize,
}

/// The addresses of a layer's norms.
struct Norms {
    input: usize,
    qk: Option<usize>,
    attention_out: Option<usize>,
    mlp: usize,
    mlp_out: Option<usize>,
    offset: f32,
}

#[pymethods]
impl DecoderLayer {
    /// A layer of these linears, and of norms at these addresses.
    ///
    /// `norm_offset` is added to the weights of all norms; `rope` is the number of the layer's
    /// rotation among those of a step, `query_rope` that of its queries where it is another.
    #[new]
    #[pyo3(signature = (
        *, input_norm, qkv, qk_norm=None, out, attention_out_norm=None, mlp_norm, gate_up, gate,
        down, mlp_out_norm=None, norm_offset, rope, query_rope=None
    ))]
    fn new(
        input_norm: Number<names::InputNorm>,
        qkv: Py<PackedLinear>,
        qk_norm: Option<Number<names::QkNorm>>,
        out: Py<PackedLinear>,
        attention_out_norm: Option<Number<names::AttentionOutNorm>>,
        mlp_norm: Number<names::MlpNorm>,
        gate_up: Py<PackedLinear>,
        gate: OneOf<Gate>,
        down: Py<PackedLinear>,
        mlp_out_norm: Option<Number<names::MlpOutNorm>>,
        norm_offset: Real<names::NormOffset>,
        rope: Number<names::Rope>,
        query_rope: Option<Number<names::QueryRope>>,
    ) -> Self {
        let norms = Norms {
            input: input_norm.0,
            qk: qk_norm.map(|norm| norm.0),
            attention_out: attention_out_norm.map(|norm| norm.0),
            mlp: mlp_norm.0,
            mlp_out: mlp_out_norm.map(|norm| norm.0),
            offset: norm_offset.0,
        };
        Self {
            norms,
            qkv,
            out,
            gate_up,
            gate: gate.0,
            down,
            rope: rope.0,
            query_rope: query_rope.map_or(rope.0, |rope| rope.0),
        }
    }
}

/// What all layers of a stack have in common: their room in a step.
#[derive(PartialEq, Eq)]
struct Shape {
    qkv: usize,
    attended: usize,
    intermediate: usize,
    has_qk_norm: bool,
    has_out_norm: bool,
}

impl DecoderLayer {
    fn linears(&self) -> [&PackedLinear; 4] {
        [&self.qkv, &self.out, &self.gate_up, &self.down].map(|linear| linear.get())
    }

    fn shape(&self) -> Shape {
        let [qkv, out, _, down] = self.linears();
        let norms = &self.norms;
        Shape {
            qkv: qkv.outputs,
            attended: out.inputs,
            intermediate: down.inputs,
            has_qk_norm: norms.qk.is_some(),
            has_out_norm: norms.attention_out.is_some() || norms.mlp_out.is_some(),
        }
    }

    /// Whether the linears fit each other and a stream of `hidden` numbers of this type.
    fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let linears = self.linears();
        let [qkv, out, gate_up, down] = linears;
        let stream = [qkv.inputs, out.outputs, gate_up.inputs, down.outputs];
        let of_type = linears.iter().all(|linear| linear.dtype == dtype);
        of_type && stream == [hidden; 4] && gate_up.outputs == 2 * down.inputs
    }

    fn has_heads_of(&self, attention: &Attention) -> bool {
        let Shape { qkv, attended, .. } = self.shape();
        let (queries, keys) = (attention.heads(), attention.kv_heads());
        let dims = attention.head_dim();
        attended == queries * dims && qkv == (queries + 2 * keys) * dims
    }

    /// # Safety
    /// The norms are addresses of numbers of type E.
    unsafe fn read<'a, E: LayerElement>(
        &self,
        eps: f32,
        group: (usize, &Attention),
        linears: &'a Linears<'_>,
    ) -> PyResult<decoder::DecoderLayer<'a, E>> {
        let (group, attention) = group;
        let norms = &self.norms;
        let norm = |name, address, width, group| {
            // SAFETY: the caller's promise.
            let rows = unsafe { Matrix::dense_at(name, address, 1, width).rows::<E>() };
            Ok::<_, PyErr>(RmsNorm {
                weight: rows?.row(0),
                offset: norms.offset,
                group,
                eps,
            })
        };
        let hidden = self.qkv.get().inputs;
        let of_stream = |name, address| norm(name, address, hidden, hidden);
        let dims = attention.head_dim();
        let turned = (attention.heads() + attention.kv_heads()) * dims;
        let of_heads = |address| norm("qk_norm", address, turned, dims);
        let after = |name| move |address| of_stream(name, address);
        Ok(decoder::DecoderLayer {
            input_norm: of_stream("input_norm", norms.input)?,
            qkv: linears.get(0),
            qk_norm: norms.qk.map(of_heads).transpose()?,
            out: linears.get(1),
            attention_out_norm: norms
                .attention_out
                .map(after("attention_out_norm"))
                .transpose()?,
            mlp_norm: of_stream("mlp_norm", norms.mlp)?,
            gate_up: linears.get(2),
            gate: self.gate,
            down: linears.get(3),
            mlp_out_norm: norms.mlp_out.map(after("mlp_out_norm")).transpose()?,
            group,
            rope: self.rope,
            query_rope: self.query_rope,
        })
    }
}

/// A layer's linears, which nobody writes meanwhile: qkv, out, gate_up, down.
struct Linears<'a>([RwLockReadGuard<'a, Layer>; 4]);

impl<'a> Linears<'a> {
    fn of(layer: &'a Py<DecoderLayer>) -> PyResult<Self> {
        let [qkv, out, gate_up, down] = layer.get().linears();
        Ok(Self([
            qkv.read()?,
            out.read()?,
            gate_up.read()?,
            down.read()?,
        ]))
    }

    fn get<E: LayerElement>(&self, number: usize) -> &ops::PackedLinear<E> {
        E::of(&self.0[number]).expect("types were checked with the shapes")
    }
}

/// The addresses of the cosines and sines of a step's positions.
struct Angles {
    cos: usize,
    sin: usize,
}

impl Value for Angles {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let pair = value.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>();
        let wanted = "a pair of the addresses of cosines and sines";
        let (cos, sin) = pair.map_err(|_| wrong_type(argument, wanted, value))?;
        Ok(Self {
            cos: usize::read(argument, &cos)?,
            sin: usize::read(argument, &sin)?,
        })
    }
}

/// The tensors of a step.
struct Tensors {
    rotations: Vec<[Matrix; 2]>,
    x: Matrix,
    /// One a layer.
    caches: Vec<Matrix>,
}

/// The layers of a decoder on the CPU, one call a step.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DecoderStack {
    cpu: Py<Cpu>,
    dtype: DType,
    eps: f32,
    hidden: usize,
    layers: Vec<Py<DecoderLayer>>,
}

impl DecoderStack {
    /// # Safety
    /// The addresses are those of numbers of type E, and of float32 for the angles.
    unsafe fn run<E: LayerElement + KvElement>(
        &self,
        groups: &[Group<'_>],
        layer_groups: &[usize],
        linears: &[Linears<'_>],
        tensors: &Tensors,
    ) -> PyResult<()> {
        let rotation = |[cos, sin]: &[Matrix; 2]| {
            // SAFETY: the caller's promise.
            let (cos, sin) = unsafe { (cos.rows()?, sin.rows()?) };
            Ok::<_, PyErr>(Rotation { cos, sin })
        };
        let rotations = tensors.rotations.iter().map(rotation);
        let rotations = rotations.collect::<PyResult<Vec<_>>>()?;
        let cpu = self.cpu.get();
        let step = Step {
            form: cpu.form,
            team: &cpu.team,
            groups,
            rotations: &rotations,
        };
        // SAFETY: the caller's promise.
        let mut x = unsafe { tensors.x.rows_mut::<E>()? };
        let mut scratch: Option<Scratch<E>> = None;
        for (number, layer) in self.layers.iter().enumerate() {
            let group = layer_groups[number];
            let attention = groups[group].plan.attention();
            let (layer, linears) = (layer.get(), &linears[number]);
            // SAFETY: the caller's promise.
            let layer = unsafe { layer.read::<E>(self.eps, (group, attention), linears)? };
            let scratch = match &mut scratch {
                Some(scratch) => scratch,
                none => none.insert(
                    Scratch::new(x.rows(), attention, &layer).map_err(IntoPyErr::into_py_err)?,
                ),
            };
            // SAFETY: the caller's promise; layers of several groups may share a cache, one after
            // the other.
            let mut cache = unsafe { tensors.caches[number].rows_mut::<E>()? };
            step.forward(&layer, &mut cache, &mut x, scratch)
                .map_err(IntoPyErr::into_py_err)?;
        }
        Ok(())
    }

    fn check_attentions(&self, attentions: &[&PagedAttention]) -> PyResult<()> {
        let Some(first) = attentions.first() else {
            return Err(out_of_range("attentions", "must have one for each group"));
        };
        for (index, paged) in attentions.iter().enumerate() {
            let attention = &paged.attention;
            let same =
                paged.dtype == self.dtype && attention.head_dim() == first.attention.head_dim();
            let has_heads = |layer: &Py<DecoderLayer>| layer.get().has_heads_of(attention);
            if !same || !self.layers.iter().all(has_heads) {
                let reason = "must have the type and the heads of the layers";
                return Err(out_of_range(Argument::element("attentions", index), reason));
            }
        }
        Ok(())
    }

    /// Each layer has a cache, and a group that there is.
    fn check_places(&self, layer_groups: &[usize], caches: usize, groups: usize) -> PyResult<()> {
        let layers = self.layers.len();
        for (name, count) in [("layer_groups", layer_groups.len()), ("caches", caches)] {
            if count != layers {
                let reason = format!("must have one for each of {layers} layers, not {count}");
                return Err(out_of_range(name, reason));
            }
        }
        match layer_groups.iter().position(|&group| group >= groups) {
            None => Ok(()),
            Some(layer) => {
                let argument = Argument::element("layer_groups", layer);
                let reason = format!("must be below {groups}, the number of attentions");
                Err(out_of_range(argument, reason))
            }
        }
    }

    fn check_rotations(&self, rotations: usize) -> PyResult<()> {
        let ropes = self.layers.iter().map(|layer| {
            let layer = layer.get();
            layer.rope.max(layer.query_rope)
        });
        match ropes.max() {
            Some(rope) if rope >= rotations => {
                let reason = format!("must have one for rope {rope} of a layer, not {rotations}");
                Err(out_of_range("rotations", reason))
            }
            _ => Ok(()),
        }
    }
}

#[pymethods]
impl DecoderStack {
    /// A stack of `layers`, of one shape, over a residual stream of `hidden` numbers a token.
    #[new]
    fn new(
        cpu: Py<Cpu>,
        dtype: OneOf<DType>,
        hidden: Number<names::Hidden>,
        eps: Real<names::Eps>,
        layers: List<names::Layers, Py<DecoderLayer>>,
    ) -> PyResult<Self> {
        let (dtype, hidden, eps, layers) = (dtype.0, hidden.0, eps.0, layers.0);
        for (number, layer) in layers.iter().enumerate() {
            let (first, layer) = (layers[0].get(), layer.get());
            if !layer.fits(hidden, dtype) || layer.shape() != first.shape() {
                let reason = "must have linears that fit the stream, and be shaped as the first";
                return Err(out_of_range(Argument::element("layers", number), reason));
            }
        }
        Ok(Self {
            cpu,
            dtype,
            eps,
            hidden,
            layers,
        })
    }

    /// Take `x`, dense rows of the step that all `attentions` have planned, through all layers, in place.
    ///
    /// Layer i computes with `attentions[layer_groups[i]]`, over keys and values at `caches[i]`.
    /// Each of `rotations` is (cos, sin): dense float32 of half a head a row.
    fn forward(
        &self,
        py: Python<'_>,
        attentions: List<names::Attentions, Py<PagedAttention>>,
        layer_groups: Numbers<names::LayerGroups>,
        caches: Numbers<names::Caches>,
        rotations: List<names::Rotations, Angles>,
        x: Number<names::X>,
    ) -> PyResult<()> {
        let attentions: Vec<_> = attentions.0.iter().map(Py::get).collect();
        let layer_groups = layer_groups.0;
        self.check_attentions(&attentions)?;
        self.check_places(&layer_groups, caches.0.len(), attentions.len())?;
        self.check_rotations(rotations.0.len())?;
        let planned = attentions.iter().map(|attention| attention.planned());
        let planned = planned.collect::<PyResult<Vec<_>>>()?;
        let steps = planned.iter().map(|step| PagedAttention::of_step(step));
        let steps = steps.collect::<PyResult<Vec<_>>>()?;
        let rows = steps[0].plan.num_queries();
        let half = attentions[0].attention.head_dim() / 2;
        let angles = |address| Matrix::dense_at("rotations", address, rows, half);
        let cache =
            |(&group, address): (&usize, usize)| attentions[group].cache(steps[group], address);
        let tensors = Tensors {
            rotations: rotations
                .0
                .iter()
                .map(|r| [r.cos, r.sin].map(angles))
                .collect(),
            x: Matrix::dense(x, rows, self.hidden),
            caches: layer_groups.iter().zip(caches.0).map(cache).collect(),
        };
        let groups = groups(&steps)?;
        let linears = self.layers.iter().map(Linears::of);
        let linears = linears.collect::<PyResult<Vec<_>>>()?;
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        py.detach(|| unsafe {
            with_dtype!(self.dtype, E => self.run::<E>(&groups, &layer_groups, &linears, &tensors))
        })
    }
}

/// The groups of a step, which all have planned the same number of rows.
fn groups<'a>(steps: &[&'a PlannedStep]) -> PyResult<Vec<Group<'a>>> {
    let rows = steps[0].plan.num_queries();
    let group = |(index, step): (usize, &&'a PlannedStep)| {
        let PlannedStep { plan, slots } = step;
        let planned = plan.num_queries();
        if planned != rows {
            let reason = format!("must have planned {rows} rows, as the first, not {planned}");
            return Err(out_of_range(Argument::element("attentions", index), reason));
        }
        Ok(Group { plan, slots })
    };
    steps.iter().enumerate().map(group).collect()
}
