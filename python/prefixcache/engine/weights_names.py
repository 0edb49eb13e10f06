"""The weight fingerprint in the root of all hashes: docs/reference/hashing.md has its kinds."""

from __future__ import annotations

from prefixcache.config.checked import shown
from prefixcache.exceptions import InvalidRequestError

_PARAM = "weight_version"
_MAX_TAG_LENGTH = 256
_MAX_TAGS = 4096
_COUNT = "count"


def content_name(digest: str, quantized: str | None = None) -> str:
    """The name of weights with this digest, quantized while they were loaded if so."""
    return _with_quantized(f"blake3:{digest}", quantized)


def tag_name(tag: str, quantized: str | None = None) -> str:
    """The name of weights that somebody vouches for by a tag."""
    return _with_quantized(f"tag:{tag}", quantized)


def count_name(before: str, version: int) -> str | None:
    """The name of weights of which nothing is known but those `before` and a count of changes.

    None where those have no name but their count.
    """
    base = before.split(":", 2)[2] if before.startswith(f"{_COUNT}:") else before
    return own_name(base) and f"{_COUNT}:{version}:{base}"


def own_name(name: str) -> str | None:
    """The name, None where it is the core's own count."""
    return name if ":" in name else None


def _with_quantized(name: str, quantized: str | None) -> str:
    return name if quantized is None else f"quantized:{quantized}:{name}"


class Tags:
    """Which content was called by which tag, as far as digests are known: the last few thousand."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def check(self, tag: str, digest: str) -> None:
        """Raises `InvalidRequestError` when the tag is that of other weights."""
        known = self._digests.get(tag, digest)
        if known != digest:
            raise InvalidRequestError(
                f"{_PARAM} {tag!r} is the tag of other weights: their digest is {known}, that of "
                f"the weights given now is {digest}.",
                param=_PARAM,
            )

    def remember(self, tag: str, digest: str) -> None:
        """From now on the tag is that of weights with this digest."""
        self._digests.pop(tag, None)
        self._digests[tag] = digest
        if len(self._digests) > _MAX_TAGS:
            del self._digests[next(iter(self._digests))]


def check_tag(tag: object) -> None:
    """Raises `InvalidRequestError` unless `tag` is None or text that can name weights."""
    if tag is None:
        return
    if not isinstance(tag, str) or not tag.isprintable() or not 0 < len(tag) <= _MAX_TAG_LENGTH:
        raise InvalidRequestError(
            f"{_PARAM} must be 1 to {_MAX_TAG_LENGTH} printable characters, got {shown(tag)}.",
            param=_PARAM,
        )
