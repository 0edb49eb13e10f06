"""Asks all replicas at once, some of which may not answer."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)


async def ask_all(
    replicas: DeploymentHandle[Any], method: str, *args: Any, seconds: float
) -> list[Any]:
    """What the replicas answer that do so within `seconds`; none where none runs.

    One that dies, hangs or fails is left out, and logged.
    """
    asked = replicas.broadcast(method, *args)
    # Ray's way for event loops loses all answers where one is late.
    wait = partial(asked.results, timeout_s=seconds, return_exceptions=True)
    try:
        found = await asyncio.to_thread(wait)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("No replica was asked for %s: %s.", method, type(error).__name__)
        return []
    for one in found:
        if isinstance(one, BaseException):
            logger.warning("A replica did not answer %s: %s.", method, type(one).__name__)
    return [one for one in found if not isinstance(one, BaseException)]
