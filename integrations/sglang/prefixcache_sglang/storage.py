"""A dynamic backend of SGLang's HiCache over `prefixcache_store`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_server_args, get_serving
from sglang.version import __version__

from prefixcache_sglang import refuse_version
from prefixcache_store import Store
from prefixcache_store.options import positive
from prefixcache_store.weights import model_digest

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host import HostKVCache

logger = logging.getLogger(__name__)

_NAMESPACE_BYTES = 16
# What the bytes of a page depend on, with the weight files and the configuration next to them.
_ARGUMENTS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "json_model_override_args",
    "attention_backend",
    "speculative_algorithm",
)
_GEOMETRY = ("layout", "dtype", "page_size", "size_per_token", "layer_num", "storage_format_tag")


class PrefixCacheStorage(HiCacheStorage):
    """Pages on a disk: bounded, checked, never served for other weights or another layout.

    Each call ends `deadline_s` after it began. Pages that are not there by then are misses.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _: dict[str, Any]) -> None:
        """Opens the store.

        Args:
            storage_config: What SGLang says of ranks; its `extra_config` has the options
                `root_dir`, `max_bytes`, `deadline_s` (2) and `weights`.

        Raises `ValueError` where the promise could not be kept.
        """
        if (refusal := refuse_version(__version__)) is not None:
            raise ValueError(refusal)
        options = storage_config.extra_config or {}
        ranks = dataclasses.asdict(storage_config)
        del ranks["extra_config"], ranks["enable_storage_metrics"], ranks["model_name"]
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ValueError(
                "Ranks of an MLA model share the pages of one rank; this store is of one process. "
                "It runs with --tp-size 1."
            )
        arguments = get_server_args()
        if arguments.enable_lora:
            raise ValueError(
                "SGLang's page hashes have the name of a LoRA adapter, not its weights: another "
                "adapter of that name would get wrong pages. Run without --enable-lora."
            )
        self._weight_version = get_serving().weight_version
        self._parts = {
            "sglang": __version__,
            "torch": torch.__version__,
            "device": str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu",
            "ranks": ranks,
            "arguments": {name: str(getattr(arguments, name)) for name in _ARGUMENTS},
            "weight_version": self._weight_version,
        }
        self._deadline = positive("deadline_s", options.get("deadline_s", 2.0))
        shares = storage_config.tp_size * storage_config.pp_size * storage_config.attn_cp_size
        name = (
            f"tp{storage_config.tp_rank}-pp{storage_config.pp_rank}"
            f"-cp{storage_config.attn_cp_rank}-dp{storage_config.dp_rank}"
        )
        folder = Path(options["root_dir"]).expanduser() / name
        share = positive("max_bytes", options.get("max_bytes")) // shares
        self._store = Store(folder, int(share), threads=4)
        # In the store's folder, which nobody else can open: notes say which weights pages are of.
        notes = folder / "weights.json"
        try:
            self._parts["weights"] = options.get("weights") or _weights(notes)
        except BaseException:
            self._store.close()
            raise
        self._namespaces: dict[str, bytes] = {}

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """The pool of the pages of `batch_get` and `batch_set`."""
        super().register_mem_pool_host(mem_pool_host)
        self._namespaces[PoolName.KV.value] = self._namespace(PoolName.KV.value, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """A pool of the pages of `batch_get_v2` and `batch_set_v2`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != PoolName.KV.value:
            self._namespaces[name] = self._namespace(name, host_pool)

    def _namespace(self, name: str, pool: HostKVCache) -> bytes:
        geometry = {field: str(getattr(pool, field, None)) for field in _GEOMETRY}
        shape = tuple(pool.get_dummy_flat_data_page().shape)
        parts = {**self._parts, "pool": [name, type(pool).__name__, shape, geometry]}
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).digest()[:_NAMESPACE_BYTES]

    def _names(self, keys: Sequence[str], pool: str = PoolName.KV.value) -> list[bytes]:
        return [self._namespaces[str(pool)] + key.encode() for key in keys]

    def _is_current(self) -> bool:
        """Whether the weights are those of the start, as far as SGLang says."""
        return get_serving().weight_version == self._weight_version

    def _contains(self, names: list[bytes]) -> list[bool]:
        return self._store.contains(names) if self._is_current() else [False] * len(names)

    def _read(self, names: list[bytes], pages: list[torch.Tensor]) -> list[bool]:
        if not self._is_current():
            return [False] * len(names)
        buffers = [page.view(torch.uint8).numpy() for page in pages]
        return self._store.get_into(names, buffers, self._deadline)

    def _write(self, names: list[bytes], pages: list[torch.Tensor]) -> list[bool]:
        if not self._is_current():
            return [False] * len(names)
        buffers = [page.contiguous().view(torch.uint8).numpy() for page in pages]
        return self._store.put(names, buffers, self._deadline)

    def exists(self, key: str) -> bool:
        """Whether the page is there, from memory."""
        return self._contains(self._names([key]))[0]

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """The number of leading pages that are there, from memory."""
        return _count(self._contains(self._names(keys)))

    def get(
        self, key: str, target_location: torch.Tensor, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """The page in `target_location`; None if it is a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor], target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Pages in `target_locations`; None for each one that is a miss."""
        here = self._read(self._names(keys), target_locations)
        return [
            page if is_here else None for page, is_here in zip(target_locations, here, strict=True)
        ]

    def set(
        self, key: str, value: torch.Tensor, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Keeps a page. False if it is not kept."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor],
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keeps pages. False if one is not kept."""
        return all(self._write(self._names(keys), values))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix whose pages are there in each pool, as its policy says."""
        num_pages = self.batch_exists(keys)
        hits = {PoolName.KV: num_pages}
        lengths = set(range(1, num_pages + 1))
        for transfer in pool_transfers or []:
            here = self._contains(self._names(keys[:num_pages], transfer.name))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                window = num_pages
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
            else:
                raise ValueError(f"The hit policy {transfer.hit_policy} is not supported")
            fitting = {n for n in range(1, num_pages + 1) if all(here[max(0, n - window) : n])}
            hits[transfer.name] = max(fitting, default=0)
            lengths &= fitting
        return PoolTransferResult(
            max(lengths, default=0),
            {name: n for name, n in hits.items() if n},
            restorable_prefix_pages=sorted(lengths),
        )

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Reads pages of several pools: which ones their memory has now."""
        return {transfer.name: self._transfer(transfer, self._get_pages) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Keeps pages of several pools: which ones are kept."""
        return {transfer.name: self._transfer(transfer, self._set_pages) for transfer in transfers}

    def _transfer(
        self,
        transfer: PoolTransfer,
        move: Callable[[HostKVCache, list[bytes], list[int]], list[bool]],
    ) -> list[bool]:
        pool = self.registered_pools[transfer.name]
        keys = transfer.keys or []
        indices = transfer.host_indices
        if indices is None or indices.numel() != len(keys) * pool.page_size:
            logger.error("%s has other indices than keys", transfer.name)
            return [False] * len(keys)
        begins = [int(index) for index in indices[:: pool.page_size]]
        return move(pool, self._names(keys, transfer.name), begins)

    def _get_pages(self, pool: HostKVCache, names: list[bytes], begins: list[int]) -> list[bool]:
        pages = [pool.get_dummy_flat_data_page() for _ in names]
        here = self._read(names, pages)
        for begin, page, is_here in zip(begins, pages, here, strict=True):
            if is_here:
                pool.set_from_flat_data_page(begin, page)
        return here

    def _set_pages(self, pool: HostKVCache, names: list[bytes], begins: list[int]) -> list[bool]:
        return self._write(names, [pool.get_data_page(begin, flat=True) for begin in begins])

    def clear(self) -> None:
        """Removes all pages."""
        self._store.clear()

    def close(self) -> None:
        """Ends the use of the store."""
        logger.info("The storage ends: %s", self._store.counts())
        self._store.close()


def _count(here: list[bool]) -> int:
    return sum(1 for _ in takewhile(bool, here))


def _weights(notes: Path) -> list[str]:
    """What stands for the weights of the model and of a draft model."""
    arguments = get_server_args()
    models = [(arguments.model_path, arguments.revision)]
    if arguments.speculative_draft_model_path is not None:
        draft = arguments.speculative_draft_model_path
        models.append((draft, arguments.speculative_draft_model_revision))
    folder, load_format = arguments.download_dir, arguments.load_format
    return [model_digest(path, revision, folder, load_format, notes) for path, revision in models]
