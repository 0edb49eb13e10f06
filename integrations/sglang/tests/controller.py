"""SGLang's own cache controller, host pool and storage threads, with bytes that stand for KV.

`python controller.py FOLDER` backs up the pages of a prompt and waits to be killed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs

PAGE, LAYERS, HEADS, WIDTH, TOKENS = 16, 2, 2, 16, 1024
PROMPT = list(range(160))
NUM_PAGES = len(PROMPT) // PAGE
_SECONDS = 300.0  # A bound against hanging.


def content(key: str) -> np.ndarray:
    """What stands for the KV of a page: bytes that no other page has."""
    size = 2 * LAYERS * PAGE * HEADS * WIDTH
    return np.random.default_rng(int(key[:15], 16)).integers(-9999, 9999, size, np.int16)


def device_pool() -> SimpleNamespace:
    """What the controller and the host pool read of a pool on the device."""
    buffers = tuple(torch.zeros(TOKENS, HEADS, WIDTH, dtype=torch.float16) for _ in range(LAYERS))
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return SimpleNamespace(
        device=torch.device("cpu"),
        store_dtype=torch.float16,
        size=TOKENS,
        layer_num=LAYERS,
        start_layer=0,
        end_layer=LAYERS - 1,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        row_dim=HEADS * WIDTH,
        k_buffer=buffers,
        v_buffer=buffers,
        k_data_ptrs=pointers,
        v_data_ptrs=pointers,
        hicache_write_back_staging=None,
        layer_shard_enabled=False,
        register_layer_transfer_counter=lambda _: None,
    )


def host_pool(device: SimpleNamespace) -> MHATokenToKVPoolHost:
    """SGLang's memory of pages on the host."""
    options: dict[str, Any] = {"pin_memory": False}
    if "device_pool" in signature(MHATokenToKVPoolHost).parameters:  # Before 0.5.23.
        return MHATokenToKVPoolHost(device, 2.0, 0, PAGE, "page_first", **options)
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo

    info = MHABufferInfo(
        buffers=KVBuffers(
            k=device.k_buffer,
            v=device.v_buffer,
            k_data_ptrs=device.k_data_ptrs,
            v_data_ptrs=device.v_data_ptrs,
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=device.store_dtype,
        device=device.device,
    )
    options |= {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS - 1}
    return MHATokenToKVPoolHost(info, 2.0, 0, PAGE, "page_first", **options)


def write_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


class Controller:
    """The cache controller of one engine, driven as its scheduler does."""

    def __init__(
        self, folder: Path, arguments: dict[str, Any] | None = None, **options: Any
    ) -> None:
        model = folder / "model"
        if not model.exists():
            write_model(model)
        get_context().set_server_args(ServerArgs(model_path=str(model), **(arguments or {})))
        if not torch.distributed.is_initialized():
            rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
            torch.distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
        device = device_pool()
        with host_memory_budget_scope(1 << 30):  # Without it 10 GB of the machine must be free.
            self.pool = host_pool(device)
        self.controller = HiCacheController(
            SimpleNamespace(get_kvcache=lambda: device),
            self.pool,
            PAGE,
            torch.distributed.group.WORLD,
            threading.Event(),
        )
        extra = {
            "backend_name": "prefixcache",
            "module_path": "prefixcache_sglang.storage",
            "class_name": "PrefixCacheStorage",
            "root_dir": str(folder / "kv"),
            "max_bytes": 64 << 20,
            "deadline_s": 60,
            **options,
        }
        with get_parallel().override(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
        ):
            self.controller.attach_storage_backend("dynamic", PAGE, "model", extra)
        self.storage = self.controller.storage_backend
        self.is_open = True

    def keys(self, tokens: list[int]) -> list[str]:
        return get_storage_hash_str(tokens, None, page_size=PAGE)

    def back_up(self, tokens: list[int] = PROMPT) -> int:
        """Writes pages as a worker does, and has them stored. Returns how many."""
        keys = self.keys(tokens)
        indices = self.pool.alloc(len(tokens))
        for key, begin in zip(keys, indices[::PAGE].tolist(), strict=True):
            page = torch.from_numpy(content(key)).view(torch.float16)
            self.pool.set_from_flat_data_page(begin, page)
        self.controller.write_storage(indices, tokens, hash_value=keys)
        operation = self.controller.ack_backup_queue.get(timeout=_SECONDS)
        self.pool.free(indices)
        return operation.completed_tokens // PAGE

    def prefetch(self, tokens: list[int] = PROMPT) -> int:
        """How many pages of a prompt come back from the disk, all of them compared."""
        self.controller.prefetch("request", tokens)
        operation = self.controller.prefetch_hit_queue.get(timeout=_SECONDS)
        if operation.storage_hit_count == 0:
            return 0
        operation.host_indices = self.pool.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        num_pages = 0
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=_SECONDS)).completed_req:
            num_pages = ack.completed_tokens // PAGE
        begins = operation.host_indices[::PAGE].tolist()[:num_pages]
        for key, begin in zip(self.keys(tokens), begins, strict=False):
            page = self.pool.get_data_page(begin).view(torch.int16).numpy()
            assert np.array_equal(page, content(key))
        self.pool.free(operation.host_indices)
        return num_pages

    def close(self) -> None:
        """The end of the engine; again, nothing."""
        if self.is_open:
            self.is_open = False
            self.controller.detach_storage_backend()


if __name__ == "__main__":
    assert Controller(Path(sys.argv[1])).back_up() == NUM_PAGES
    print("backed up", flush=True)
    sys.stdin.read()
