"""What `prefixcache bench` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefixcache.bench.workloads import LoadConfig, WorkloadConfig
from prefixcache.checked import Checked, PositiveInt
from prefixcache.config import DEFAULT_MODEL
from prefixcache.exceptions import FieldError
from prefixcache.flags import flag

# How each variant's engine differs; the first one is what the others are compared with.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "cache off": {"enable_prefix_caching": False},
    "cache on": {"enable_prefix_caching": True},
}
# Sharing in flight apart: to wait for blocks that another request is computing, or not to.
SHARING_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "cache off": {"enable_prefix_caching": False},
    "cache on, no waiting": {"enable_prefix_caching": True, "share_in_flight": False},
    "cache on": {"enable_prefix_caching": True, "share_in_flight": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(Checked):
    """What to measure.

    Engines run in this process unless `http` or `base_url` is given. `flags` go to each engine or
    server, and each of `variants` adds its own; the first is the baseline.
    """

    model: str = DEFAULT_MODEL
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    repeats: PositiveInt = flag(3, "Runs of each variant; medians are shown.", "Benchmark")
    http: bool = flag(False, "Start servers on loopback and measure through HTTP.", "Benchmark")
    base_url: str | None = flag(
        None, "Measure the server that runs at this address, as it is.", "Benchmark"
    )
    sharing: bool = flag(False, "Also with no request waiting for another's blocks.", "Benchmark")
    output: Path | None = flag(None, "Where to write the results (JSON).", "Benchmark")
    plot: Path = flag(
        Path("prefixcache-bench.png"), "Where to draw the picture (png, svg or pdf).", "Benchmark"
    )
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.http and self.base_url:
            raise FieldError("base_url", "stands beside http: give one, not both.")

    @property
    def variants(self) -> Mapping[str, Mapping[str, Any]]:
        """Flags of each variant, by its name."""
        return SHARING_VARIANTS if self.sharing else VARIANTS
