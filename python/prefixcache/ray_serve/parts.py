"""What a replica says of a job, read as it comes, so that Ray holds none of it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from prefixcache.exceptions import PrefixCacheError, QueueFullError, SlowReaderError
from prefixcache.ray_serve.job import Failed, Outputs, Part, RoutedJob

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1
_TOO_SLOW = "The answer was read so slowly that its work was cancelled."


class Parts:
    """The parts of one job from one replica; at most `most_unread` outputs wait to be taken."""

    def __init__(self, generate: DeploymentHandle[Any], job: RoutedJob, most_unread: float) -> None:
        self._most_unread = most_unread
        self._num_unread = 0
        self._queue: asyncio.Queue[Part | None] = asyncio.Queue()
        self._response: Any = generate.remote(job)
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def take(self) -> Part | None:
        """The next one; None when the replica has ended."""
        part = await self._queue.get()
        if isinstance(part, Outputs):
            self._num_unread -= len(part.outputs)
        return part

    def close(self) -> None:
        """Ends the work on the job where it goes on."""
        self._reading.cancel()
        self._response.cancel()

    async def _read(self) -> None:
        try:
            async for part in self._response:
                self._put(part)
        except BackPressureError as error:
            self._queue.put_nowait(Failed(_queue_full(error)))
        except (RayError, RayServeException) as error:
            logger.warning("A replica ended with a job: %s.", type(error).__name__)
        except PrefixCacheError as error:
            self._queue.put_nowait(Failed(error))
        finally:
            self._response.cancel()
            self._queue.put_nowait(None)

    def _put(self, part: Part) -> None:
        if isinstance(part, Outputs):
            self._num_unread += len(part.outputs)
        if self._num_unread > self._most_unread:
            raise SlowReaderError(_TOO_SLOW)
        self._queue.put_nowait(part)


def _queue_full(error: BackPressureError) -> QueueFullError:
    return QueueFullError(f"The server is busy: {error.message}", retry_after=_RETRY_SECONDS)
