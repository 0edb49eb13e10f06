"""What `prefixcache bench` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prefixcache.config.checked import Checked, PositiveInt
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError
from prefixcache.tools.bench.arrivals import LoadConfig
from prefixcache.tools.bench.records import parse_objectives
from prefixcache.tools.bench.workloads import WorkloadConfig

DEFAULT_PICTURE = Path("prefixcache-bench.png")

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
    asked: WorkloadConfig = field(default_factory=WorkloadConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    repeats: PositiveInt = flag(3, "Runs of each variant; medians are shown.", "Benchmark")
    http: bool = flag(False, "Start servers on loopback and measure through HTTP.", "Benchmark")
    base_url: str | None = flag(
        None,
        "Measure any running OpenAI-compatible server at this address.",
        "Benchmark",
    )
    api_key: str | None = flag(None, "Key for the server at --base-url.", "Benchmark", secret=True)
    prompts: Literal["auto", "tokens", "text", "chat"] = flag(
        "auto",
        "Form of the prompts for --base-url; auto: the first that the server accepts.",
        "Benchmark",
    )
    baseline: bool = flag(
        True, "Also measure with the cache off, if the server is prefixcache.", "Benchmark"
    )
    sharing: bool = flag(
        False, "Also measure without requests that wait for blocks of others.", "Benchmark"
    )
    goodput: tuple[str, ...] = flag(
        (),
        "Limits in milliseconds for ttft, itl, tpot or e2el, as in ttft:500 itl:50; the share "
        "of requests within all of them is shown.",
        "Benchmark",
        greedy=True,
        metavar="<metric:ms>...",
    )
    output: Path | None = flag(None, "File for the results (JSON).", "Benchmark")
    html: Path | None = flag(None, "File for a page with table and pictures (HTML).", "Benchmark")
    plot: Path | None = flag(
        None,
        "File for the picture (png, svg or pdf).",
        "Benchmark",
        shown=str(DEFAULT_PICTURE),
    )
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.http and self.base_url:
            raise FieldError("base_url", "excludes --http: give one, not both.")
        if self.sharing and self.base_url:
            raise FieldError("sharing", "needs engines of its own: give base_url or it, not both.")
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise FieldError("base_url", f"must begin with http:// or https://: {self.base_url!r}.")
        try:
            parse_objectives(self.goodput)
        except ValueError as error:
            raise FieldError("goodput", f"{error}.") from None

    @property
    def objectives(self) -> dict[str, float]:
        """Seconds by metric."""
        return parse_objectives(self.goodput)

    @property
    def variants(self) -> Mapping[str, Mapping[str, Any]]:
        """Flags of each variant, by its name."""
        variants = SHARING_VARIANTS if self.sharing else VARIANTS
        return variants if self.baseline else dict(list(variants.items())[1:])
