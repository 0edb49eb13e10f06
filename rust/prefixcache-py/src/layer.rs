//! The Python classes `AttentionMixer`, `ShortConvMixer`, `DenseFeedForward`, `ExpertsFeedForward`,
//! `DenseAndExperts`, `OwnInput` and `DecoderLayer`.

use std::sync::RwLockReadGuard;

use prefixcache_attention::{Attention, MAX_TAPS, ShortConv, StatePart};
use prefixcache_core::error::Argument;
use prefixcache_cpu::{Element, RowsMut};
use prefixcache_decoder as decoder;
use prefixcache_decoder::Makes;
use prefixcache_ops as ops;
use prefixcache_ops::experts::{Experts, Router, Scores, SharedExpert};
use prefixcache_ops::rowwise::{Gate, RmsNorm};
use pyo3::prelude::*;

use crate::arguments::{Number, One, OneOf, Real, Value, Word, or, wrong_type};
use crate::cpu::{DType, Matrix, numbers_at, numbers_if_given};
use crate::delta::{DeltaMixer, sees_states};
use crate::errors::{Result, ensure};
use crate::linear::{Layer, LayerElement, PackedLinear};
use crate::names::{self, Name};
use crate::parts::parts;

parts! {
    /// Attention of a layer on the CPU: its weights, and the rotations of its queries and keys.
    AttentionMixer(
        *, qkv, gated=false, makes=None, qk_norm=None, whole_norms=false, value_norm=None, sinks=None,
        out, rope, query_rope=None
    ) {
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
    }
}

impl Word for Makes {
    const ARGUMENT: &'static str = "makes";
    const WORDS: &'static [(&'static str, Self)] = &[
        ("all", Self::All),
        ("queries_and_keys", Self::QueriesAndKeys),
        ("queries", Self::Queries),
    ];
}

impl AttentionMixer {
    fn makes(&self) -> Makes {
        self.makes.map_or(Makes::All, |makes| makes.0)
    }

    /// The numbers of the rotations of keys and queries.
    fn ropes(&self) -> [usize; 2] {
        [self.rope.0, or(self.query_rope, self.rope.0)]
    }

    fn linears(&self) -> [&PackedLinear; 2] {
        [self.qkv.get(), self.out.get()]
    }

    fn fits(&self, hidden: usize) -> bool {
        let [qkv, out] = self.linears();
        [qkv.inputs, out.outputs] == [hidden; 2]
    }

    fn has_heads_of(&self, attention: &Attention) -> bool {
        let [qkv, out] = self.linears();
        let (queries, keys) = (attention.heads(), attention.kv_heads());
        let (gates, dims) = (usize::from(self.gated) * queries, attention.head_dim());
        let made = match self.makes() {
            Makes::All => queries + 2 * keys,
            Makes::QueriesAndKeys => queries + keys,
            Makes::Queries => queries,
        };
        out.inputs == queries * dims && qkv.outputs == (gates + made) * dims
    }
}

parts! {
    /// A short convolution of a layer on the CPU, channel by channel over the last `taps` tokens.
    ShortConvMixer(*, in_proj, taps, weight, bias=None, out) {
        in_proj: Py<PackedLinear>,
        taps: Number<names::Taps>,
        weight: Number<names::Weight>,
        bias: Option<Number<names::Bias>>,
        out: Py<PackedLinear>,
    }
    check
}

impl ShortConvMixer {
    fn check(&self) -> Result<()> {
        let taps = self.taps.0;
        let fits = (1..=MAX_TAPS).contains(&taps);
        ensure!(fits, "taps", "must be from 1 to {MAX_TAPS}, not {taps}");
        Ok(())
    }

    fn linears(&self) -> [&PackedLinear; 2] {
        [self.in_proj.get(), self.out.get()]
    }

    fn fits(&self, hidden: usize) -> bool {
        let [in_proj, out] = self.linears();
        let stream = [in_proj.inputs, out.inputs, out.outputs];
        stream == [hidden; 3] && in_proj.outputs == 3 * hidden
    }

    /// Whether the plans of this attention list the pages that it needs.
    fn is_seen_by(&self, attention: &Attention) -> bool {
        attention.window_left.is_none_or(|left| left >= self.taps.0 - 1)
    }

    /// # Safety
    /// The weight and the bias are addresses of numbers of type E.
    unsafe fn read<'a, E: LayerElement>(
        &self,
        hidden: usize,
        group: usize,
        next: &mut impl FnMut() -> &'a ops::PackedLinear<E>,
    ) -> Result<decoder::ShortConvMixer<'a, E>> {
        // SAFETY: the caller's promise.
        let (weight, bias) = unsafe {
            let weight = Matrix::dense(self.weight, self.taps.0, hidden).rows()?;
            (weight, numbers_if_given(self.bias, hidden)?)
        };
        let conv = ShortConv { weight, bias };
        Ok(decoder::ShortConvMixer { in_proj: next(), conv, out: next(), group })
    }
}

parts! {
    /// An MLP of a layer on the CPU, gated or not.
    DenseFeedForward(*, gate_up, gate, down) {
        gate_up: Py<PackedLinear>,
        gate: OneOf<Gate>,
        down: Py<PackedLinear>,
    }
}

impl DenseFeedForward {
    fn linears(&self) -> [&PackedLinear; 2] {
        [self.gate_up.get(), self.down.get()]
    }

    fn fits(&self, hidden: usize) -> bool {
        let [gate_up, down] = self.linears();
        let stream = [gate_up.inputs, down.outputs];
        stream == [hidden; 2] && gate_up.outputs == self.gate.0.width() * down.inputs
    }

    fn read<'a, E: LayerElement>(
        &self,
        next: &mut impl FnMut() -> &'a ops::PackedLinear<E>,
    ) -> decoder::Dense<'a, E> {
        decoder::Dense { gate_up: next(), gate: self.gate.0, down: next() }
    }
}

parts! {
    /// A mixture of experts of a layer on the CPU, as many as the router has outputs.
    ExpertsFeedForward(
        *, router, scores, selection_bias=None, top_k, renormalise=None, scale=None, expert_scales=None,
        gate_up, gate, down, shared=None, shared_weight=None
    ) {
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
    }
    check
}

impl Word for Scores {
    const ARGUMENT: &'static str = "scores";
    const WORDS: &'static [(&'static str, Self)] =
        &[("softmax", Self::Softmax), ("sigmoid", Self::Sigmoid)];
}

impl ExpertsFeedForward {
    fn check(&self) -> Result<()> {
        let weighs = self.shared_weight.is_none() || self.shared.is_some();
        ensure!(weighs, "shared_weight", "needs what it weighs, shared");
        let (top_k, experts) = (self.top_k.0, self.router.get().outputs);
        let fits = (1..=experts).contains(&top_k);
        ensure!(fits, "top_k", "must be from 1 to {experts}, not {top_k}");
        Ok(())
    }

    /// Those of all routed experts, of the shared one, and of its weight.
    fn linears(&self) -> Vec<&PackedLinear> {
        let mut linears = vec![self.router.get(), self.gate_up.get(), self.down.get()];
        linears.extend(self.shared.iter().flat_map(|shared| shared.get().linears()));
        linears.extend(self.shared_weight.iter().map(Py::get));
        linears
    }

    fn fits(&self, hidden: usize) -> bool {
        let shared = self.shared.as_ref().map(Py::get);
        let weight = self.shared_weight.as_ref().map(Py::get);
        self.routed_fit(hidden)
            && shared.is_none_or(|shared| shared.gate.0.width() == 2 && shared.fits(hidden))
            && weight.is_none_or(|one| [one.inputs, one.outputs] == [hidden, 1])
    }

    fn routed_fit(&self, hidden: usize) -> bool {
        let [router, gate_up, down] = [&self.router, &self.gate_up, &self.down].map(Py::get);
        let (experts, inner) = (router.outputs, down.inputs);
        let outputs = [gate_up.outputs, down.outputs];
        let wanted = [2 * inner, hidden].map(|one| one.checked_mul(experts));
        [router.inputs, gate_up.inputs] == [hidden; 2]
            && (self.gate.0.width() == 2 && outputs.map(Some) == wanted)
            && (gate_up.has_parts_of(experts, 2 * inner) && down.has_parts_of(experts, hidden))
    }

    /// # Safety
    /// The selection bias and the scales are addresses of a float32 for each expert.
    unsafe fn read<'a, E: LayerElement>(
        &self,
        next: &mut impl FnMut() -> &'a ops::PackedLinear<E>,
    ) -> Result<Experts<'a, E>> {
        let count = self.router.get().outputs;
        // SAFETY: the caller's promise.
        let (selection_bias, expert_scales) = unsafe {
            let bias = numbers_if_given(self.selection_bias, count)?;
            (bias, numbers_if_given(self.expert_scales, count)?)
        };
        Ok(Experts {
            router: Router {
                linear: next(),
                scores: self.scores.0,
                selection_bias,
                top_k: self.top_k.0,
                renormalise: self.renormalise.map(|most| most.0),
                scale: or(self.scale, 1.0),
                expert_scales,
            },
            gate_up: next(),
            gate: self.gate.0,
            down: next(),
            shared: self.shared.as_ref().map(|shared| SharedExpert {
                gate_up: next(),
                gate: shared.get().gate.0,
                down: next(),
                weight: self.shared_weight.as_ref().map(|_| next()),
            }),
        })
    }
}

parts! {
    /// A gated MLP and experts next to it of a layer on the CPU, whose results are added.
    DenseAndExperts(
        *, dense, experts, dense_norm, dense_out_norm, router_norm, experts_norm, experts_out_norm
    ) {
        dense: Py<DenseFeedForward>,
        experts: Py<ExpertsFeedForward>,
        dense_norm: Number<names::DenseNorm>,
        dense_out_norm: Number<names::DenseOutNorm>,
        router_norm: Number<names::RouterNorm>,
        experts_norm: Number<names::ExpertsNorm>,
        experts_out_norm: Number<names::ExpertsOutNorm>,
    }
}

parts! {
    /// What takes a layer's own input into the stream, on the CPU: gates, a linear and a norm.
    OwnInput(*, gate, activation, out, norm) {
        gate: Py<PackedLinear>,
        activation: OneOf<Gate>,
        out: Py<PackedLinear>,
        norm: Number<names::Norm>,
    }
}

impl OwnInput {
    fn linears(&self) -> [&PackedLinear; 2] {
        [self.gate.get(), self.out.get()]
    }

    fn fits(&self, hidden: usize) -> bool {
        let [gate, out] = self.linears();
        let doubles = self.activation.0.width() == 2;
        doubles && [gate.inputs, out.outputs] == [hidden; 2] && gate.outputs == out.inputs
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

    fn fits(&self, hidden: usize) -> bool {
        match self {
            Self::Attention(mixer) => mixer.get().fits(hidden),
            Self::ShortConv(mixer) => mixer.get().fits(hidden),
            Self::Delta(mixer) => mixer.get().fits(hidden),
        }
    }
}

impl Value for Mixer {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let mixer = (value.extract().map(Self::Attention))
            .or_else(|_| value.extract().map(Self::ShortConv))
            .or_else(|_| value.extract().map(Self::Delta));
        let wanted = "an AttentionMixer, a ShortConvMixer or a DeltaMixer";
        mixer.map_err(|_| wrong_type(argument, wanted, value))
    }
}

/// The feed-forward of a layer.
enum FeedForward {
    Dense(Py<DenseFeedForward>),
    Experts(Py<ExpertsFeedForward>),
    DenseAndExperts(Py<DenseAndExperts>),
}

impl FeedForward {
    fn linears(&self) -> Vec<&PackedLinear> {
        match self {
            Self::Dense(dense) => dense.get().linears().into(),
            Self::Experts(experts) => experts.get().linears(),
            Self::DenseAndExperts(both) => {
                let both = both.get();
                let dense = both.dense.get().linears();
                dense.into_iter().chain(both.experts.get().linears()).collect()
            }
        }
    }

    fn fits(&self, hidden: usize, has_out_norm: bool) -> bool {
        match self {
            Self::Dense(dense) => dense.get().fits(hidden),
            Self::Experts(experts) => experts.get().fits(hidden),
            Self::DenseAndExperts(both) => {
                let both = both.get();
                has_out_norm && both.dense.get().fits(hidden) && both.experts.get().fits(hidden)
            }
        }
    }
}

impl Value for FeedForward {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let feed_forward = (value.extract().map(Self::Dense))
            .or_else(|_| value.extract().map(Self::Experts))
            .or_else(|_| value.extract().map(Self::DenseAndExperts));
        let wanted = "a DenseFeedForward, an ExpertsFeedForward or a DenseAndExperts";
        feed_forward.map_err(|_| wrong_type(argument, wanted, value))
    }
}

parts! {
    /// A layer of a decoder on the CPU: a mixer and a feed-forward, and the norms around them.
    DecoderLayer(
        *, input_norm=None, mixer, mixer_out_norm=None, mlp_norm=None, feed_forward=None,
        mlp_out_norm=None, norm_offset, own_input=None, stream_scale=None
    ) {
        input_norm: Option<Number<names::InputNorm>>,
        mixer: One<names::Mixer, Mixer>,
        mixer_out_norm: Option<Number<names::MixerOutNorm>>,
        mlp_norm: Option<Number<names::MlpNorm>>,
        feed_forward: Option<One<names::FeedForward, FeedForward>>,
        mlp_out_norm: Option<Number<names::MlpOutNorm>>,
        norm_offset: Real<names::NormOffset>,
        own_input: Option<Py<OwnInput>>,
        stream_scale: Option<Number<names::StreamScale>>,
    }
}

impl DecoderLayer {
    /// In the order in which [`Self::read`] takes them.
    fn linears(&self) -> Vec<&PackedLinear> {
        let feed_forward = self.feed_forward.iter().flat_map(|one| one.0.linears());
        let own = self.own_input.iter().flat_map(|own| own.get().linears());
        self.mixer.0.linears().into_iter().chain(feed_forward).chain(own).collect()
    }

    /// The linears, which nobody writes meanwhile.
    pub fn read_linears(&self) -> Result<Vec<Guard<'_>>> {
        self.linears().into_iter().map(PackedLinear::read).collect()
    }

    /// Whether the linears fit each other and a stream of `hidden` numbers of this type.
    pub fn fits(&self, hidden: usize, dtype: DType) -> bool {
        let feed_forward = self.feed_forward.as_ref();
        let own = self.own_input.as_ref();
        self.linears().iter().all(|linear| linear.dtype == dtype)
            && self.mixer.0.fits(hidden)
            && feed_forward.is_none_or(|one| one.0.fits(hidden, self.mlp_out_norm.is_some()))
            && own.is_none_or(|own| own.get().fits(hidden))
    }

    /// Whether the layer can compute with this attention.
    pub fn has_heads_of(&self, attention: &Attention) -> bool {
        match &self.mixer.0 {
            Mixer::Attention(mixer) => mixer.get().has_heads_of(attention),
            Mixer::ShortConv(mixer) => mixer.get().is_seen_by(attention),
            Mixer::Delta(_) => sees_states(attention),
        }
    }

    /// The numbers of the rotations that the layer takes.
    pub fn ropes(&self) -> Vec<usize> {
        match &self.mixer.0 {
            Mixer::Attention(mixer) => mixer.get().ropes().into(),
            Mixer::ShortConv(_) | Mixer::Delta(_) => Vec::new(),
        }
    }

    /// Numbers of the layer's state; 0 where it has none.
    pub fn state(&self) -> usize {
        self.delta().map_or(0, |delta| delta.heads().state())
    }

    /// The delta rule of the layer, where it has one.
    pub fn delta(&self) -> Option<&DeltaMixer> {
        match &self.mixer.0 {
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
        match &self.mixer.0 {
            Mixer::Attention(_) | Mixer::Delta(_) => None,
            Mixer::ShortConv(mixer) => Some((mixer.get().taps.0 - 1).clamp(1, block_size)),
        }
    }

    /// The layer as the decoder computes it, of group `group` of the step with this attention, with its state
    /// in `states`, whose inputs by the step's guesses are kept in `guessed`.
    ///
    /// # Safety
    /// The norms, and the weights of a convolution, are addresses of numbers of type E; sinks, selection
    /// bias and scale of float32.
    pub unsafe fn read<'a, E: LayerElement>(
        &self,
        eps: f32,
        hidden: usize,
        (group, attention): (usize, &Attention),
        (states, guessed): (Vec<StatePart<'a>>, RowsMut<'a, E>),
        linears: &'a [Guard<'_>],
    ) -> Result<decoder::DecoderLayer<'a, E>> {
        let mut linears = linears.iter();
        let mut next = || {
            let linear = linears.next().expect("there are as many as the layer has");
            E::of(linear).expect("types were checked with the shapes")
        };
        let next = &mut next;
        let norms = Norms { offset: self.norm_offset.0, eps, hidden };
        // SAFETY: the caller's promise.
        unsafe {
            let mixer = match &self.mixer.0 {
                Mixer::Attention(mixer) => {
                    decoder::Mixer::Attention(mixer.get().read(norms, (group, attention), next)?)
                }
                Mixer::ShortConv(mixer) => {
                    decoder::Mixer::ShortConv(mixer.get().read(hidden, group, next)?)
                }
                Mixer::Delta(mixer) => {
                    decoder::Mixer::Delta(mixer.get().read(states, guessed, next)?)
                }
            };
            let feed_forward = self.feed_forward.as_ref().map(|one| one.0.read(norms, next));
            let feed_forward = feed_forward.transpose()?;
            let own_input = self.own_input.as_ref().map(|own| own.get().read(norms, next));
            let scale = numbers_if_given(self.stream_scale, 1)?;
            Ok(decoder::DecoderLayer {
                input_norm: norms.if_given(self.input_norm)?,
                mixer,
                mixer_out_norm: norms.if_given(self.mixer_out_norm)?,
                mlp_norm: norms.if_given(self.mlp_norm)?,
                feed_forward,
                mlp_out_norm: norms.if_given(self.mlp_out_norm)?,
                own_input: own_input.transpose()?,
                scale: scale.map(|scale| scale[0]),
            })
        }
    }
}

/// What all norms of a layer have in common.
#[derive(Clone, Copy)]
struct Norms {
    offset: f32,
    eps: f32,
    hidden: usize,
}

impl Norms {
    /// The norm of each `group` of `width` numbers.
    ///
    /// # Safety
    /// The address is that of as many numbers of type E.
    unsafe fn of<'a, N: Name, E: Element>(
        self,
        address: Number<N>,
        width: usize,
        group: usize,
    ) -> Result<RmsNorm<'a, E>> {
        // SAFETY: the caller's promise.
        let weight = unsafe { numbers_at(address, width)? };
        Ok(RmsNorm { weight, offset: self.offset, group, eps: self.eps })
    }

    /// The norm of the stream.
    ///
    /// # Safety
    /// As for [`Self::of`].
    unsafe fn of_stream<'a, N: Name, E: Element>(
        self,
        address: Number<N>,
    ) -> Result<RmsNorm<'a, E>> {
        // SAFETY: the caller's promise.
        unsafe { self.of(address, self.hidden, self.hidden) }
    }

    /// The norm of the stream, where there is one.
    ///
    /// # Safety
    /// As for [`Self::of`].
    unsafe fn if_given<'a, N: Name, E: Element>(
        self,
        address: Option<Number<N>>,
    ) -> Result<Option<RmsNorm<'a, E>>> {
        // SAFETY: the caller's promise.
        address.map(|address| unsafe { self.of_stream(address) }).transpose()
    }
}

impl AttentionMixer {
    /// # Safety
    /// The norms are addresses of numbers of type E, sinks of float32.
    unsafe fn read<'a, E: LayerElement>(
        &self,
        norms: Norms,
        (group, attention): (usize, &Attention),
        next: &mut impl FnMut() -> &'a ops::PackedLinear<E>,
    ) -> Result<decoder::AttentionMixer<'a, E>> {
        let dims = attention.head_dim();
        let (queries, keys) = (attention.heads() * dims, attention.kv_heads() * dims);
        let turned = match self.makes() {
            Makes::All | Makes::QueriesAndKeys => queries + keys,
            Makes::Queries => queries,
        };
        let after_queries = |address: Number<names::QkNorm>| {
            One::new(address.0.saturating_add(queries * size_of::<E>()))
        };
        // SAFETY: the caller's promise.
        let norm = |address, width, group| unsafe { norms.of(address, width, group) };
        let (qk_norm, key_norm) = match (self.qk_norm, self.whole_norms) {
            (None, _) => (None, None),
            (Some(both), false) => (Some(norm(both, turned, dims)?), None),
            (Some(both), true) => {
                (Some(norm(both, queries, queries)?), Some(norm(after_queries(both), keys, keys)?))
            }
        };
        // SAFETY: the caller's promise.
        let (value_norm, sinks) = unsafe {
            let value_norm = self.value_norm.map(|address| norms.of(address, keys, dims));
            (value_norm.transpose()?, numbers_if_given(self.sinks, attention.heads())?)
        };
        let [rope, query_rope] = self.ropes();
        Ok(decoder::AttentionMixer {
            qkv: next(),
            makes: self.makes(),
            gated: self.gated,
            qk_norm,
            key_norm,
            value_norm,
            sinks,
            out: next(),
            group,
            rope,
            query_rope,
        })
    }
}

impl FeedForward {
    /// # Safety
    /// Norms are addresses of numbers of type E, a selection bias and scales of a float32 for each expert.
    unsafe fn read<'a, E: LayerElement>(
        &self,
        norms: Norms,
        next: &mut impl FnMut() -> &'a ops::PackedLinear<E>,
    ) -> Result<decoder::FeedForward<'a, E>> {
        // SAFETY: the caller's promise.
        Ok(unsafe {
            match self {
                Self::Dense(dense) => decoder::FeedForward::Dense(dense.get().read(next)),
                Self::Experts(experts) => decoder::FeedForward::Experts(experts.get().read(next)?),
                Self::DenseAndExperts(both) => {
                    let both = both.get();
                    decoder::FeedForward::DenseAndExperts(decoder::DenseAndExperts {
                        dense_norm: norms.of_stream(both.dense_norm)?,
                        dense: both.dense.get().read(next),
                        dense_out_norm: norms.of_stream(both.dense_out_norm)?,
                        router_norm: norms.of_stream(both.router_norm)?,
                        experts_norm: norms.of_stream(both.experts_norm)?,
                        experts: both.experts.get().read(next)?,
                        experts_out_norm: norms.of_stream(both.experts_out_norm)?,
                    })
                }
            }
        })
    }
}

impl OwnInput {
    /// # Safety
    /// The norm is an address of numbers of type E.
    unsafe fn read<'a, E: LayerElement>(
        &self,
        norms: Norms,
        next: &mut impl FnMut() -> &'a ops::PackedLinear<E>,
    ) -> Result<decoder::OwnInput<'a, E>> {
        let (gate, out) = (next(), next());
        // SAFETY: the caller's promise.
        let norm = unsafe { norms.of_stream(self.norm)? };
        Ok(decoder::OwnInput { gate, activation: self.activation.0, out, norm })
    }
}

/// A linear that nobody writes meanwhile.
pub type Guard<'a> = RwLockReadGuard<'a, Layer>;
