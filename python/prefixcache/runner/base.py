"""The boundary between deciding and computing: all that the layers above ask of a runner.

Numpy arrays, numbers and plain data cross it, never a tensor: nothing above imports torch. New
weights alone pass through as their owner has them, and only the runner looks at them. A device has
a runner of its own: it fills this interface, and `engine/runners.py` chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from prefixcache.config.model_config import ModelConfig
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.kv.elastic import BlockMemory
from prefixcache.kv.kv_folder import KeptFile
from prefixcache.kv.specs import KVLayout, PoolSizes
from prefixcache.kv.tiers.host_blocks import HostBlocks
from prefixcache.runner.pool_memory import PoolMemory
from prefixcache.types.step_plan import InFlightStep, StepPlan, StepResult

if TYPE_CHECKING:
    from prefixcache.models.replaceable import ReplaceableModel

Step = TypeVar("Step", bound=InFlightStep)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What is known of a model once it is loaded.

    `hardware` describes in words what computes, and `instructions` names those of the CPU's own
    kernels, of which `kernel_revision` counts the changes that round otherwise. `kv_dtype` is what
    keys and values are kept as.
    """

    dtype: str
    kv_dtype: str
    hardware: str
    attention: str
    batch_invariant: bool
    max_model_len: int
    weights_digest: str
    instructions: str | None = None
    kernel_revision: int = 0

    @property
    def arithmetic(self) -> str:
        """What the bits of keys and values depend on besides model, weights and activations."""
        if self.instructions is None:
            return self.dtype
        computed = f"{self.dtype}/{self.instructions}/r{self.kernel_revision}"
        if self.kv_dtype == self.dtype:
            return computed
        return f"{computed}/{self.kv_dtype} kv, rotated keys"


@dataclass(frozen=True, slots=True)
class KVSpecs:
    """The KV cache of a loaded model: its groups of layers, and how large its pool may be.

    With a `file` the KV lies there, and that of another process may be hit. `host_blocks` are those
    of a pool in the host's memory, where their bytes mean the same to other processes.
    """

    layout: KVLayout
    sizes: PoolSizes
    file: KeptFile | None = None
    host_blocks: HostBlocks | None = None


class StepRunner(Protocol[Step]):
    """What the step loop needs: it computes a planned step and gives what was sampled.

    At most two submitted steps may wait for their results.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may still be computed when its outputs are known.

        Where nothing is sampled they are known at once; an error then shows in a later step.
        """
        ...

    @property
    def block_tables(self) -> Sequence[BlockTableBuffers]:
        """Arrays for the cache to fill before each step, one set a KV cache group."""
        ...

    def submit(self, plan: StepPlan, /) -> Step:
        """Computes the step. It may still be computed when this returns.

        The plan's tokens below zero are those that the step before sampled.
        """
        ...

    def results(self, step: Step, /) -> StepResult:
        """What came of a step: once, in the order of submission. Waits unless `step.is_known`.

        Raises whatever kept the device from computing.
        """
        ...

    def run_empty_step(self) -> None:
        """Computes one token of no request, in the null block; waits for it.

        Raises whatever keeps the device from computing.
        """
        ...


class Runner(StepRunner[Step], Protocol[Step]):
    """One model on one device. Nothing but `device` can be used before `load`."""

    @property
    def device(self) -> str:
        """As "cpu" or "cuda:0"."""
        ...

    @property
    def shares_kv(self) -> bool:
        """Whether a sequence may read KV computed for another; else the prefix cache stays off."""
        ...

    @property
    def kv(self) -> BlockMemory:
        """The memory of the pool's blocks."""
        ...

    @property
    def memory(self) -> ModelMemory:
        """What sleeping gives up."""
        ...

    def load(self, model: ModelConfig, folder: Path, /) -> ModelSpec:
        """Loads the model in a folder and makes the memory of its KV cache.

        Raises `ConfigError`, `ModelLoadError` or `OutOfMemoryError`.
        """
        ...

    def kv_specs(self) -> KVSpecs:
        """The shape of the KV cache."""
        ...

    def available_memory(self) -> int:
        """Bytes of the device that can still be allocated. From any thread."""
        ...


class ModelMemory:
    """The memory that a model takes and gives up when the engine sleeps; between two steps.

    The KV tensors are still to be made.
    """

    def __init__(self, weights: ModelWeights, kv: PoolMemory) -> None:
        self.weights = weights
        self.has_kv = False
        self._kv = kv

    def make_kv(self) -> None:
        """Makes the KV cache's memory, zeroed. Raises `OutOfMemoryError`."""
        self._kv.allocate()
        self.has_kv = True

    def give_up_kv(self) -> None:
        """Frees the KV cache's memory."""
        self.has_kv = False
        self._kv.give_up()

    def settle(self) -> None:
        """Makes, or drops, what needs both weights and KV, after either came or went."""


ModelWeights: TypeAlias = "ReplaceableModel[Any]"
"""The weights of a model, which can be replaced and given up."""
