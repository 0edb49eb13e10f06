"""Versions of the weights, and their names in all hashes: docs/reference/hashing.md has the kinds.

A version has a number, which the cache counts, and perhaps a tag, which a caller gave.
"""

from __future__ import annotations

from prefixcache.config.checked import shown
from prefixcache.exceptions import InvalidRequestError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.types.weight_spans import ShownVersion

_PARAM = "weight_version"
_MAX_TAG_LENGTH = 256
_MAX_TAGS = 4096
_COUNT = "count"


def content_name(digest: str, quantized: str | None = None) -> str:
    """The name of weights with this digest, quantized while they were loaded if so."""
    return _with_quantized(f"blake3:{digest}", quantized)


def tag_name(tag: str | None, quantized: str | None = None) -> str | None:
    """The name of weights that somebody vouches for by a tag."""
    return None if tag is None else _with_quantized(f"tag:{tag}", quantized)


def _with_quantized(name: str, quantized: str | None) -> str:
    return name if quantized is None else f"quantized:{quantized}:{name}"


class WeightVersions:
    """The version of a cache's weights now, and the tags of those before."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._tag: str | None = None
        self._digests: dict[str, str] = {}  # of the last few thousand tags

    @property
    def number(self) -> int:
        """Counts the changes of the weights; no number stands for two sets of weights."""
        return self._cache.core.weight_version

    @property
    def name(self) -> str:
        """What the root of all hashes calls the weights: where it is the same they are the same.

        A digest of their content or the tag of their update; where neither is known how often they
        were changed since something was.
        """
        return self._cache.core.weights_name

    @property
    def shown(self) -> ShownVersion:
        """What callers call the version: its tag, or its number."""
        return self.number if self._tag is None else self._tag

    def check(self, tag: str | None, digest: str | None) -> None:
        """Raises `InvalidRequestError` when the tag is that of weights with another digest."""
        of_tag = self._digests.get(tag, digest) if tag is not None else digest
        if digest is not None and of_tag != digest:
            raise InvalidRequestError(
                f"{_PARAM} {tag!r} is the tag of other weights: their digest is {of_tag}, that of "
                f"the weights given now is {digest}.",
                param=_PARAM,
            )

    def begin(self, name: str | None, tag: str | None = None, digest: str | None = None) -> int:
        """The number of a new version, from which on only what may be stale is hit.

        Without a `name` the weights are called by a count.
        """
        if tag is not None and digest is not None:
            self._digests.pop(tag, None)
            self._digests[tag] = digest
            if len(self._digests) > _MAX_TAGS:
                del self._digests[next(iter(self._digests))]
        number = self._cache.versions.begin(name or self._count_name())
        self._tag = tag
        return number

    def renew(self) -> None:
        """A new version of the same weights, under which nothing computed before is hit."""
        name = self.name if ":" in self.name else self._count_name()
        self._cache.versions.renew(name)
        self._tag = None

    def _count_name(self) -> str | None:
        """The name of weights of which nothing is known but those before and a count of changes.

        None where those have no name but their count.
        """
        before = self.name
        base = before.split(":", 2)[2] if before.startswith(f"{_COUNT}:") else before
        return f"{_COUNT}:{self.number + 1}:{base}" if ":" in base else None


def check_tag(tag: object) -> None:
    """Raises `InvalidRequestError` unless `tag` is None or text that can name weights."""
    if tag is None:
        return
    if not isinstance(tag, str) or not tag.isprintable() or not 0 < len(tag) <= _MAX_TAG_LENGTH:
        raise InvalidRequestError(
            f"{_PARAM} must be 1 to {_MAX_TAG_LENGTH} printable characters, got {shown(tag)}.",
            param=_PARAM,
        )
