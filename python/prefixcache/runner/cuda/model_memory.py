"""What a runner keeps in memory, and gives back when it sleeps: weights, KV, captured graphs."""

from __future__ import annotations

from collections.abc import Callable

from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.cuda.decoder_model import DecoderModel
from prefixcache.runner.cuda.kv_tensors import KVTensors, give_back
from prefixcache.runner.cuda.model_runner import ModelRunner
from prefixcache.runner.cuda.piecewise_graphs import Graphs


class ModelMemory:
    """One model's memory; the KV tensors are still to be made.

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
        self.weights = weights
        self.has_kv = False
        self._kv = kv
        self._runner = runner
        self._make_graphs = make_graphs

    def make_kv(self) -> None:
        """See `base.ModelMemory`."""
        self._kv.allocate()
        self.has_kv = True

    def give_up_kv(self) -> None:
        """See `base.ModelMemory`."""
        self.has_kv = False
        self._runner.graphs = None
        self._kv.give_up()

    def settle(self) -> None:
        """See `base.ModelMemory`. Drops graphs that point nowhere and makes those that are due."""
        if not (self.has_kv and self.weights.complete):
            self._runner.graphs = None
            give_back(self._kv.device)
        elif self._runner.graphs is None:
            self._runner.graphs = self._make_graphs()
