"""The memory of all bodies, until they are requests of the engine, and of log probabilities."""

from __future__ import annotations

from http import HTTPStatus

from prefixcache.server.http.errors import ApiError

# Short ones on 2,048 connections, as many as may be open by default, add a quarter to `most`.
_SHORT_SHARE = 2**13


class ByteBudget:
    """At most `most` bytes of bodies, and of log probabilities that answers keep; `size` are held.

    Where they are more, the largest of what still grows is given up: whoever sends long bodies, or
    sends them slowly, keeps nobody else from sending a short one. What is short always has room,
    since long ones that have come in full wait for threads. One event loop uses it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.short = most // _SHORT_SHARE
        self.size = 0
        self.growing: dict[_Share, None] = {}


class _Share:
    """Bytes of one request."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._size = 0
        self.is_given_up = False

    def __len__(self) -> int:
        return self._size

    def grow(self, size: int) -> bool:
        """Counts that many bytes more; False when the server has no room for them."""
        budget = self._budget
        self._size += size
        budget.size += size
        budget.growing[self] = None
        while budget.size > budget.most and budget.growing:
            largest = max(budget.growing, key=len)
            if len(largest) <= budget.short:
                break
            largest.release()
            largest.is_given_up = True
        return not self.is_given_up

    def complete(self) -> None:
        """All has come: it is no longer given up for others."""
        self._budget.growing.pop(self, None)

    def release(self) -> None:
        """Nothing is kept any more. Idempotent."""
        self.complete()
        self._budget.size -= self._size
        self._size = 0


class Body(_Share):
    """One request's body, as far as it has come and is kept."""

    def __init__(self, budget: ByteBudget) -> None:
        super().__init__(budget)
        self._kept = bytearray()

    def add(self, part: bytes) -> None:
        """Keeps a part. Raises `ApiError` (503) when the server has no room for the body."""
        self._kept += part
        self._count(len(part))

    def add_read(self, size: int) -> None:
        """Counts as a part of the body what is read with it. Raises `ApiError` as `add`."""
        self._count(size)
        self.complete()

    def take(self) -> bytes:
        """The whole body, which counts until it is released."""
        self.complete()
        body, self._kept = bytes(self._kept), bytearray()
        return body

    def release(self) -> None:
        """Nothing of the body is kept any more. Idempotent."""
        self._kept = bytearray()
        super().release()

    def _count(self, size: int) -> None:
        if not self.grow(size):
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "The server has no memory for this body now. Send it again later.",
                code="bodies_full",
                retry_after=1,
            )


class KeptLogprobs(_Share):
    """Log probabilities, or embeddings, that one answer keeps until all of it is written."""

    def add(self, size: int) -> None:
        """Counts that many bytes more, or less.

        Raises `ApiError`: 400 where the answer alone is too much, 503 where it is with others.
        """
        most = self._budget.most
        if len(self) + size > most:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"The numbers of this answer take more than {most} bytes of memory: ask "
                "for fewer of them or for fewer answers at once, or stream the answer.",
                code="logprobs_too_large",
            )
        if size and not self.grow(size):
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "The server has no memory for the log probabilities of this answer now. "
                "Send it again later, ask for fewer, or stream the answer.",
                code="logprobs_full",
                retry_after=1,
            )
