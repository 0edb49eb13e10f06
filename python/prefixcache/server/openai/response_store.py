"""Responses that later requests go on from: the last ones of every key, in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, the items that it was asked, and the conversation so far, without instructions.

    `choices` are those about the cache that the next request starts from. All as JSON, which takes
    the memory that is counted: objects would take ten times as much. `messages` has arrays of them
    in order; those of earlier turns are shared between responses.
    """

    body: bytes
    items: bytes
    messages: tuple[bytes, ...]
    choices: bytes

    @property
    def size(self) -> int:
        """In bytes, with what is shared."""
        return sum(map(len, (self.body, self.items, self.choices, *self.messages)))


class ResponseStore:
    """At most `MAX_RESPONSES` of a key and `MAX_BYTES` of them; the longest unused go first.

    A key finds its own alone; without keys all clients are one. Safe to share between threads.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._of_key: dict[str | None, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[str | None, int] = {}

    def put(self, key: str | None, name: str, response: StoredResponse) -> None:
        """Keeps a response; one that is larger than all may be together is not kept."""
        if response.size > self._max_bytes:
            return
        with self._lock:
            kept = self._of_key.setdefault(key, OrderedDict())
            kept[name] = response
            self._sizes[key] = self._sizes.get(key, 0) + response.size
            while len(kept) > self._max_responses or self._sizes[key] > self._max_bytes:
                self._drop(key, next(iter(kept)))

    def get(self, key: str | None, name: str) -> StoredResponse | None:
        """The response of that key, which counts as used."""
        with self._lock:
            kept = self._of_key.get(key, OrderedDict())
            if name in kept:
                kept.move_to_end(name)
            return kept.get(name)

    def delete(self, key: str | None, name: str) -> bool:
        """Forgets the response; False where there is none."""
        with self._lock:
            is_kept = name in self._of_key.get(key, ())
            if is_kept:
                self._drop(key, name)
            return is_kept

    def _drop(self, key: str | None, name: str) -> None:
        self._sizes[key] -= self._of_key[key].pop(name).size
