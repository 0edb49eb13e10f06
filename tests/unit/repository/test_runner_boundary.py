"""What stands above the runner knows its interface alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fakes.fake_blocks import BLOCK_BYTES, FakeBlocks
from fakes.fake_runner import answer_alone
from fakes.plain_runner import PlainRunner
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.engine.build import build
from prefixcache.kv.specs import PoolSizes, kv_layout
from prefixcache.runner.base import KVSpecs, ModelSpec
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams


class WholeRunner(PlainRunner):
    """A `Runner` that computes no model, from `load` on."""

    device, shares_kv = "cpu", True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(65, config.cache.block_size, max_tokens=64, max_seqs=8, max_pages=8)
        self.arrays = [self._kv]
        self.kv: Any = FakeBlocks(self, 65)  # type: ignore[arg-type]
        weights = SimpleNamespace(complete=True, info=None)
        self.memory: Any = SimpleNamespace(weights=weights, has_kv=True)

    def load(self, model: ModelConfig, folder: Path) -> ModelSpec:
        sizes = PoolSizes(start=65, ceiling=65, floor=2, block_bytes=BLOCK_BYTES, free_bytes=0)
        self._specs = KVSpecs(kv_layout(model), sizes)
        return ModelSpec(
            kv_dtype="float32",
            dtype="float32",
            hardware="a sheet of paper",
            attention="none",
            batch_invariant=True,
            max_model_len=128,
            weights_digest="0",
        )

    def kv_specs(self) -> KVSpecs:
        return self._specs

    def available_memory(self) -> int:
        return 0


def test_an_engine_is_built_around_any_runner(tiny_checkpoint: Callable[[], Path]) -> None:
    flags = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig.from_flags(model=str(tiny_checkpoint()), block_size=16, **flags)
    engine = build(config, make_runner=WholeRunner).engine
    prompt, params = [*range(40)], SamplingParams(max_tokens=5, ignore_eos=True)
    for name, cached in (("a", 0), ("b", 32)):
        engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params))
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        assert [i for one in outputs for i in one.token_ids] == answer_alone(prompt, 5)
        assert outputs[-1].num_cached_tokens == cached
