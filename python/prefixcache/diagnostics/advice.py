"""Which prompts were computed again although the cache had most of them, and what to do about it.

A prompt is compared with the one before it that begins alike. Where it left that one at some text
and went on as that one did, the tokens behind the difference were computed a second time. Misses
at the same place of the same beginning are one finding, with the field that varies.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache.diagnostics.difference import Difference, find_difference, word_start
from prefixcache.diagnostics.history import (
    MissReason,
    PromptHistory,
    RememberedPrompt,
    shared_tokens,
)
from prefixcache.diagnostics.spans import PromptSource, span_at
from prefixcache.types.request import CacheScope
from prefixcache.types.token_ids import TokenIds

Offender = Literal["date", "id", "tool_order", "tools_changed", "billing_header", "chat_template"]

# Tokens at the top of a prompt, where what varies costs the most.
_TOP = 200
# This many tokens in a row that both prompts hold count as the same text.
_GRAM = 8
# Tokens by which prompts before this one may share less than the nearest, and be taken as newer.
_SLACK = 16
_RECENT = 32
_AROUND = 24

_HEADER = re.compile(r"^[\w-]*billing-header:.*$", re.IGNORECASE | re.MULTILINE)
_DATE = re.compile(
    r"\d{1,2}:\d\d|\d{4}-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\b1[5-9]\d{8}(?:\d{3})?\b|"
    r"\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? \d|\d (?:jan|feb|mar|apr|may|"
    r"jun|jul|aug|sep|oct|nov|dec)|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b",
    re.IGNORECASE,
)
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}|(?=\w*\d)[\w-]{8,}|\d{4,}", re.IGNORECASE)

_NAMED: dict[Offender, str] = {
    "date": "a date or time",
    "id": "an id or number",
    "tool_order": "the same tools in another order",
    "tools_changed": "other tools",
    "billing_header": "a provider's billing header",
    "chat_template": "text that the chat template writes",
}
_MOVE = "move it after the stable part, as to the last user message"
_OF_TEXT = (None, "different_text", "tail")
_TO_DO: dict[Offender, str] = {
    "date": f"{_MOVE}, or leave the time out",
    "id": f"{_MOVE}, or send it outside the prompt, as `metadata`",
    "tool_order": "pin the order of tools: sort them by name",
    "tools_changed": "send the same tools each time; `tool_choice` says which may be called",
    "billing_header": "leave it out, or start the server with "
    "--strip-header-pattern '^[a-z-]*billing-header:'",
    "chat_template": "give it a fixed value in `chat_template_kwargs`, or change the template",
}
_NEW = "new: no remembered prompt has these tokens"
_LOST: dict[MissReason, str] = {
    "never_seen": "warm it with POST /prefix_cache/warm before it is needed",
    "evicted": "give the cache more memory, or keep the prefix with `retention`; or warm it again",
    "on_disk": "give the cache more memory or a faster disk: computing it was predicted sooner",
    "cleared": "the cache was reset: warm the prefix after a reset",
    "weights_changed": "the weights were replaced: warm the prefix after an update",
    "different_text": "send the same text first, and what varies behind it",
    "another_salt": "send the same cache_salt for what may be shared",
    "window_lost": "keep more windows: a smaller --prefix-cache-retention-interval",
    "no_state": "give the cache more memory, or keep more states: "
    "--prefix-cache-retention-interval",
    "write_refused": "let the earlier request write: cache_write, or a breakpoint further behind",
    "cache_read_off": "leave out cache_read: false",
    "prompt_logprobs": "leave out prompt_logprobs: they are computed with the prompt",
    "cache_off": "start the server with --enable-prefix-caching",
}


@dataclass(slots=True, kw_only=True)
class Finding:
    """Prompts that left the same beginning at the same place, or lost it for the same reason.

    `tokens_recomputed` sums over `num_requests` what an earlier prompt had too. `position` is the
    token at which the last of them, `request_id` at `last_time`, missed; `difference` is between it
    and the one before, None where the text did not differ.
    """

    reason: MissReason
    num_requests: int = 0
    tokens_recomputed: int = 0
    position: int = 0
    request_id: str = ""
    last_time: float = 0.0
    difference: Difference | None = None
    offender: Offender | None = None
    advice: str = ""

    def __str__(self) -> str:
        """One line."""
        times = "1 request" if self.num_requests == 1 else f"{self.num_requests} requests"
        what = self.difference or f"{self.reason.replace('_', ' ')} from token {self.position}"
        return (
            f"{self.tokens_recomputed} tokens computed again by {times}: {what}{self.named()}; "
            f"{self.advice}"
        )

    def named(self) -> str:
        """What differs, after a colon; empty where it is none of the known causes."""
        if self.offender is None:
            return ""
        at_top = self.position < _TOP and self.offender in ("date", "id")
        return f": {_NAMED[self.offender]}{f' in the first {_TOP} tokens' if at_top else ''}"

    def as_json(self) -> dict[str, Any]:
        """For clients, with the line that describes it."""
        shown = asdict(self)
        shown["difference"] = None if self.difference is None else self.difference.as_json()
        return shown | {"description": str(self)}


@dataclass(slots=True)
class Summary:
    """What prompts cost together, and the findings, the worst first."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    disk_cached_tokens: int = 0
    since: float | None = None
    findings: list[Finding] = field(default_factory=list[Finding])

    @property
    def tokens_recomputed(self) -> int:
        """Of all findings."""
        return sum(finding.tokens_recomputed for finding in self.findings)


def summarize(prompts: Sequence[RememberedPrompt], *, block_size: int) -> Summary:
    """What administrators see of the prompts, given the oldest first. Shows their text.

    Takes time that grows with the prompts' tokens, about a second for ten million.
    """
    findings: dict[object, Finding] = {}
    for miss in _recomputed_all(prompts, block_size):
        key = _key(miss)
        finding = findings.setdefault(key, Finding(reason=miss.reason))
        finding.num_requests += 1
        finding.tokens_recomputed += miss.tokens
        _describe(finding, miss)
    return Summary(
        num_requests=len(prompts),
        prompt_tokens=sum(prompt.prompt_tokens for prompt in prompts),
        cached_tokens=sum(prompt.cached_tokens for prompt in prompts),
        disk_cached_tokens=sum(prompt.disk_cached_tokens for prompt in prompts),
        since=prompts[0].time if prompts else None,
        findings=sorted(findings.values(), key=lambda finding: -finding.tokens_recomputed),
    )


def advice_for(prompt: RememberedPrompt, history: PromptHistory, *, block_size: int) -> str:
    """What would have made more of a prompt hit whose miss is known; empty where nothing would.

    Where an earlier prompt differs by text that can be named, as by a date, that too. What is new
    is said to be so.
    """
    nearest = history.nearest(prompt.token_ids, prompt.scope, before=prompt.arrival)
    miss = None if nearest is None else _recomputed(prompt, nearest[0], block_size)
    if miss is None or miss.tokens < block_size:
        if prompt.miss is None:
            return ""
        return _NEW if prompt.miss.reason == "never_seen" else _LOST.get(prompt.miss.reason, "")
    finding = Finding(reason=miss.reason)
    _describe(finding, miss)
    return f"{finding.named()}: {finding.advice}".removeprefix(": ")


class _Recomputed(NamedTuple):
    """A prompt that computed `tokens` of `earlier` again, from token `position` on."""

    prompt: RememberedPrompt
    earlier: RememberedPrompt
    reason: MissReason
    tokens: int
    position: int
    difference: Difference | None = None
    offender: Offender | None = None


def _recomputed_all(prompts: Iterable[RememberedPrompt], block_size: int) -> Iterator[_Recomputed]:
    seen = _Seen()
    for prompt in prompts:
        earlier = seen.like(prompt)
        miss = None if earlier is None else _recomputed(prompt, earlier, block_size)
        if miss is not None and miss.tokens >= block_size:
            yield miss
        seen.add(prompt)


class _Seen:
    """Prompts before the one that is looked at."""

    def __init__(self) -> None:
        self._history = PromptHistory(2**62)
        self._recent: deque[RememberedPrompt] = deque(maxlen=_RECENT)

    def add(self, prompt: RememberedPrompt) -> None:
        self._history.remember(prompt)
        self._recent.appendleft(prompt)

    def like(self, prompt: RememberedPrompt) -> RememberedPrompt | None:
        """The newest prompt that begins alike for about as long as any.

        Two texts that vary may have their first digits in common with some older one; it is the
        last one that has the most of what follows. One that varies at its first token is compared
        with the last one.
        """
        nearest = self._history.nearest(prompt.token_ids, prompt.scope)
        earlier, shared = nearest or (None, 0)
        begin = prompt.token_ids[: max(0, shared - _SLACK)]
        newer = (newer for newer in self._recent if _client_of(newer) == _client_of(prompt))
        alike = (
            candidate
            for candidate in newer
            if shared_tokens(begin, candidate.token_ids) == len(begin)
        )
        return next(alike, earlier)


def _client_of(prompt: RememberedPrompt) -> tuple[CacheScope, str]:
    return prompt.scope, prompt.api


def _recomputed(
    prompt: RememberedPrompt, earlier: RememberedPrompt, block_size: int
) -> _Recomputed | None:
    shared = shared_tokens(prompt.token_ids, earlier.token_ids)
    reason = None if prompt.miss is None else prompt.miss.reason
    if prompt.cached_tokens + block_size <= shared and reason not in _OF_TEXT:
        tokens = shared - prompt.cached_tokens
        return _Recomputed(prompt, earlier, reason, tokens, prompt.cached_tokens)
    repeated = _repeated(prompt.token_ids[shared:], earlier.token_ids[shared:])
    tokens = min(repeated, prompt.prompt_tokens - prompt.cached_tokens)
    difference = (
        find_difference(
            prompt.token_ids, prompt.source, earlier.token_ids, earlier.source, shows_earlier=True
        )
        if tokens >= block_size
        else None
    )
    if difference is None:
        return None
    offender = _offender(difference, prompt.source, earlier.source)
    return _Recomputed(prompt, earlier, "different_text", tokens, shared, difference, offender)


def _repeated(ids: TokenIds, others: TokenIds) -> int:
    """How many of the tokens the other ones hold too, at least `_GRAM` of them in a row."""
    common = int(np.isin(_grams(ids), _grams(others)).sum())
    return min(len(ids), len(others), common + _GRAM - 1) if common else 0


def _grams(ids: TokenIds) -> npt.NDArray[np.uint64]:
    """A hash of the tokens that begin at each position."""
    count = max(0, len(ids) - _GRAM + 1)
    wide = ids.astype(np.uint64)
    grams = np.zeros(count, dtype=np.uint64)
    for place in range(_GRAM):
        grams = grams * np.uint64(0x9E3779B97F4A7C15) + wide[place : place + count]
    return grams


def _key(miss: _Recomputed) -> object:
    """The same for misses at the same position after the same prefix."""
    difference, source = miss.difference, miss.prompt.source
    if difference is None or difference.character is None or source is None:
        return miss.reason, miss.prompt.scope, miss.position
    if miss.offender in ("tool_order", "tools_changed"):
        names = () if miss.offender == "tools_changed" else sorted(source.tool_names())
        return miss.prompt.scope, miss.offender, *names
    start = word_start(source.text, difference.character)
    return miss.prompt.scope, difference.message, difference.field, hash(source.text[:start])


def _describe(finding: Finding, miss: _Recomputed) -> None:
    """Describes the newest miss."""
    finding.position, finding.difference = miss.position, miss.difference
    finding.request_id, finding.last_time = miss.prompt.request_id, miss.prompt.time
    finding.offender = miss.offender
    finding.advice = _advice(miss)


def _advice(miss: _Recomputed) -> str:
    if miss.offender is not None:
        return _TO_DO[miss.offender]
    if miss.difference is None:
        return _LOST.get(miss.reason, "")
    if miss.difference.message:
        return "leave what was said before as it was, and add behind it"
    return _MOVE


def _offender(
    difference: Difference, source: PromptSource | None, other: PromptSource | None
) -> Offender | None:
    """The known cause of a difference."""
    character = difference.character
    if character is None or source is None or other is None:
        return None
    names, others = source.tool_names(), other.tool_names()
    span = span_at(source.spans(), character)
    within_message = span is not None and span.message is not None and character < span.end
    if names != others and not within_message:
        return "tool_order" if sorted(names) == sorted(others) else "tools_changed"
    texts = (source.text, other.text)
    if all(_HEADER.search(_line(text, character)) for text in texts):
        return "billing_header"
    around = [_around(text, character) for text in texts]
    if all(map(_DATE.search, around)):
        return "date"
    if difference.field == "template":
        return "chat_template"
    words = (difference.text or "", difference.earlier_text or "")
    return "id" if all(map(_ID.search, words)) else None


def _line(text: str, character: int) -> str:
    begin = text.rfind("\n", 0, character) + 1
    return text[begin : begin + 500]


def _around(text: str, character: int) -> str:
    return text[max(0, character - _AROUND) : character + _AROUND]
