"""How many threads the CPU's kernels have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from prefixcache.runner import threads

TOO_MANY = """
import resource

from prefixcache._core import Cpu, RowOps

def size():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()

Cpu(2)
# A thread's stack takes 2 MiB of addresses: there is room for a few dozen.
resource.setrlimit(resource.RLIMIT_AS, (size() + (64 << 20), -1))
try:
    Cpu(1024)
except RuntimeError as error:
    print(error)
print(Cpu(2).threads)
"""


def test_more_threads_than_the_system_gives() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOO_MANY], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    warning, threads = done.stdout.splitlines()
    assert warning.startswith("the system does not give 1024 threads; ask for fewer: ")
    assert threads == "2"
    assert "panicked" not in done.stderr


def machine(folder: Path, cores: list[str], limit: dict[str, str]) -> None:
    """Writes what Linux says of processors, one string of siblings each, and of a cgroup."""
    for number, siblings in enumerate(cores):
        (folder / f"cpu{number}/topology").mkdir(parents=True)
        (folder / f"cpu{number}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    (folder / "cpu").mkdir()
    for name, text in limit.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("cores", "limit", "expected"),
    [
        (["0", "1", "2", "3"], {}, 4),
        (["0,2", "1,3", "0,2", "1,3"], {}, 2),
        (["0", "1", "2", "3"], {"cpu.max": "max 100000"}, 4),
        (["0", "1", "2", "3"], {"cpu.max": "250000 100000"}, 3),
        (["0", "1", "2", "3"], {"cpu.max": "5000 100000"}, 1),
        (["0", "1"], {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 2),
        (["0", "1"], {"cpu/cpu.cfs_quota_us": "70000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        # Of a service, and of the slice that it is in.
        (["0", "1", "2"], {"own": "0::/a/b", "a/b/cpu.max": "200000 100000"}, 2),
        (["0", "1", "2"], {"own": "0::/a/b", "a/cpu.max": "9 9", "a/b/cpu.max": "max 9"}, 1),
        (["0", "1", "2"], {"own": "9:name=systemd:/a\n0::/b", "b/cpu.max": "2 1"}, 2),
        (
            ["0", "1", "2"],
            {
                "own": "4:cpuset:/a\n3:cpu,cpuacct:/b",
                "cpu/b/cpu.cfs_quota_us": "150000",
                "cpu/b/cpu.cfs_period_us": "100000",
            },
            2,
        ),
    ],
)
def test_threads_are_the_cores_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cores: list[str],
    limit: dict[str, str],
    expected: int,
) -> None:
    machine(tmp_path, cores, limit)
    monkeypatch.setattr(threads, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(threads, "_CGROUP", tmp_path)
    monkeypatch.setattr(threads, "_OWN_CGROUPS", tmp_path / "own")
    processors = set(range(len(cores)))
    monkeypatch.setattr(threads.os, "sched_getaffinity", mock.Mock(return_value=processors))
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads.default_threads() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads.default_threads() == 7


def test_more_threads_than_may_run_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine(tmp_path, ["0", "1"], {"cpu.max": "200000 100000"})
    monkeypatch.setattr(threads, "_CGROUP", tmp_path)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(threads.os, "sched_getaffinity", mock.Mock(return_value={0, 1, 2, 3}))
    assert (threads.num_threads(2), caplog.messages) == (2, [])
    assert threads.num_threads(3) == 3
    assert caplog.messages[0].startswith("--cpu-threads 3: the process may use 2 processors")
