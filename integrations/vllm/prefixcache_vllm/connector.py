"""vLLM's connector for offloaded KV blocks, in which tiers see the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig


class PrefixCacheConnector(OffloadingConnector):
    """`OffloadingConnector`, which itself gives a tier neither the weights nor the whole layout."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
