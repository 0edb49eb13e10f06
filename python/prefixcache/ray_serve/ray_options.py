"""Flags of `prefixcache serve-ray` besides those of `serve`. Nothing here imports Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, MinLen

from prefixcache.config.checked import Checked, NonNegativeFloat, PositiveFloat, PositiveInt
from prefixcache.config.engine_parts.flag_values import ByteSize
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError

# Ray refuses less.
_LEAST_STORE = 75 * 2**20

NOT_SERVED = (
    "diagnostics_memory",
    "drain_seconds",
    "kv_events_config",
    "limit_concurrency",
    "otlp_traces_endpoint",
    "prompt_text",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "timeout_read",
    "timeout_write",
    "uds",
    "uds_permissions",
)
"""Flags of `serve` about what Ray's proxy does instead, or about what one engine remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions(Checked):
    """How many replicas there are, and in which cluster."""

    num_replicas: PositiveInt = flag(1, "Number of engines, each with its own cache.", "Ray")
    address: Annotated[str, MinLen(1)] | None = flag(
        None,
        "Cluster to join, as 10.0.0.1:6379 or auto.",
        "Ray",
        shown="a new one on this machine",
    )
    min_replicas: PositiveInt | None = flag(
        None, "Fewest replicas, with --max-replicas.", "Ray", shown="--num-replicas"
    )
    max_replicas: PositiveInt | None = flag(
        None, "Most replicas; with it their number follows the load.", "Ray", shown="fixed"
    )
    target_ongoing_requests: PositiveFloat = flag(
        16, "Running and waiting requests per replica that scaling aims at.", "Ray"
    )
    num_ingress: PositiveInt = flag(
        1, "Processes that take HTTP requests, encode prompts and choose replicas.", "Ray"
    )
    command_timeout: PositiveFloat = flag(
        600,
        "Seconds in which each replica must carry out an admin operation, such as a weight "
        "update; a slower one is replaced.",
        "Ray",
        metavar="<seconds>",
    )
    replica_cpus: PositiveFloat = flag(
        1, "Processors that Ray reserves for each replica; 0.5 lets two share one.", "Ray"
    )
    replica_gpus: NonNegativeFloat = flag(0, "GPUs that Ray reserves for each replica.", "Ray")
    ray_object_store: Annotated[ByteSize, Ge(_LEAST_STORE)] = flag(
        256 * 2**20,
        "Memory for what Ray's processes share, in a new cluster.",
        "Ray",
        shown="256MiB",
        metavar="<bytes or size>",
    )

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.max_replicas is None:
            if self.min_replicas is not None:
                raise FieldError("min_replicas", "needs --max-replicas.")
            return
        if self.fewest > self.max_replicas:
            problem = f"({self.max_replicas}) is less than the fewest replicas, {self.fewest}."
            raise FieldError("max_replicas", problem)

    @property
    def fewest(self) -> int:
        """Replicas there are at least."""
        return self.num_replicas if self.min_replicas is None else self.min_replicas
