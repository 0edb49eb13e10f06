"""How long, how hard, and where the report goes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`rate` is in requests a second outside of the overload; the rest as its help says."""

    minutes: float
    clients: int
    rate: float
    overload_seconds: float
    seed: int
    architecture: str
    report: Path | None
    keep: Path | None
    kv_cache_dir: bool
    disk_cache: bool
    plant_leak: bool

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    @property
    def quiet_every(self) -> float:
        """Seconds between two pauses of the traffic, in which what is left over is counted."""
        return min(max(self.seconds / 30, 6), 120)

    @property
    def command_every(self) -> float:
        """Seconds between two commands or faults."""
        return min(max(self.seconds / 200, 0.5), 6)

    @property
    def sample_every(self) -> float:
        return min(max(self.seconds / 600, 0.5), 6)


def parse_options() -> Options:
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--clients", type=int, default=1000, help="that take part, at most at once")
    parser.add_argument("--rate", type=float, default=6, help="requests a second of them all")
    parser.add_argument(
        "--overload-seconds", type=float, help="when all ask as fast as they can (60, or a tenth)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--architecture", default="gemma3", help="of tests/support/tiny_models.py")
    parser.add_argument("--report", type=Path, help="folder for report.md and record.json")
    parser.add_argument("--keep", type=Path, help="folder for the servers' logs")
    parser.add_argument(
        "--kv-cache-dir", action="store_true", help="the cache lies in a folder of bounded size"
    )
    parser.add_argument(
        "--disk-cache", action="store_true", help="a disk of bounded size is behind the cache"
    )
    parser.add_argument(
        "--plant-leak", action="store_true", help="to see it fail: one request keeps its blocks"
    )
    given = vars(parser.parse_args())
    if given["overload_seconds"] is None:
        given["overload_seconds"] = min(60.0, 6 * given["minutes"])
    return Options(**given)
