"""What a runner on torch gives back when it sleeps besides weights and KV: captured graphs."""

from __future__ import annotations

from collections.abc import Callable

from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.base import ModelMemory
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.kv_tensors import KVTensors, give_back
from prefixcache.runner.torch.model_runner import ModelRunner
from prefixcache.runner.torch.piecewise_graphs import Graphs


class TorchModelMemory(ModelMemory):
    """One model's memory, and its captured graphs.

    `make_graphs` captures the model's steps, or gives None where that is not done. Captured
    graphs hold the addresses of weights and KV tensors: they go when either goes, and are made
    again when both are back.
    """

    def __init__(
        self,
        weights: ReplaceableModel[DecoderModel],
        kv: KVTensors,
        runner: ModelRunner,
        make_graphs: Callable[[], Graphs | None],
    ) -> None:
        super().__init__(weights, kv)
        self._device = kv.device
        self._runner = runner
        self._make_graphs = make_graphs

    def give_up_kv(self) -> None:
        """See `ModelMemory`."""
        self._runner.graphs = None
        super().give_up_kv()

    def settle(self) -> None:
        """See `ModelMemory`. Drops graphs that point nowhere and makes those that are due."""
        if not (self.has_kv and self.weights.complete):
            self._runner.graphs = None
            give_back(self._device)
        elif self._runner.graphs is None:
            self._runner.graphs = self._make_graphs()
