"""What the router needs of Ray Serve that Ray keeps private: no other file imports such names."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.serve.request_router import PendingRequest

from prefixcache.exceptions import ConfigError

# Versions of Ray with which tests/ray_serve has passed.
TRIED = ("2.60.0",)

logger = logging.getLogger(__name__)

try:
    from ray.serve._private.common import ReplicaID, RequestMetadata
    from ray.serve._private.utils import generate_request_id
except ImportError as error:
    raise ConfigError(
        f"Ray {ray.__version__} keeps its internals elsewhere ({error}): install ray=={TRIED[-1]}."
    ) from error

__all__ = ["ReplicaID", "direct_call", "tell_untried"]


def tell_untried() -> None:
    """Warns where the installed Ray is none of those that were tried."""
    if ray.__version__ not in TRIED:
        logger.warning(
            "Ray %s was not tried with this router, which uses Ray's internals; tried: %s.",
            ray.__version__,
            ", ".join(TRIED),
        )


def direct_call(method: str, *args: Any) -> PendingRequest:
    """A call of a replica's method that goes to that very replica and is not routed."""
    name = generate_request_id()
    call = PendingRequest(
        args=[*args],
        kwargs={},
        metadata=RequestMetadata(request_id=name, internal_request_id=name, call_method=method),
    )
    call.resolved = True
    return call
