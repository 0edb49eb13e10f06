//! The Python classes `AttentionMixer`, `DenseFeedForward` and `DecoderLayer`.

use std::sync::RwLockReadGuard;

use prefixcache_attention::Attention;
use prefixcache_core::error::Argument;
use prefixcache_decoder as decoder;
use prefixcache_ops as ops;
use prefixcache_ops::rowwise::{Gate, RmsNorm};
use pyo3::prelude::*;

use crate::arguments::{Number, One, OneOf, Real, Value, wrong_type};
use crate::cpu::{DType, Matrix};
use crate::linear::{Layer, LayerElement, PackedLinear};
use crate::names;

/// Attention of a layer on the CPU: its weights, and the rotations of its queries and keys.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct AttentionMixer {
    qkv: Py<PackedLinear>,
    qk_norm: Option<usize>,
    out: Py<PackedLinear>,
    rope: usize,
    query_rope: usize,
}

#[pymethods]
impl AttentionMixer {
    /// Attention with these linears, and a norm of queries and keys at this address.
    ///
    /// `rope` is the number of the layer's rotation among those of a step, `query_rope` that of its
    /// queries where it is another.
    #[new]
    #[pyo3(signature = (*, qkv, qk_norm=None, out, rope, query_rope=None))]
    fn new(
        qkv: Py<PackedLinear>,
        qk_norm: Option<Number<names::QkNorm>>,
        out: Py<PackedLinear>,
        rope: Number<names::Rope>,
        query_rope: Option<Number<names::QueryRope>>,
    ) -> Self {
        Self {
            qkv,
            qk_norm: qk_norm.map(|norm| norm.0),
            out,
            rope: rope.0,
            query_rope: query_rope.map_or(rope.0, |rope| rope.0),
        }
    }
}

impl AttentionMixer {
    fn linears(&self) -> [&PackedLinear; 2] {
        [self.qkv.get(), self.out.get()]
    }

    fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let linears = self.linears();
        let [qkv, out] = linears;
        let of_type = linears.iter().all(|linear| linear.dtype == dtype);
        of_type && [qkv.inputs, out.outputs] == [hidden; 2]
    }

    fn has_heads_of(&self, attention: &Attention) -> bool {
        let [qkv, out] = self.linears();
        let (queries, keys) = (attention.heads(), attention.kv_heads());
        let dims = attention.head_dim();
        out.inputs == queries * dims && qkv.outputs == (queries + 2 * keys) * dims
    }
}

/// A gated MLP of a layer on the CPU.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DenseFeedForward {
    gate_up: Py<PackedLinear>,
    gate: Gate,
    down: Py<PackedLinear>,
}

#[pymethods]
impl DenseFeedForward {
    /// The MLP of these linears: `gate_up` has the gates, then what they let pass.
    #[new]
    #[pyo3(signature = (*, gate_up, gate, down))]
    fn new(gate_up: Py<PackedLinear>, gate: OneOf<Gate>, down: Py<PackedLinear>) -> Self {
        let gate = gate.0;
        Self {
            gate_up,
            gate,
            down,
        }
    }
}

impl DenseFeedForward {
    fn linears(&self) -> [&PackedLinear; 2] {
        [self.gate_up.get(), self.down.get()]
    }

    fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let linears = self.linears();
        let [gate_up, down] = linears;
        let of_type = linears.iter().all(|linear| linear.dtype == dtype);
        let stream = [gate_up.inputs, down.outputs];
        of_type && stream == [hidden; 2] && gate_up.outputs == 2 * down.inputs
    }
}

/// The mixer of a layer.
enum Mixer {
    Attention(Py<AttentionMixer>),
}

impl Value for Mixer {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(mixer) = value.cast() {
            return Ok(Self::Attention(mixer.clone().unbind()));
        }
        Err(wrong_type(argument, "an AttentionMixer", value))
    }
}

/// The feed-forward of a layer.
enum FeedForward {
    Dense(Py<DenseFeedForward>),
}

impl Value for FeedForward {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(dense) = value.cast() {
            return Ok(Self::Dense(dense.clone().unbind()));
        }
        Err(wrong_type(argument, "a DenseFeedForward", value))
    }
}

/// A layer of a decoder on the CPU: a mixer and a feed-forward, and the norms around them.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DecoderLayer {
    norms: Norms,
    mixer: Mixer,
    feed_forward: FeedForward,
}

/// The addresses of a layer's norms.
struct Norms {
    input: Option<usize>,
    mixer_out: Option<usize>,
    mlp: Option<usize>,
    mlp_out: Option<usize>,
    offset: f32,
}

#[pymethods]
impl DecoderLayer {
    /// A layer of these parts, and of norms at these addresses.
    ///
    /// `input_norm` and `mlp_norm` are of what mixer and feed-forward read, `mixer_out_norm` and
    /// `mlp_out_norm` of what they add. `norm_offset` is added to the weights of all norms.
    #[new]
    #[pyo3(signature = (
        *, input_norm=None, mixer, mixer_out_norm=None, mlp_norm=None, feed_forward,
        mlp_out_norm=None, norm_offset
    ))]
    fn new(
        input_norm: Option<Number<names::InputNorm>>,
        mixer: One<names::Mixer, Mixer>,
        mixer_out_norm: Option<Number<names::MixerOutNorm>>,
        mlp_norm: Option<Number<names::MlpNorm>>,
        feed_forward: One<names::FeedForward, FeedForward>,
        mlp_out_norm: Option<Number<names::MlpOutNorm>>,
        norm_offset: Real<names::NormOffset>,
    ) -> Self {
        let norms = Norms {
            input: input_norm.map(|norm| norm.0),
            mixer_out: mixer_out_norm.map(|norm| norm.0),
            mlp: mlp_norm.map(|norm| norm.0),
            mlp_out: mlp_out_norm.map(|norm| norm.0),
            offset: norm_offset.0,
        };
        Self {
            norms,
            mixer: mixer.0,
            feed_forward: feed_forward.0,
        }
    }
}

impl DecoderLayer {
    /// Whether the linears fit each other and a stream of `hidden` numbers of this type.
    pub fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let Mixer::Attention(mixer) = &self.mixer;
        let FeedForward::Dense(dense) = &self.feed_forward;
        mixer.get().fits(hidden, dtype) && dense.get().fits(hidden, dtype)
    }

    /// Whether the layer can compute with this attention.
    pub fn has_heads_of(&self, attention: &Attention) -> bool {
        let Mixer::Attention(mixer) = &self.mixer;
        mixer.get().has_heads_of(attention)
    }

    /// The highest number of a rotation that the layer takes.
    pub fn highest_rope(&self) -> usize {
        let Mixer::Attention(mixer) = &self.mixer;
        mixer.get().rope.max(mixer.get().query_rope)
    }

    /// The layer as the decoder computes it, of group `group` of the step with this attention.
    ///
    /// # Safety
    /// The norms are addresses of numbers of type E.
    pub unsafe fn read<'a, E: LayerElement>(
        &self,
        eps: f32,
        hidden: usize,
        (group, attention): (usize, &Attention),
        linears: &'a Linears<'_>,
    ) -> PyResult<decoder::DecoderLayer<'a, E>> {
        let norm = |name, address: Option<usize>, width, group| {
            let read = |address| {
                // SAFETY: the caller's promise.
                let rows = unsafe { Matrix::dense_at(name, address, 1, width).rows::<E>() };
                Ok::<_, PyErr>(RmsNorm {
                    weight: rows?.row(0),
                    offset: self.norms.offset,
                    group,
                    eps,
                })
            };
            address.map(read).transpose()
        };
        let of_stream = |name, address| norm(name, address, hidden, hidden);
        let Mixer::Attention(mixer) = &self.mixer;
        let mixer = mixer.get();
        let FeedForward::Dense(dense) = &self.feed_forward;
        let dims = attention.head_dim();
        let turned = (attention.heads() + attention.kv_heads()) * dims;
        Ok(decoder::DecoderLayer {
            input_norm: of_stream("input_norm", self.norms.input)?,
            mixer: decoder::Mixer::Attention(decoder::AttentionMixer {
                qkv: linears.mixer(0),
                qk_norm: norm("qk_norm", mixer.qk_norm, turned, dims)?,
                out: linears.mixer(1),
                group,
                rope: mixer.rope,
                query_rope: mixer.query_rope,
            }),
            mixer_out_norm: of_stream("mixer_out_norm", self.norms.mixer_out)?,
            mlp_norm: of_stream("mlp_norm", self.norms.mlp)?,
            feed_forward: decoder::FeedForward::Dense(decoder::Dense {
                gate_up: linears.feed_forward(0),
                gate: dense.get().gate,
                down: linears.feed_forward(1),
            }),
            mlp_out_norm: of_stream("mlp_out_norm", self.norms.mlp_out)?,
        })
    }
}

type Guard<'a> = RwLockReadGuard<'a, Layer>;

/// The linears of a layer's parts, which nobody writes meanwhile, in the order in which a token passes
/// them.
pub struct Linears<'a> {
    mixer: Vec<Guard<'a>>,
    feed_forward: Vec<Guard<'a>>,
}

impl<'a> Linears<'a> {
    pub fn of(layer: &'a Py<DecoderLayer>) -> PyResult<Self> {
        let Mixer::Attention(mixer) = &layer.get().mixer;
        let FeedForward::Dense(dense) = &layer.get().feed_forward;
        let read = |linears: [&'a PackedLinear; 2]| {
            let guards = linears.into_iter().map(PackedLinear::read);
            guards.collect::<PyResult<Vec<_>>>()
        };
        Ok(Self {
            mixer: read(mixer.get().linears())?,
            feed_forward: read(dense.get().linears())?,
        })
    }

    fn mixer<E: LayerElement>(&self, number: usize) -> &ops::PackedLinear<E> {
        E::of(&self.mixer[number]).expect("types were checked with the shapes")
    }

    fn feed_forward<E: LayerElement>(&self, number: usize) -> &ops::PackedLinear<E> {
        E::of(&self.feed_forward[number]).expect("types were checked with the shapes")
    }
}
