"""The memory of all bodies together, until they are requests of the engine."""

from __future__ import annotations

from http import HTTPStatus

from prefixcache.server.errors import ApiError


class BodyBudget:
    """At most `most` bytes of bodies.

    Where they are more, the largest of those that are still coming is given up: whoever sends long
    bodies, or sends them slowly, keeps nobody else from sending a short one. One event loop uses
    it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._coming: dict[Body, None] = {}
        self.size = 0

    def open(self) -> Body:
        """The body of a request that begins."""
        return Body(self)

    def grow(self, body: Body, size: int) -> None:
        """A part of a body has come."""
        self._coming[body] = None
        self.size += size
        while self.size > self._most and self._coming:
            max(self._coming, key=len).give_up()

    def shrink(self, body: Body, size: int) -> None:
        """A body no longer comes, and holds so much less."""
        self._coming.pop(body, None)
        self.size -= size

    def complete(self, body: Body) -> None:
        """A body has come in full: it is no longer given up for others."""
        self._coming.pop(body, None)


class Body:
    """One request's body, as far as it has come and is kept."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._kept = bytearray()
        self._size = 0
        self._is_given_up = False

    def __len__(self) -> int:
        return self._size

    def add(self, part: bytes) -> None:
        """Keeps a part. Raises `ApiError` (503) when the server has no room for the body."""
        self._size += len(part)
        self._kept += part
        self._budget.grow(self, len(part))
        if self._is_given_up:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "The server has no memory for this body beside those of others. Send it again "
                "later.",
                code="bodies_full",
                retry_after=1,
            )

    def take(self) -> bytes:
        """The whole body, which counts until it is released."""
        self._budget.complete(self)
        whole, self._kept = bytes(self._kept), bytearray()
        return whole

    def give_up(self) -> None:
        """Keeps nothing of it, now or later."""
        self.release()
        self._is_given_up = True

    def release(self) -> None:
        """Nothing of the body is kept any more. Idempotent."""
        self._kept = bytearray()
        self._budget.shrink(self, self._size)
        self._size = 0
