"""A bounded, checked disk tier for vLLM's KV offloading, keyed by weights and layout.

vLLM finds it by the entry point of `pyproject.toml`. docs/guides/vllm.md says how to use it.
"""

from __future__ import annotations

import logging
from contextlib import suppress

SUPPORTED_VERSIONS = ("0.32", "0.33")
"""Minor versions of vLLM whose tiering interface this was tested with."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes the connector and the tier known by name; vLLM calls it in each of its processes."""
    from vllm import __version__

    if (refusal := refuse_version(__version__)) is not None:
        logger.warning(refusal)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    with suppress(ValueError):  # Registered before.
        KVConnectorFactory.register_connector(
            "PrefixCacheConnector", f"{__name__}.connector", "PrefixCacheConnector"
        )
    with suppress(ValueError):
        SecondaryTierFactory.register_tier("prefixcache", f"{__name__}.tier", "PrefixCacheTier")


def refuse_version(version: str) -> str | None:
    """Why this version of vLLM is not supported; None if it is."""
    if ".".join(version.split(".")[:2]) in SUPPORTED_VERSIONS:
        return None
    return (
        f"prefixcache-vllm supports vLLM {' and '.join(SUPPORTED_VERSIONS)}, not {version}: "
        "the interface of tiers changes between minor versions. The tier is not registered."
    )
