"""The index of drafts as Python sees it; `rust/prefixcache-serving` tests what it finds."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache._core import DraftIndex, DraftStream

ANSWERED = list(range(1000, 1100))


@pytest.fixture
def index() -> DraftIndex:
    return DraftIndex(1 << 12)


def said(index: DraftIndex, tokens: list[int], scope: bytes = b"a", shares: bool = True):
    stream = index.stream(scope, shares)
    stream.append(tokens)
    return stream


def test_what_another_stream_said_is_drafted(index: DraftIndex) -> None:
    said(index, ANSWERED).close()
    stream = said(index, [7, 8])
    assert stream.draft(4) == ([], 0, "prompt")
    stream.append(np.array(ANSWERED[:10], np.int32))
    assert stream.draft(4) == (ANSWERED[10:14], 10, "cache")
    stream.append(ANSWERED[10:12])
    stream.append(ANSWERED[:3])
    assert stream.draft(4) == (ANSWERED[3:7], 3, "prompt")


@pytest.mark.parametrize(("scope", "shares"), [(b"b", True), (b"", True), (b"a", False)])
def test_nothing_crosses_scopes(index: DraftIndex, scope: bytes, shares: bool) -> None:
    said(index, ANSWERED)
    assert said(index, ANSWERED[:50], scope, shares).draft(8) == ([], 0, "prompt")
    assert said(index, ANSWERED[:50]).draft(1) == ([ANSWERED[50]], 50, "cache")


def test_a_closed_stream_says_so(index: DraftIndex) -> None:
    stream = said(index, ANSWERED, shares=False)
    assert index.num_tokens == len(ANSWERED)
    stream.close()
    stream.close()
    assert index.num_tokens == 0
    for call in (lambda: stream.append([1]), lambda: stream.draft(1)):
        with pytest.raises(RuntimeError, match="the stream is closed"):
            call()


@pytest.mark.parametrize("max_tokens", [0, 63, 2**24 + 1, 2**64, -1])
def test_sizes(max_tokens: int) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        DraftIndex(max_tokens)


def test_memory_is_fixed_at_the_start(index: DraftIndex) -> None:
    num_bytes = index.num_bytes
    assert num_bytes <= 17 * (1 << 12)
    stream: DraftStream = said(index, ANSWERED)
    for start in range(0, 1 << 15, 1 << 10):
        stream.append(np.arange(start, start + (1 << 10)))
    assert index.num_bytes == num_bytes
    assert (1 << 12) - 64 < index.num_tokens <= 1 << 12
