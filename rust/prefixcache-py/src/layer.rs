//! The Python classes `AttentionMixer`, `ShortConvMixer`, `DenseFeedForward`, `ExpertsFeedForward`,
//! `DenseAndExperts`, `OwnInput` and `DecoderLayer`.

use std::sync::RwLockReadGuard;

use prefixcache_attention::{Attention, MAX_TAPS, ShortConv, StatePart};
use prefixcache_core::error::Argument;
use prefixcache_cpu::RowsMut;
use prefixcache_decoder as decoder;
use prefixcache_decoder::Makes;
use prefixcache_ops as ops;
use prefixcache_ops::experts::{Experts, Router, Scores, SharedExpert};
use prefixcache_ops::rowwise::{Gate, RmsNorm};
use pyo3::prelude::*;

use crate::arguments::{Number, One, OneOf, Real, Value, Word, wrong_type};
use crate::cpu::{DType, Matrix};
use crate::delta::{DeltaMixer, sees_states};
use crate::errors::out_of_range;
use crate::linear::{Layer, LayerElement, PackedLinear};
use crate::names;

/// Attention of a layer on the CPU: its weights, and the rotations of its queries and keys.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct AttentionMixer {
    qkv: Py<PackedLinear>,
    makes: Makes,
    gated: bool,
    qk_norm: Option<usize>,
    whole_norms: bool,
    value_norm: Option<usize>,
    sinks: Option<usize>,
    out: Py<PackedLinear>,
    rope: usize,
    query_rope: usize,
}

impl Word for Makes {
    const ARGUMENT: &'static str = "makes";
    const WORDS: &'static [(&'static str, Self)] = &[
        ("all", Self::All),
        ("queries_and_keys", Self::QueriesAndKeys),
        ("queries", Self::Queries),
    ];
}

#[pymethods]
impl AttentionMixer {
    /// Attention with these linears, and a norm of queries and keys at this address: of each head, or with
    /// `whole_norms` of all queries at once and all keys; `value_norm` is that of values. `sinks` is the
    /// address of a float32 a head. With `gated` outputs of `qkv` before those of queries are gates, whose
    /// sigmoid multiplies what heads make.
    ///
    /// `qkv` makes "all" of a token's queries, keys and values, or "queries_and_keys", whose keys are the
    /// values too, neither normalised nor turned; or "queries" alone: keys and values are then those of an
    /// earlier layer with the same cache.
    ///
    /// `rope` is the number of the layer's rotation among those of a step, `query_rope` that of its
    /// queries where it is another.
    #[new]
    #[pyo3(signature = (
        *, qkv, gated=false, makes=None, qk_norm=None, whole_norms=false, value_norm=None, sinks=None,
        out, rope, query_rope=None
    ))]
    fn new(
        qkv: Py<PackedLinear>,
        gated: bool,
        makes: Option<OneOf<Makes>>,
        qk_norm: Option<Number<names::QkNorm>>,
        whole_norms: bool,
        value_norm: Option<Number<names::ValueNorm>>,
        sinks: Option<Number<names::Sinks>>,
        out: Py<PackedLinear>,
        rope: Number<names::Rope>,
        query_rope: Option<Number<names::QueryRope>>,
    ) -> Self {
        Self {
            qkv,
            makes: makes.map_or(Makes::All, |makes| makes.0),
            gated,
            qk_norm: qk_norm.map(|norm| norm.0),
            whole_norms,
            value_norm: value_norm.map(|norm| norm.0),
            sinks: sinks.map(|sinks| sinks.0),
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
        let (gates, dims) = (usize::from(self.gated) * queries, attention.head_dim());
        let made = match self.makes {
            Makes::All => queries + 2 * keys,
            Makes::QueriesAndKeys => queries + keys,
            Makes::Queries => queries,
        };
        out.inputs == queries * dims && qkv.outputs == (gates + made) * dims
    }
}

/// A short convolution of a layer on the CPU: its weights.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct ShortConvMixer {
    in_proj: Py<PackedLinear>,
    taps: usize,
    weight: usize,
    bias: Option<usize>,
    out: Py<PackedLinear>,
}

#[pymethods]
impl ShortConvMixer {
    /// A convolution over the last `taps` tokens, channel by channel, between these linears.
    ///
    /// `in_proj` makes B, C and x of a token. At `weight` is [taps, channels], the oldest token's
    /// first, at `bias` [channels].
    #[new]
    #[pyo3(signature = (*, in_proj, taps, weight, bias=None, out))]
    fn new(
        in_proj: Py<PackedLinear>,
        taps: Number<names::Taps>,
        weight: Number<names::Weight>,
        bias: Option<Number<names::Bias>>,
        out: Py<PackedLinear>,
    ) -> PyResult<Self> {
        if !(1..=MAX_TAPS).contains(&taps.0) {
            let reason = format!("must be from 1 to {MAX_TAPS}, not {}", taps.0);
            return Err(out_of_range("taps", reason));
        }
        Ok(Self { in_proj, taps: taps.0, weight: weight.0, bias: bias.map(|bias| bias.0), out })
    }
}

impl ShortConvMixer {
    fn linears(&self) -> [&PackedLinear; 2] {
        [self.in_proj.get(), self.out.get()]
    }

    fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let linears = self.linears();
        let [in_proj, out] = linears;
        let of_type = linears.iter().all(|linear| linear.dtype == dtype);
        let stream = [in_proj.inputs, out.inputs, out.outputs];
        of_type && stream == [hidden; 3] && in_proj.outputs == 3 * hidden
    }

    /// Whether the plans of this attention list the pages that it needs.
    fn is_seen_by(&self, attention: &Attention) -> bool {
        attention.window_left.is_none_or(|left| left >= self.taps - 1)
    }

    /// # Safety
    /// The weight and the bias are addresses of numbers of type E.
    unsafe fn read<'a, E: LayerElement>(
        &self,
        hidden: usize,
        group: usize,
        linears: &'a Linears<'_>,
    ) -> PyResult<decoder::ShortConvMixer<'a, E>> {
        let rows = |name, address, count| {
            // SAFETY: the caller's promise.
            unsafe { Matrix::dense_at(name, address, count, hidden).rows::<E>() }
        };
        let bias = self.bias.map(|address| rows("bias", address, 1));
        Ok(decoder::ShortConvMixer {
            in_proj: linears.mixer(0),
            conv: ShortConv {
                weight: rows("weight", self.weight, self.taps)?,
                bias: bias.transpose()?.map(|rows| rows.row(0)),
            },
            out: linears.mixer(1),
            group,
        })
    }
}

/// An MLP of a layer on the CPU, gated or not.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DenseFeedForward {
    gate_up: Py<PackedLinear>,
    gate: Gate,
    down: Py<PackedLinear>,
}

#[pymethods]
impl DenseFeedForward {
    /// The MLP of these linears: `gate_up` has the gates, then what they let pass; one half for
    /// "squared_relu".
    #[new]
    #[pyo3(signature = (*, gate_up, gate, down))]
    fn new(gate_up: Py<PackedLinear>, gate: OneOf<Gate>, down: Py<PackedLinear>) -> Self {
        let gate = gate.0;
        Self { gate_up, gate, down }
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
        of_type && stream == [hidden; 2] && gate_up.outputs == self.gate.width() * down.inputs
    }
}

/// A mixture of experts of a layer on the CPU.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct ExpertsFeedForward {
    router: Py<PackedLinear>,
    scores: Scores,
    selection_bias: Option<usize>,
    top_k: usize,
    renormalise: Option<f32>,
    scale: f32,
    expert_scales: Option<usize>,
    gate_up: Py<PackedLinear>,
    gate: Gate,
    down: Py<PackedLinear>,
    shared: Option<Py<DenseFeedForward>>,
    shared_weight: Option<Py<PackedLinear>>,
}

#[pymethods]
impl ExpertsFeedForward {
    /// The experts of these linears, as many as the router has outputs.
    ///
    /// `gate_up` has for each expert its gates, then what they let pass, in parts of its own, `down` a
    /// part an expert. A row goes to the `top_k` experts with the highest scores, to which float32
    /// numbers at `selection_bias` are added before. With `renormalise` a row's scores are divided by
    /// their sum plus this, and then multiplied by `scale`, and by an expert's float32 at
    /// `expert_scales`. All rows go through `shared` too, which the sigmoid of the output of
    /// `shared_weight` weighs, if it is given.
    #[new]
    #[pyo3(signature = (
        *, router, scores, selection_bias=None, top_k, renormalise=None, scale=None, expert_scales=None,
        gate_up, gate, down, shared=None, shared_weight=None
    ))]
    fn new(
        router: Py<PackedLinear>,
        scores: OneOf<Scores>,
        selection_bias: Option<Number<names::SelectionBias>>,
        top_k: Number<names::TopK>,
        renormalise: Option<Real<names::Renormalise>>,
        scale: Option<Real<names::Scale>>,
        expert_scales: Option<Number<names::ExpertScales>>,
        gate_up: Py<PackedLinear>,
        gate: OneOf<Gate>,
        down: Py<PackedLinear>,
        shared: Option<Py<DenseFeedForward>>,
        shared_weight: Option<Py<PackedLinear>>,
    ) -> PyResult<Self> {
        if shared.is_none() && shared_weight.is_some() {
            return Err(out_of_range("shared_weight", "needs what it weighs, shared"));
        }
        let experts = router.get().outputs;
        if !(1..=experts).contains(&top_k.0) {
            let reason = format!("must be from 1 to {experts}, not {}", top_k.0);
            return Err(out_of_range("top_k", reason));
        }
        Ok(Self {
            router,
            scores: scores.0,
            selection_bias: selection_bias.map(|bias| bias.0),
            top_k: top_k.0,
            renormalise: renormalise.map(|more| more.0),
            scale: scale.map_or(1.0, |scale| scale.0),
            expert_scales: expert_scales.map(|scales| scales.0),
            gate_up,
            gate: gate.0,
            down,
            shared,
            shared_weight,
        })
    }
}

impl Word for Scores {
    const ARGUMENT: &'static str = "scores";
    const WORDS: &'static [(&'static str, Self)] =
        &[("softmax", Self::Softmax), ("sigmoid", Self::Sigmoid)];
}

impl ExpertsFeedForward {
    /// Those of all routed experts, of the shared one, and of its weight.
    fn linears(&self) -> Vec<&PackedLinear> {
        let mut linears = vec![self.router.get(), self.gate_up.get(), self.down.get()];
        linears.extend(self.shared.iter().flat_map(|shared| shared.get().linears()));
        linears.extend(self.shared_weight.iter().map(Py::get));
        linears
    }

    fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let shared = self.shared.as_ref();
        let weight = self.shared_weight.as_ref().map(Py::get);
        self.routed_fit(hidden, dtype)
            && shared.is_none_or(|shared| {
                shared.get().gate.width() == 2 && shared.get().fits(hidden, dtype)
            })
            && weight
                .is_none_or(|one| one.dtype == dtype && [one.inputs, one.outputs] == [hidden, 1])
    }

    fn routed_fit(&self, hidden: usize, dtype: DType) -> bool {
        let linears = [self.router.get(), self.gate_up.get(), self.down.get()];
        let [router, gate_up, down] = linears;
        let (experts, inner) = (router.outputs, down.inputs);
        let of_type = linears.iter().all(|linear| linear.dtype == dtype);
        let outputs = [gate_up.outputs, down.outputs];
        let wanted = [2 * inner, hidden].map(|one| one.checked_mul(experts));
        of_type
            && [router.inputs, gate_up.inputs] == [hidden; 2]
            && (self.gate.width() == 2 && outputs.map(Some) == wanted)
            && (gate_up.has_parts_of(experts, 2 * inner) && down.has_parts_of(experts, hidden))
    }
}

/// A gated MLP and experts next to it of a layer on the CPU, whose results are added.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DenseAndExperts {
    dense: Py<DenseFeedForward>,
    experts: Py<ExpertsFeedForward>,
    dense_norm: usize,
    dense_out_norm: usize,
    router_norm: usize,
    experts_norm: usize,
    experts_out_norm: usize,
}

#[pymethods]
impl DenseAndExperts {
    /// These two, and norms at these addresses: of what the MLP, the router and the experts read of the
    /// stream, and of what the MLP and the experts make. Their layer needs an `mlp_out_norm`.
    #[new]
    #[pyo3(signature = (
        *, dense, experts, dense_norm, dense_out_norm, router_norm, experts_norm, experts_out_norm
    ))]
    fn new(
        dense: Py<DenseFeedForward>,
        experts: Py<ExpertsFeedForward>,
        dense_norm: Number<names::DenseNorm>,
        dense_out_norm: Number<names::DenseOutNorm>,
        router_norm: Number<names::RouterNorm>,
        experts_norm: Number<names::ExpertsNorm>,
        experts_out_norm: Number<names::ExpertsOutNorm>,
    ) -> Self {
        Self {
            dense,
            experts,
            dense_norm: dense_norm.0,
            dense_out_norm: dense_out_norm.0,
            router_norm: router_norm.0,
            experts_norm: experts_norm.0,
            experts_out_norm: experts_out_norm.0,
        }
    }
}

/// What takes a layer's own input into the stream, on the CPU.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct OwnInput {
    gate: Py<PackedLinear>,
    activation: Gate,
    out: Py<PackedLinear>,
    norm: usize,
}

#[pymethods]
impl OwnInput {
    /// What gates, made of the stream, let pass of the layer's own input, through a linear and a norm.
    #[new]
    #[pyo3(signature = (*, gate, activation, out, norm))]
    fn new(
        gate: Py<PackedLinear>,
        activation: OneOf<Gate>,
        out: Py<PackedLinear>,
        norm: Number<names::Norm>,
    ) -> Self {
        Self { gate, activation: activation.0, out, norm: norm.0 }
    }
}

impl OwnInput {
    fn linears(&self) -> [&PackedLinear; 2] {
        [self.gate.get(), self.out.get()]
    }

    fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let linears = self.linears();
        let [gate, out] = linears;
        let of_type = linears.iter().all(|linear| linear.dtype == dtype);
        let doubles = self.activation.width() == 2;
        of_type
            && doubles
            && [gate.inputs, out.outputs] == [hidden; 2]
            && gate.outputs == out.inputs
    }
}

/// The mixer of a layer.
enum Mixer {
    Attention(Py<AttentionMixer>),
    ShortConv(Py<ShortConvMixer>),
    Delta(Py<DeltaMixer>),
}

impl Mixer {
    fn linears(&self) -> [&PackedLinear; 2] {
        match self {
            Self::Attention(mixer) => mixer.get().linears(),
            Self::ShortConv(mixer) => mixer.get().linears(),
            Self::Delta(mixer) => mixer.get().linears(),
        }
    }
}

impl Value for Mixer {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(mixer) = value.cast() {
            return Ok(Self::Attention(mixer.clone().unbind()));
        }
        if let Ok(mixer) = value.cast() {
            return Ok(Self::ShortConv(mixer.clone().unbind()));
        }
        if let Ok(mixer) = value.cast() {
            return Ok(Self::Delta(mixer.clone().unbind()));
        }
        let wanted = "an AttentionMixer, a ShortConvMixer or a DeltaMixer";
        Err(wrong_type(argument, wanted, value))
    }
}

/// The feed-forward of a layer.
enum FeedForward {
    Dense(Py<DenseFeedForward>),
    Experts(Py<ExpertsFeedForward>),
    DenseAndExperts(Py<DenseAndExperts>),
}

impl FeedForward {
    /// Those of an MLP stand behind those of experts.
    fn linears(&self) -> Vec<&PackedLinear> {
        match self {
            Self::Dense(dense) => dense.get().linears().into(),
            Self::Experts(experts) => experts.get().linears(),
            Self::DenseAndExperts(both) => {
                let both = both.get();
                let mut linears = both.experts.get().linears();
                linears.extend(both.dense.get().linears());
                linears
            }
        }
    }

    fn fits(&self, hidden: usize, dtype: DType, norms: &Norms) -> bool {
        match self {
            Self::Dense(dense) => dense.get().fits(hidden, dtype),
            Self::Experts(experts) => experts.get().fits(hidden, dtype),
            Self::DenseAndExperts(both) => {
                let both = both.get();
                let (dense, experts) = (both.dense.get(), both.experts.get());
                let has_norm = norms.mlp_out.is_some();
                has_norm && dense.fits(hidden, dtype) && experts.fits(hidden, dtype)
            }
        }
    }
}

impl Value for FeedForward {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(dense) = value.cast() {
            return Ok(Self::Dense(dense.clone().unbind()));
        }
        if let Ok(experts) = value.cast() {
            return Ok(Self::Experts(experts.clone().unbind()));
        }
        if let Ok(both) = value.cast() {
            return Ok(Self::DenseAndExperts(both.clone().unbind()));
        }
        let wanted = "a DenseFeedForward, an ExpertsFeedForward or a DenseAndExperts";
        Err(wrong_type(argument, wanted, value))
    }
}

/// A layer of a decoder on the CPU: a mixer and a feed-forward, and the norms around them.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct DecoderLayer {
    norms: Norms,
    mixer: Mixer,
    feed_forward: Option<FeedForward>,
    own_input: Option<Py<OwnInput>>,
    stream_scale: Option<usize>,
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
    /// `mlp_out_norm` of what they add. `norm_offset` is added to the weights of all norms. In the end
    /// comes `own_input`, and the stream is multiplied by the float32 at the address `stream_scale`.
    #[new]
    #[pyo3(signature = (
        *, input_norm=None, mixer, mixer_out_norm=None, mlp_norm=None, feed_forward=None,
        mlp_out_norm=None, norm_offset, own_input=None, stream_scale=None
    ))]
    fn new(
        input_norm: Option<Number<names::InputNorm>>,
        mixer: One<names::Mixer, Mixer>,
        mixer_out_norm: Option<Number<names::MixerOutNorm>>,
        mlp_norm: Option<Number<names::MlpNorm>>,
        feed_forward: Option<One<names::FeedForward, FeedForward>>,
        mlp_out_norm: Option<Number<names::MlpOutNorm>>,
        norm_offset: Real<names::NormOffset>,
        own_input: Option<Py<OwnInput>>,
        stream_scale: Option<Number<names::StreamScale>>,
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
            feed_forward: feed_forward.map(|one| one.0),
            own_input,
            stream_scale: stream_scale.map(|scale| scale.0),
        }
    }
}

impl DecoderLayer {
    /// Whether the linears fit each other and a stream of `hidden` numbers of this type.
    pub fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let mixer_fits = match &self.mixer {
            Mixer::Attention(mixer) => mixer.get().fits(hidden, dtype),
            Mixer::ShortConv(mixer) => mixer.get().fits(hidden, dtype),
            Mixer::Delta(mixer) => mixer.get().fits(hidden, dtype),
        };
        let fits = |one: &FeedForward| one.fits(hidden, dtype, &self.norms);
        let feed_forward_fits = self.feed_forward.as_ref().is_none_or(fits);
        let own = self.own_input.as_ref();
        mixer_fits && feed_forward_fits && own.is_none_or(|own| own.get().fits(hidden, dtype))
    }

    /// Whether the layer can compute with this attention.
    pub fn has_heads_of(&self, attention: &Attention) -> bool {
        match &self.mixer {
            Mixer::Attention(mixer) => mixer.get().has_heads_of(attention),
            Mixer::ShortConv(mixer) => mixer.get().is_seen_by(attention),
            Mixer::Delta(_) => sees_states(attention),
        }
    }

    /// The numbers of the rotations that the layer takes.
    pub fn ropes(&self) -> Vec<usize> {
        match &self.mixer {
            Mixer::Attention(mixer) => vec![mixer.get().rope, mixer.get().query_rope],
            Mixer::ShortConv(_) | Mixer::Delta(_) => Vec::new(),
        }
    }

    /// Numbers of the layer's state; 0 where it has none.
    pub fn state(&self) -> usize {
        self.delta().map_or(0, DeltaMixer::state)
    }

    /// The delta rule of the layer, where it has one.
    pub fn delta(&self) -> Option<&DeltaMixer> {
        match &self.mixer {
            Mixer::Delta(mixer) => Some(mixer.get()),
            Mixer::Attention(_) | Mixer::ShortConv(_) => None,
        }
    }

    /// Numbers of a token's input that the layer alone has.
    pub fn own_width(&self) -> usize {
        let own = self.own_input.as_ref();
        own.map_or(0, |own| own.get().out.get().inputs)
    }

    /// Tokens whose inputs a block must keep, where the layer is a convolution.
    pub fn least_kept(&self, block_size: usize) -> Option<usize> {
        match &self.mixer {
            Mixer::Attention(_) | Mixer::Delta(_) => None,
            Mixer::ShortConv(mixer) => Some((mixer.get().taps - 1).clamp(1, block_size)),
        }
    }

    /// The layer as the decoder computes it, of group `group` of the step with this attention, with its state
    /// in `states`, whose inputs by the step's guesses are kept in `guessed`.
    ///
    /// # Safety
    /// The norms, and the weights of a convolution, are addresses of numbers of type E; sinks, selection
    /// bias and scale of float32.
    pub unsafe fn read<'a, E: LayerElement>(
        &'a self,
        eps: f32,
        hidden: usize,
        (group, attention): (usize, &Attention),
        (states, guessed): (Vec<StatePart<'a>>, RowsMut<'a, E>),
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
        let mixer = match &self.mixer {
            Mixer::Attention(mixer) => {
                let mixer = mixer.get();
                let dims = attention.head_dim();
                let (queries, keys) = (attention.heads() * dims, attention.kv_heads() * dims);
                let turned = match mixer.makes {
                    Makes::All | Makes::QueriesAndKeys => queries + keys,
                    Makes::Queries => queries,
                };
                let (qk_norm, key_norm) = if mixer.whole_norms {
                    let after = |address: usize| address.saturating_add(queries * size_of::<E>());
                    let of_keys = mixer.qk_norm.map(after);
                    (
                        norm("qk_norm", mixer.qk_norm, queries, queries)?,
                        norm("qk_norm", of_keys, keys, keys)?,
                    )
                } else {
                    (norm("qk_norm", mixer.qk_norm, turned, dims)?, None)
                };
                decoder::Mixer::Attention(decoder::AttentionMixer {
                    qkv: linears.mixer(0),
                    makes: mixer.makes,
                    gated: mixer.gated,
                    qk_norm,
                    key_norm,
                    value_norm: norm("value_norm", mixer.value_norm, keys, dims)?,
                    // SAFETY: the caller's promise.
                    sinks: unsafe { float32_at("sinks", mixer.sinks, attention.heads())? },
                    out: linears.mixer(1),
                    group,
                    rope: mixer.rope,
                    query_rope: mixer.query_rope,
                })
            }
            Mixer::ShortConv(mixer) => {
                // SAFETY: the caller's promise.
                decoder::Mixer::ShortConv(unsafe { mixer.get().read(hidden, group, linears)? })
            }
            Mixer::Delta(mixer) => {
                let linears = [linears.mixer(0), linears.mixer(1)];
                // SAFETY: the caller's promise.
                decoder::Mixer::Delta(unsafe { mixer.get().read(states, guessed, linears)? })
            }
        };
        let own_input = |own: &'a Py<OwnInput>| {
            let own = own.get();
            let norm = norm("norm", Some(own.norm), hidden, hidden)?;
            Ok::<_, PyErr>(decoder::OwnInput {
                gate: linears.own_input(0),
                activation: own.activation,
                out: linears.own_input(1),
                norm: norm.expect("it has an address"),
            })
        };
        // SAFETY: the caller's promise.
        let feed_forward = |one: &FeedForward| unsafe { one.read(linears, of_stream) };
        // SAFETY: the caller's promise.
        let scale = unsafe { float32_at("stream_scale", self.stream_scale, 1)? };
        Ok(decoder::DecoderLayer {
            input_norm: of_stream("input_norm", self.norms.input)?,
            mixer,
            mixer_out_norm: of_stream("mixer_out_norm", self.norms.mixer_out)?,
            mlp_norm: of_stream("mlp_norm", self.norms.mlp)?,
            feed_forward: self.feed_forward.as_ref().map(feed_forward).transpose()?,
            mlp_out_norm: of_stream("mlp_out_norm", self.norms.mlp_out)?,
            own_input: self.own_input.as_ref().map(own_input).transpose()?,
            scale: scale.map(|scale| scale[0]),
        })
    }
}

impl FeedForward {
    /// # Safety
    /// A selection bias and scales are addresses of a float32 for each expert.
    unsafe fn read<'a, E: LayerElement>(
        &self,
        linears: &'a Linears<'_>,
        norm: impl Fn(&'static str, Option<usize>) -> PyResult<Option<RmsNorm<'a, E>>>,
    ) -> PyResult<decoder::FeedForward<'a, E>> {
        let norm = |name, address| {
            let read = norm(name, Some(address))?;
            Ok::<_, PyErr>(read.expect("it has an address"))
        };
        Ok(match self {
            Self::Dense(dense) => decoder::FeedForward::Dense(dense.get().read(0, linears)),
            Self::Experts(experts) => {
                // SAFETY: the caller's promise.
                decoder::FeedForward::Experts(unsafe { experts.get().read(linears)? })
            }
            Self::DenseAndExperts(both) => {
                let both = both.get();
                let experts = both.experts.get();
                decoder::FeedForward::DenseAndExperts(decoder::DenseAndExperts {
                    dense_norm: norm("dense_norm", both.dense_norm)?,
                    dense: both.dense.get().read(experts.linears().len(), linears),
                    dense_out_norm: norm("dense_out_norm", both.dense_out_norm)?,
                    router_norm: norm("router_norm", both.router_norm)?,
                    experts_norm: norm("experts_norm", both.experts_norm)?,
                    // SAFETY: the caller's promise.
                    experts: unsafe { experts.read(linears)? },
                    experts_out_norm: norm("experts_out_norm", both.experts_out_norm)?,
                })
            }
        })
    }
}

impl DenseFeedForward {
    /// Its linears are those from number `first` on.
    fn read<'a, E: LayerElement>(
        &self,
        first: usize,
        linears: &'a Linears<'_>,
    ) -> decoder::Dense<'a, E> {
        decoder::Dense {
            gate_up: linears.feed_forward(first),
            gate: self.gate,
            down: linears.feed_forward(first + 1),
        }
    }
}

impl ExpertsFeedForward {
    /// # Safety
    /// The selection bias and the scales are addresses of a float32 for each expert.
    unsafe fn read<'a, E: LayerElement>(
        &self,
        linears: &'a Linears<'_>,
    ) -> PyResult<Experts<'a, E>> {
        let count = self.router.get().outputs;
        // SAFETY: the caller's promise.
        let of_experts = |name, address| unsafe { float32_at(name, address, count) };
        Ok(Experts {
            router: Router {
                linear: linears.feed_forward(0),
                scores: self.scores,
                selection_bias: of_experts("selection_bias", self.selection_bias)?,
                top_k: self.top_k,
                renormalise: self.renormalise,
                scale: self.scale,
                expert_scales: of_experts("expert_scales", self.expert_scales)?,
            },
            gate_up: linears.feed_forward(1),
            gate: self.gate,
            down: linears.feed_forward(2),
            shared: self.shared.as_ref().map(|shared| SharedExpert {
                gate_up: linears.feed_forward(3),
                gate: shared.get().gate,
                down: linears.feed_forward(4),
                weight: self.shared_weight.as_ref().map(|_| linears.feed_forward(5)),
            }),
        })
    }
}

/// `count` numbers at an address, if there is one.
///
/// # Safety
/// They stand there while `'a` lasts, and nobody writes to them.
unsafe fn float32_at<'a>(
    name: &'static str,
    address: Option<usize>,
    count: usize,
) -> PyResult<Option<&'a [f32]>> {
    // SAFETY: the caller's promise.
    let read = |address| unsafe { Matrix::dense_at(name, address, 1, count).rows::<f32>() };
    Ok(address.map(read).transpose()?.map(|rows| rows.row(0)))
}

type Guard<'a> = RwLockReadGuard<'a, Layer>;

/// The linears of a layer's parts, which nobody writes meanwhile, in the order in which a token passes
/// them.
pub struct Linears<'a> {
    mixer: Vec<Guard<'a>>,
    feed_forward: Vec<Guard<'a>>,
    own_input: Vec<Guard<'a>>,
}

impl<'a> Linears<'a> {
    pub fn of(layer: &'a Py<DecoderLayer>) -> PyResult<Self> {
        let read = |linears: &[&'a PackedLinear]| {
            let guards = linears.iter().map(|linear| linear.read());
            guards.collect::<PyResult<Vec<_>>>()
        };
        Ok(Self {
            mixer: read(&layer.get().mixer.linears())?,
            feed_forward: match &layer.get().feed_forward {
                Some(one) => read(&one.linears())?,
                None => Vec::new(),
            },
            own_input: match &layer.get().own_input {
                Some(own) => read(&own.get().linears())?,
                None => Vec::new(),
            },
        })
    }

    fn mixer<E: LayerElement>(&self, number: usize) -> &ops::PackedLinear<E> {
        E::of(&self.mixer[number]).expect("types were checked with the shapes")
    }

    fn feed_forward<E: LayerElement>(&self, number: usize) -> &ops::PackedLinear<E> {
        E::of(&self.feed_forward[number]).expect("types were checked with the shapes")
    }

    fn own_input<E: LayerElement>(&self, number: usize) -> &ops::PackedLinear<E> {
        E::of(&self.own_input[number]).expect("types were checked with the shapes")
    }
}
