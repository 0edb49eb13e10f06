"""How many threads the CPU's kernels compute with."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")

logger = logging.getLogger(__name__)


def num_threads(asked: int | None) -> int:
    """What `--cpu-threads` asks for, else the default. More than can run at once is warned of."""
    if asked is None:
        return default_threads()
    most = min(len(_processors()), _quota())
    if asked > most:
        logger.warning(
            "--cpu-threads %d: the process may use %d processors (affinity and cgroup), and a step "
            "waits for threads that do not run.",
            asked,
            most,
        )
    return asked


def default_threads() -> int:
    """`OMP_NUM_THREADS` where it is set, else the cores that this process may use.

    Hardware threads of one core count once. The lowest limit of the process's cgroup and of those
    that it is in (`cpu.max`, or the quota of version 1) is rounded up to whole cores.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    cores = {_core(processor) for processor in _processors()}
    return max(1, min(len(cores), _quota()))


def _processors() -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)


def _core(processor: int) -> str:
    siblings = _TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list"
    return _read(siblings) or str(processor)


def _quota() -> int:
    folders = {_CGROUP, _CGROUP / "cpu"}
    for line in _read(_OWN_CGROUPS).splitlines():
        _, kinds, path = line.split(":", 2)
        top = _CGROUP / "cpu" if "cpu" in kinds.split(",") else _CGROUP
        own = top / path.lstrip("/")
        folders |= {own, *own.parents}
    return min(map(_limit, folders))


def _limit(folder: Path) -> int:
    """Whole processors that a cgroup may use, in either version; all where it has no limit."""
    limit = _read(folder / "cpu.max").split()
    if not limit:
        limit = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if len(limit) != 2 or not all(number.isdecimal() for number in limit):
        return os.cpu_count() or 1
    quota, period = map(int, limit)
    return -(-quota // period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
