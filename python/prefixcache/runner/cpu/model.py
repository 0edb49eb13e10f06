"""A decoder over our own kernels: all layers are one call a step.

The promise: a request's tokens and their log probabilities are the same bits whether its prompt was
found in the cache or computed, in one step or in chunks, alone or among others, before or after a
preemption. It holds since every kernel obeys this rule:

    A row of the result is a function of that row of the input alone, bit for bit: not of the number
    of rows, of the row's place among them, of what stands in the others, or of how the work is
    split over threads. What attention reads of other rows, it reads from the KV cache, by position.

A sum of floating-point numbers depends on its order, so the rule is about the order of additions:

- A linear adds each output along the input features, one after the other, however many rows are
  computed with it.
- A linear that quantizes its activations (`--cpu-activations int8`) does so block by block of a
  row, and adds the blocks' integer sums, which are exact, in their order.
- A norm adds the squares of a row in an order that depends on the row's width alone.
- Attention meets keys in tiles of 64 positions, counted from the sequence's first token.
- Element by element there is nothing to add, but a function must be the same for the elements of a
  vector and those left over at a row's end: the kernels compute leftovers with the vector's
  instructions. Copies, lookups, +, * and / are safe.

The kernels are in Rust (`rust/prefixcache-ops`, `rust/prefixcache-attention`), checked there
against float64 and against themselves, one row alone against many. On whole models,
`tests/property/test_invariance.py` checks the promise.

Letters of shapes: T tokens in the step, E hidden size, R rows whose logits are wanted, V
vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache._core import (
    AttentionMixer,
    Cpu,
    DecoderLayer,
    DecoderStack,
    DeltaMixer,
    DenseAndExperts,
    DenseFeedForward,
    ExpertsFeedForward,
    OwnInput,
    PackedLinear,
    PagedAttention,
    RowOps,
    ShortConvMixer,
)
from prefixcache.config.engine_config import Activations
from prefixcache.config.model_config import DeltaConfig, ModelConfig
from prefixcache.exceptions import ConfigError
from prefixcache.kv.specs import STATE_BYTES, KVGroup, KVLayout, layer_places
from prefixcache.models.arrays import DTYPES, Array, new_array
from prefixcache.models.decoder.parameters import Parameters
from prefixcache.models.decoder.shape_of import decoder_shape
from prefixcache.models.decoder.shapes import (
    EMBEDDING,
    OWN_EMBEDDING,
    AttentionShape,
    ConvShape,
    DenseAndExpertsShape,
    DenseShape,
    ExpertsShape,
    LayerShape,
    LinearShape,
    NormShape,
    OwnInputShape,
    OwnInputsShape,
    StateShape,
    VectorShape,
)
from prefixcache.models.names import TensorNames
from prefixcache.models.weights import Slot
from prefixcache.runner.cpu.kv_memory import KVMemory
from prefixcache.runner.cpu.linear import CpuEmbedding, CpuLinear, KernelDType, address


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKernels:
    """Attention of a step: a kernel for each KV cache group, planned for the step's rows.

    Layer i attends with `attentions[layer_groups[i]]` over keys and values at `caches[i]`; a
    convolution takes from it where the tokens stand, and a block has the inputs of its last
    `kept_tokens` tokens. A block begins `page_stride` numbers after the one before. `states` are
    the parts of layers' states: layer, group, where that is in the null block, and float32 numbers.
    """

    attentions: list[PagedAttention]
    layer_groups: list[int]
    caches: list[int]
    page_stride: int
    kept_tokens: int = 0
    states: Sequence[tuple[int, int, int, int]] = ()


class CpuModel:
    """The decoder. Its parameters are undefined until every slot was written.

    `max_positions` bounds the positions `forward` may be given; `activations` is what quantized
    weights are multiplied with.
    """

    def __init__(
        self,
        config: ModelConfig,
        cpu: Cpu,
        dtype: KernelDType,
        max_positions: int,
        activations: Activations = "exact",
    ) -> None:
        self.config = config
        self.names = TensorNames(config)
        self._parameters = Parameters(dtype, _new, _write)
        self.slots = self._parameters.slots
        self._cpu = cpu
        self.dtype_name: KernelDType = dtype
        self._activations: Activations = activations
        self._parts: list[CpuLinear | CpuEmbedding] = []
        self._packed: dict[str, Callable[[], tuple[PackedLinear, int] | None]] = {}
        shape = decoder_shape(config)
        eps = config.stream_eps
        layers = [self._layer(layer) for layer in shape.layers]
        self._stack = DecoderStack(cpu, dtype, config.hidden_size, eps, layers)
        self._norm_E: Array = self._parameters.norm(shape.norm)
        self._rows = RowOps(cpu, dtype)
        self._head = self._linear(shape.head)
        tied = self._head if config.tie_word_embeddings else None
        self._embedding = self._make_embedding(EMBEDDING, shape.head, tied)
        own = shape.own_inputs
        self._own_inputs = None if own is None else self._make_own_inputs(own)
        self._rotated = [rotation.rotated for rotation in shape.rotations]
        self._rotations = [
            rotation.tables(rotation.rotated, max_positions) for rotation in shape.rotations
        ]
        # Rounded as the weights are: Gemma was trained so. The stream is kept divided.
        rounded = np.array(config.embedding_scale, DTYPES[dtype])
        self._embedding_scale = np.float32(rounded) / np.float32(config.residual_scale)
        self._logits = np.empty(0, np.float32)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights as they are kept now."""
        tensors = sum(tensor.nbytes for tensor in self._parameters.tensors)
        return tensors + sum(part.num_bytes for part in self._parts)

    def laid_out(self) -> dict[str, tuple[PackedLinear, int]]:
        """The weights that lie in layers of the kernels, by name: layer, and first output there."""
        layouts = ((name, packed()) for name, packed in self._packed.items())
        return {name: weights for name, weights in layouts if weights is not None}

    def forward(
        self,
        token_ids_T: npt.NDArray[np.int64],
        positions_T: npt.NDArray[np.int64],
        kernels: StepKernels,
        guesses: Sequence[int] = (),
    ) -> Array:
        """The residual stream [T, E] after the last layer.

        As many of the last tokens of each sequence as `guesses` says are guesses: states are those
        before them until `keep_accepted`. There are none where it is empty.
        """
        x_TE = self._embedding(token_ids_T)
        if self._embedding_scale != 1.0:
            np.multiply(x_TE, self._embedding_scale, out=x_TE, casting="unsafe")
        own_TI = None if self._own_inputs is None else self._own_inputs(token_ids_T, x_TE)
        rotations = [(cos[positions_T], sin[positions_T]) for cos, sin in self._rotations]
        self._stack.forward(
            kernels.attentions,
            kernels.layer_groups,
            kernels.caches,
            [(address(cos), address(sin)) for cos, sin in rotations],
            address(x_TE),
            kernels.kept_tokens,
            rotated=self._rotated,
            states=kernels.states,
            page_stride=kernels.page_stride,
            own_inputs=None if own_TI is None else address(own_TI),
            guesses=guesses,
        )
        return x_TE

    def keep_accepted(self, kernels: StepKernels, accepted: Sequence[int]) -> None:
        """Takes the first guesses of each sequence of the last `forward` into its states."""
        self._stack.keep_accepted(kernels.attentions, kernels.states, accepted)

    def compute_logits(self, x_RE: Array) -> npt.NDArray[np.float32]:
        """Logits [R, V] of rows of the residual stream, good until the next call."""
        normed_RE = self.final_norm(x_RE)
        size = len(x_RE) * self.config.vocab_size
        if size > self._logits.size:
            self._logits = np.empty(size, np.float32)
        logits_RV = self._logits[:size].reshape(len(x_RE), -1)
        self._head.wide(normed_RE, logits_RV)
        if self.config.logits_divisor != 1.0:
            logits_RV /= np.float32(self.config.logits_divisor)
        if (cap := self.config.logits_softcap) is not None:
            self._rows.softcap(address(logits_RV), *logits_RV.shape, cap)
        return logits_RV

    def final_norm(self, x_RE: Array) -> Array:
        """Hidden states [R, E] after the last norm of rows of the residual stream."""
        x_RE = np.ascontiguousarray(x_RE)
        rows, width = x_RE.shape
        out_RE = np.empty_like(x_RE)
        norm, eps = address(self._norm_E), self.config.stream_eps
        self._rows.rms_norm(
            address(x_RE), rows, width, width, norm, width, width, eps, address(out_RE),
            offset=self.config.norm_offset,
        )  # fmt: skip
        return out_RE

    def _layer(self, shape: LayerShape) -> DecoderLayer:
        return DecoderLayer(
            input_norm=self._optional_norm(shape.input_norm),
            mixer=self._mixer(shape.mixer),
            mixer_out_norm=self._optional_norm(shape.mixer_out_norm),
            mlp_norm=self._optional_norm(shape.mlp_norm),
            feed_forward=self._feed_forward(shape.feed_forward),
            mlp_out_norm=self._optional_norm(shape.mlp_out_norm),
            norm_offset=self.config.norm_offset,
            own_input=None if shape.own_input is None else self._own_input(shape.own_input),
            stream_scale=self._optional_vector(shape.scale),
        )

    def _own_input(self, shape: OwnInputShape) -> OwnInput:
        return OwnInput(
            gate=self._linear(shape.gate).packed,
            activation=shape.activation,
            out=self._linear(shape.out).packed,
            norm=address(self._parameters.norm(shape.norm)),
        )

    def _make_own_inputs(self, shape: OwnInputsShape) -> OwnInputs:
        return OwnInputs(
            self._make_embedding(OWN_EMBEDDING, shape.table, None),
            self._linear(shape.projection),
            self._parameters.norm(shape.norm),
            self._rows,
            self.config.rms_norm_eps * shape.projection.inputs,
        )

    def _mixer(
        self, shape: AttentionShape | ConvShape | StateShape
    ) -> AttentionMixer | ShortConvMixer | DeltaMixer:
        if isinstance(shape, StateShape):
            return self._states(shape)
        return self._conv(shape) if isinstance(shape, ConvShape) else self._attention(shape)

    def _states(self, shape: StateShape) -> DeltaMixer:
        weights, states = self._parameters.states(shape), shape.states
        return DeltaMixer(
            in_proj=self._linear(shape.in_proj).packed,
            key_heads=states.key_heads * states.alike,
            value_heads=states.value_heads,
            key_dim=states.key_dim,
            value_dim=states.value_dim,
            taps=states.taps,
            tiled=isinstance(states, DeltaConfig) and states.tiled,
            alike=states.alike,
            conv=address(weights.conv),
            conv_bias=None if weights.conv_bias is None else address(weights.conv_bias),
            decay=address(weights.decay),
            time_bias=address(weights.time_bias),
            norm=address(weights.norm),
            skip=None if weights.skip is None else address(weights.skip),
            eps=self.config.rms_norm_eps,
            out=self._linear(shape.out).packed,
        )

    def _conv(self, shape: ConvShape) -> ShortConvMixer:
        weight_LE, bias_E = self._parameters.conv(shape)
        return ShortConvMixer(
            in_proj=self._linear(shape.in_proj).packed,
            taps=shape.taps,
            weight=address(weight_LE),
            bias=None if bias_E is None else address(bias_E),
            out=self._linear(shape.out).packed,
        )

    def _attention(self, shape: AttentionShape) -> AttentionMixer:
        return AttentionMixer(
            qkv=self._linear(shape.qkv).packed,
            makes=shape.makes,
            gated=shape.gated,
            qk_norm=self._optional_norm(shape.qk_norm),
            whole_norms=shape.qk_norm is not None and shape.qk_norm.whole_rows,
            value_norm=address(self._ones(shape)) if shape.value_norm else None,
            sinks=self._optional_vector(shape.sinks),
            out=self._linear(shape.out).packed,
            rope=shape.rope,
            query_rope=shape.query_rope,
        )

    def _feed_forward(
        self, shape: DenseShape | ExpertsShape | DenseAndExpertsShape | None
    ) -> DenseFeedForward | ExpertsFeedForward | DenseAndExperts | None:
        if shape is None:
            return None
        if isinstance(shape, DenseAndExpertsShape):
            return DenseAndExperts(
                dense=self._dense(shape.dense),
                experts=self._experts(shape.experts),
                dense_norm=address(self._parameters.norm(shape.dense_norm)),
                dense_out_norm=address(self._parameters.norm(shape.dense_out_norm)),
                router_norm=address(self._parameters.norm(shape.router_norm)),
                experts_norm=address(self._parameters.norm(shape.experts_norm)),
                experts_out_norm=address(self._parameters.norm(shape.experts_out_norm)),
            )
        return self._experts(shape) if isinstance(shape, ExpertsShape) else self._dense(shape)

    def _experts(self, shape: ExpertsShape) -> ExpertsFeedForward:
        experts, weight = shape.experts, shape.shared_weight
        return ExpertsFeedForward(
            router=self._linear(shape.router).packed,
            scores=experts.scores,
            selection_bias=self._optional_vector(shape.selection_bias),
            top_k=experts.top_k,
            renormalise=experts.added_to_sum if experts.renormalise else None,
            scale=experts.scale,
            expert_scales=self._optional_vector(shape.scales),
            gate_up=self._linear(shape.gate_up).packed,
            gate=shape.activation,
            down=self._linear(shape.down).packed,
            shared=self._dense(shape.shared) if shape.shared else None,
            shared_weight=self._linear(weight).packed if weight else None,
        )

    def _dense(self, shape: DenseShape) -> DenseFeedForward:
        return DenseFeedForward(
            gate_up=self._linear(shape.gate_up).packed,
            gate=shape.activation,
            down=self._linear(shape.down).packed,
        )

    def _optional_norm(self, shape: NormShape | None) -> int | None:
        return None if shape is None else address(self._parameters.norm(shape))

    def _linear(self, shape: LinearShape) -> CpuLinear:
        made = CpuLinear(self._cpu, self.dtype_name, shape, self._activations)
        self._parts.append(made)
        self._parameters.add_linear(shape, made)
        for name, start in shape.starts.items():
            if name:
                self._packed[f"{name}.weight"] = lambda start=start: (made.packed, start)
        return made

    def _optional_vector(self, shape: VectorShape | None) -> int | None:
        return None if shape is None else address(self._parameters.vector(shape))

    def _ones(self, shape: AttentionShape) -> Array:
        """A weight of values' norms that changes nothing."""
        size, number = shape.kv_heads * shape.head_dim, 1 - self.config.norm_offset
        made = np.full(size, number, DTYPES[self.dtype_name])
        self._parameters.tensors.append(made)
        return made

    def _make_embedding(
        self, name: str, shape: LinearShape, tied: CpuLinear | None
    ) -> CpuEmbedding:
        made = CpuEmbedding(self._cpu, self.dtype_name, shape, tied)
        self._parts.append(made)
        size = (shape.outputs, shape.inputs)
        self.slots[name] = Slot(size, made.write, made.kept_format)
        self._packed[name] = made.packed
        return made


class OwnInputs:
    """What each layer alone has of a token: see `OwnInputsShape`. I numbers a layer, of L layers.

    `eps` is that of the norm times E: so the projection's scale, the root of E, is in it.
    """

    def __init__(
        self, table: CpuEmbedding, projection: CpuLinear, norm_I: Array, rows: RowOps, eps: float
    ) -> None:
        self._table = table
        self._projection = projection
        self._norm_1I = norm_I
        self._rows = rows
        self._eps = eps
        width = norm_I.shape[-1]
        # Rounded as embeddings' is.
        self._scale = np.float32(np.array(width**0.5, norm_I.dtype))

    def __call__(self, token_ids_T: npt.NDArray[np.int64], x_TE: Array) -> Array:
        """Returns [T, L * I] of tokens and their embeddings."""
        made_TI = self._projection(x_TE)
        normed_TI, norm = np.empty_like(made_TI), self._norm_1I.shape[-1]
        rows, width = made_TI.shape
        self._rows.rms_norm(
            address(made_TI), rows, width, width, address(self._norm_1I), norm, norm, self._eps,
            address(normed_TI),
        )  # fmt: skip
        sum_TI = self._table(token_ids_T).astype(np.float32)
        sum_TI *= self._scale
        sum_TI += normed_TI.astype(np.float32)
        sum_TI *= np.float32(0.5**0.5)
        return sum_TI.astype(made_TI.dtype, copy=False)


def _new(shape: tuple[int, ...], dtype_name: str) -> Array:
    return new_array(shape, DTYPES[dtype_name])


def _write(target: Array, numbers: Array) -> None:
    target[...] = numbers


def attention_kernels(
    config: ModelConfig, layout: KVLayout, cpu: Cpu, dtype: KernelDType
) -> list[PagedAttention]:
    """A kernel for each KV cache group. Raises `ConfigError` for a model that it cannot compute.

    It reads keys and values where they are, through the block table, in tiles of 64 positions
    counted from the sequence's first token, each row in the same order of additions. Tiled softmax
    as in FlashAttention (Dao et al., 2022); the kernel is in `rust/prefixcache-attention`.
    """
    scale = config.attention_scale or config.head_dim**-0.5
    own = (layout.num_kv_heads, layout.head_dim)
    kinds = [(group.heads or own, group.sliding_window) for group in layout.groups]
    try:
        return [
            PagedAttention(
                cpu, dtype, config.num_heads, *heads, scale,
                window_left=None if window is None else window - 1,
                softcap=config.attention_softcap,
                keeps_codes=layout.code_bytes > 0,
            )
            for heads, window in kinds
        ]  # fmt: skip
    except ValueError as error:
        raise ConfigError(
            f"The CPU's attention cannot compute this model: {error}. --attention torch can."
        ) from None


def step_kernels(attentions: Sequence[PagedAttention], kv: KVMemory) -> StepKernels:
    """What the layers of a model attend with, over these KV tensors."""
    groups = kv.layout.groups
    places = layer_places(groups)

    def cache(group: KVGroup, number: int) -> int:
        if group.state_tensors:
            return 0  # `states` says where they lie.
        tensor, part = group.part(number)
        return kv.addresses[tensor] + (part.start or 0) * kv.itemsize

    return StepKernels(
        attentions=list(attentions),
        layer_groups=[group for group, _ in places],
        caches=[cache(groups[group], number) for group, number in places],
        page_stride=kv.bytes_per_tensor_block // kv.itemsize,
        kept_tokens=max(group.kept_tokens for group in groups),
        states=[
            (
                part.layer,
                part.group,
                kv.addresses[part.tensor] + part.start * STATE_BYTES,
                part.numbers,
            )
            for part in kv.layout.states
        ],
    )
