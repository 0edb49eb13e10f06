"""A `Cpu` where the system has no more threads to give."""

from __future__ import annotations

import subprocess
import sys

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
        [sys.executable, "-c", TOO_MANY], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    told, threads = done.stdout.splitlines()
    assert told.startswith("the system does not give 1024 threads; ask for fewer: ")
    assert threads == "2"
    assert "panicked" not in done.stderr
