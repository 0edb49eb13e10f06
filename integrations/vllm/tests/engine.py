"""vLLM's own connector, scheduler side, manager and shared memory, with bytes that stand for KV.

`python engine.py FOLDER` stores the blocks of two prompts and waits to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

BLOCK_TOKENS = 16
_CACHE_ARGUMENTS = {"cache_dtype", "prefix_caching_hash_algo"}
NUM_LAYERS = 2
NUM_ROWS = 48
PROMPTS = {"first": range(160), "second": range(7, 327)}

_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
}


def write_model(folder: Path, weights: bytes = b"weights") -> Path:
    """A model's folder, as far as the scheduler's side of vLLM reads it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_SHAPE))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def transfer_config(
    root: Path, *, connector: str = "PrefixCacheConnector", **tier: Any
) -> dict[str, Any]:
    """The value of --kv-transfer-config."""
    tier = {
        "type": "prefixcache",
        "root_dir": str(root),
        "max_bytes": 64 << 20,
        "deadline_s": 60,
        **tier,
    }
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": NUM_ROWS * 4096,
        "secondary_tiers": [tier],
    }
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def configure(model: Path, transfer: dict[str, Any], **changes: Any) -> VllmConfig:
    """vLLM's configuration; `changes` are arguments of its parts."""
    load_general_plugins()
    cache = {name: changes.pop(name) for name in _CACHE_ARGUMENTS & changes.keys()}
    load = LoadConfig(load_format=changes.pop("load_format", "auto"))
    model_config = ModelConfig(
        model=str(model), skip_tokenizer_init=True, **{"dtype": "float16", **changes}
    )
    return VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, **cache),
        load_config=load,
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(**transfer),
    )


def kv_cache_config() -> KVCacheConfig:
    """Blocks of 4096 bytes for all layers."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.float16
    )
    group = KVCacheGroupSpec([f"layers.{layer}" for layer in range(NUM_LAYERS)], spec)
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[group])


def content(key: bytes) -> np.ndarray:
    """What stands for the KV of a block: bytes that no other block has."""
    seed = int.from_bytes(key[:8], "big")
    return np.random.default_rng(seed).integers(-128, 128, 4096, np.int8)


class Engine:
    """The connector of one engine that is driven as its scheduler does."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, kv_cache_config()
        )
        self.scheduler = self.connector.connector_scheduler
        self.manager = self.scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        self.rows: Any = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
        self._num_requests = 0

    def request(self, tokens: range) -> tuple[Request, list[bytes]]:
        """A new request of the connector, and the keys of its blocks."""
        self._num_requests += 1
        request = Request(
            f"request-{self._num_requests}",
            list(tokens),
            SamplingParams(max_tokens=1),
            None,
            block_hasher=self._hasher,
        )
        self.connector.on_new_request(request)
        return request, [make_offload_key(block, 0) for block in request.block_hashes]

    def step(self) -> None:
        """The end of a step of the scheduler."""
        self.connector.build_connector_meta(SchedulerOutput.make_empty())

    def store(self, tokens: range) -> list[bytes]:
        """Writes blocks as a worker does, and waits until the tier has dealt with them."""
        request, keys = self.request(tokens)
        context = self.scheduler._req_status[request.request_id].req_context
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        for key, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.rows[row] = content(key).view(self.rows.dtype)
        self.manager.complete_store(output.keys_to_store, context)
        self.settle()
        return keys

    def settle(self) -> None:
        """Steps until no job is left."""
        self.step()
        while self.manager.has_pending_work():
            time.sleep(0.001)
            self.step()

    def find(self, tokens: range) -> int:
        """How many blocks of a new prompt the connector offers, all of them compared."""
        request, keys = self.request(tokens)
        while (hit := self.connector.get_num_new_matched_tokens(request, 0)[0]) is None:
            self.step()
            time.sleep(0.001)
        num_blocks = hit // BLOCK_TOKENS
        if num_blocks:
            context = self.scheduler._req_status[request.request_id].req_context
            spec = self.manager.prepare_load(keys[:num_blocks], context)
            for key, row in zip(keys, spec.chunk_ids, strict=False):
                assert np.array_equal(self.rows[row], content(key).view(self.rows.dtype))
            self.manager.complete_load(keys[:num_blocks], context)
        self.step()
        return num_blocks

    def forget_memory(self) -> None:
        """Drops what is in memory, without the reset that ends a tier's blocks too."""
        self.settle()
        self.manager.primary_tier.reset_cache()

    def close(self) -> None:
        """The end of the engine; again, nothing."""
        if self.rows is not None:
            self.rows = None
            self.connector.shutdown()


def main() -> None:
    """Stores, says where its memory is, and waits for the end."""
    folder = Path(sys.argv[1])
    engine = Engine(configure(folder / "model", transfer_config(folder / "kv")))
    for tokens in PROMPTS.values():
        engine.store(tokens)
    print(engine.manager.primary_tier._mmap_region.mmap_path, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
