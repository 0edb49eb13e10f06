"""What Ray reads of the environment when it is imported. Nothing here imports Ray."""

from __future__ import annotations

import os


def prepare_environment(*, on_this_machine_alone: bool) -> None:
    """Lets Ray report to nobody, and a cluster of this machine alone listen on loopback.

    What the operator set stays.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if on_this_machine_alone:
        # Ray takes the loopback address as the node's with this one variable, on Linux too.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    else:
        # One try takes a minute where nobody answers; Ray's 20 look like a command that hangs.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
