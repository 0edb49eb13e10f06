"""How many threads the CPU's kernels compute with."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def default_threads() -> int:
    """`OMP_NUM_THREADS` where it is set, else the cores that this process may use.

    Hardware threads of one core count once. A limit of the cgroup (`cpu.max`, or the quota of
    version 1) is rounded up to whole cores.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return max(1, min(_cores(), _quota()))


def _cores() -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_core(processor) for processor in os.sched_getaffinity(0)})


def _core(processor: int) -> str:
    siblings = _TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list"
    return _read(siblings) or str(processor)


def _quota() -> int:
    limit = _read(_CGROUP / "cpu.max").split()
    if not limit:
        limit = [_read(_CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if len(limit) != 2 or not all(number.isdecimal() for number in limit):
        return os.cpu_count() or 1
    quota, period = map(int, limit)
    return -(-quota // period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
