"""What an engine is started with: its flags, frozen and checked.

Every wrong value raises `ConfigError` naming the field and what is allowed. Nothing here imports
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen

from prefixcache.config.checked import Checked, PositiveInt
from prefixcache.config.engine_parts.cache_config import CacheConfig, ElasticConfig
from prefixcache.config.engine_parts.flag_values import ByteSize, CacheFolder, FilePath
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.config.engine_parts.speculation_config import SpeculationConfig
from prefixcache.config.flags import build, flag, named

if TYPE_CHECKING:
    from prefixcache.config.model_config import ModelConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

DType = Literal["auto", "bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Activations = Literal["exact", "int8"]
ActivationChoice = Literal["exact", "int8", "auto"]
Attention = Literal["auto", "torch", "cpu", "flashinfer"]

# A step keeps a snapshot of all states for each block that it fills.
_STATE_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Checked):
    """Everything an engine is started with.

    `attention` is "cpu", the CPU's kernels, or a backend of `runner/torch/attention/registry.py`;
    "auto" takes the best one for the device. `batch_invariant` None is on where it
    can be kept; off, the fastest kernels are taken, whether they keep it or not. True is refused
    where it cannot be kept: by attention "torch", and on CUDA without FA3, which is for Hopper
    devices.
    """

    model: Annotated[str, MinLen(1)] = flag(
        DEFAULT_MODEL,
        "Alias, folder, GGUF file or hub id.",
        "Model",
        common=True,
    )
    revision: str | None = flag(None, "Branch, tag or commit of a hub id.", "Model")
    chat_template: Annotated[str, MinLen(1)] | None = flag(
        None,
        "File with a Jinja chat template, or its text, instead of the model's.",
        "Model",
        aliases=("chat_template_file",),
        shown="the model's",
        metavar="<file or text>",
    )
    dtype: DType = flag(
        "auto",
        "Type of the computation, of unquantized weights and of the cache. auto: bfloat16 for "
        "checkpoints of 16 bits where the device is fast at it, else float32.",
        "Model",
        common=True,
    )
    load_format: Literal["auto", "hf", "safetensors", "gguf"] = flag(
        "auto",
        "Required format of the weights: safetensors (hf is the same), or gguf for quantized "
        "ones, of a GGUF file or of prefixcache convert.",
        "Model",
    )
    quantization: Literal["auto", "none", "gguf"] = flag(
        "auto",
        "Require quantized weights (gguf) or unquantized ones (none); weights are served as "
        "they are.",
        "Model",
        aliases=("q",),
    )
    requantize: bool = flag(
        False,
        "On a weight update, quantize unquantized tensors to the format of those that they "
        "replace: q8_0, q4_0, q4_1, q5_0, q5_1 or mxfp4.",
        "Model",
    )
    weights_cache_dir: CacheFolder | None = flag(
        None,
        "Folder for weights in the layout of the CPU's kernels, which the next start maps; "
        "none keeps none. See docs/guides/weights.md.",
        "Model",
        shown="~/.cache/prefixcache/weights, for weights of 32MiB and more",
        metavar="<none or folder>",
    )
    weights_cache_size: ByteSize = flag(
        32 << 30,
        "Most bytes in --weights-cache-dir; the least recently used weights are removed first.",
        "Model",
        shown="32GiB",
        metavar="<bytes or size>",
    )
    device: Device = flag("auto", "Where to compute.", "Model", common=True)
    cpu_activations: ActivationChoice = flag(
        "auto",
        "Activation precision for quantized weights on a CPU: int8 as in llama.cpp, or exact, "
        "which is slower; auto is int8 for most formats. See docs/guides/weights.md.",
        "Model",
        common=True,
    )
    cpu_threads: Annotated[PositiveInt, Le(1024)] | None = flag(
        None,
        "Threads of a step on a CPU.",
        "Model",
        shown="the cores that the process may use",
        common=True,
    )
    cpu_instructions: str | None = flag(
        None,
        "Instruction set of the CPU's kernels instead of the best one: portable, avx2, avx512 "
        "or avx512_bf16, if the CPU has it.",
        "Model",
    )
    seed: Annotated[int, Ge(0), Le(2**64 - 1)] = flag(
        0,
        "Start of the series from which requests without a seed get theirs, in order of arrival.",
        "Model",
    )
    record_requests: FilePath | None = flag(
        None,
        "File to record requests and answers in, token by token, for `prefixcache rerun`. It "
        "holds users' text.",
        "Model",
        shown="nothing is recorded",
        metavar="<file>",
    )
    attention: Attention = flag("auto", "Attention backend.", "Model")
    batch_invariant: bool | None = flag(
        None,
        "Compute answers whose bits do not depend on the batch; fail if that is not possible.",
        "Model",
        shown="on for a CPU and for Hopper GPUs",
    )
    enforce_eager: bool = flag(False, "Run without CUDA graphs.", "Model")
    cache: CacheConfig = field(default_factory=CacheConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    @classmethod
    def from_flags(cls, **flags: Any) -> EngineConfig:
        """An `EngineConfig` from flat flags, named as its fields and those of its parts.

        A flag that is None keeps its default. Raises `ConfigError` for an unknown or wrong flag.
        """
        return build(cls, named(cls, flags))

    @property
    def gets_new_weights(self) -> bool:
        """Whether a trainer is to send weights, which compares log probabilities with its own."""
        return self.requantize or self.cache.max_weight_staleness != 0

    @property
    def activations(self) -> Activations:
        """What a CPU multiplies weights with; where "auto" was not settled, exact ones."""
        return "exact" if self.cpu_activations == "auto" else self.cpu_activations

    def on(self, device: str) -> EngineConfig:
        """The same with what is usual on that device where nothing is said."""
        return replace(self, scheduler=self.scheduler.on(device))

    def for_model(self, model: ModelConfig) -> EngineConfig:
        """The same with what is usual for this model: larger blocks and shorter steps with states.

        A snapshot stands where a step ends, so shorter steps let more prompts that part hit.
        """
        if model.states is None:
            return self
        size = max(self.cache.block_size, self.cache.state_block_size)
        seqs, tokens = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        most = tokens or max(_STATE_STEP_TOKENS, seqs or 0)
        return replace(
            self,
            cache=replace(self.cache, block_size=size),
            scheduler=replace(self.scheduler, max_num_batched_tokens=most),
        )

    def retention_interval(self, *, has_full_attention: bool) -> int | None:
        """`cache.prefix_cache_retention_interval` or its default; None keeps every block.

        Full attention's hits show later where prompts part, and its blocks want the room.
        """
        interval = self.cache.prefix_cache_retention_interval
        if interval is not None:
            return None if interval == "none" else interval
        if self.cache.pin_swa_tokens:
            return self.scheduler.limits().max_num_batched_tokens
        return 0 if has_full_attention else None

    @property
    def keeps_batch_invariant(self) -> bool:
        """Whether answers shall not depend on the batch where the device can keep it."""
        return self.batch_invariant is not False
