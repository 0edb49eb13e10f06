"""What the caching controls of OpenAI's and Anthropic's APIs mean here.

Without any of them everything is cached. A *breakpoint* marks the end of a content block. With
breakpoints alone, as Anthropic's and OpenAI's explicit mode have them, a request reads as ever and
writes only up to the last one, so nothing without one. A TTL is a retention hint of priority 60:
a soft promise within the budget of the key or salt, kept for that long after the last use. None of
it changes an answer.

The way of a breakpoint: `openai_controls` or `anthropic_controls` check what the body says, and
`PromptEncoder.encode_chat` makes `PromptCaching` of it, which `JobMaker.job` takes:
`breakpoint_ends` finds where the prompt's text shows the block's end, the tokenizer how many tokens
lie before it, and `prompt_caching` makes ranges of tokens of these.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from prefixcache.config.checked import is_mapping, shown
from prefixcache.exceptions import InvalidRequestError, wrong
from prefixcache.server.jobs.sampling_fields import PromptCacheOptions, ResponseCacheOptions
from prefixcache.types.retention_range import RetentionRange, clipped

_SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 12 * 3600, "24h": 24 * 3600}
_MAX_BREAKPOINTS = 4
_BREAKPOINT = "prompt_cache_breakpoint"
# No white space: templates trim it. Text that no client sends where a block ends.
_CHANGE = "\x02another block\x02"

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Place:
    """A content block: a tool, a message, or one part of a message's content, by its indices."""

    kind: Literal["tools", "messages"]
    index: int
    part: int | None = None


class Marked(NamedTuple):
    """A block, and the control found on it; `field` names the control in errors."""

    place: Place
    field: str
    value: object


class Breakpoint(NamedTuple):
    """A block up to whose end the prompt is worth keeping for `ttl_s` seconds."""

    place: Place
    ttl_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingControls:
    """What a body asks of the cache, in the order of its content.

    `explicit` writes up to the last breakpoint alone. `ttl_s` seconds hold for all that is written,
    the answer included; None promises nothing. `earlier` are the hints of the prompt that this one
    goes on from: they hold where none of the others does, as far as they lie in this one.
    """

    breakpoints: tuple[Breakpoint, ...] = ()
    explicit: bool = False
    ttl_s: int | None = None
    earlier: tuple[RetentionRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCaching:
    """`CachingControls` in tokens of one prompt; see `CacheOptions` for both fields."""

    retention: tuple[RetentionRange, ...] = ()
    write_upto: int | None = None


def openai_controls(
    marked: Iterable[Marked],
    options: PromptCacheOptions | ResponseCacheOptions | None = None,
    retention: str | None = None,
) -> CachingControls:
    """The meaning of `prompt_cache_breakpoint`, `prompt_cache_options`, `prompt_cache_retention`.

    `marked` are the breakpoints of the content. Of many the latest four count, in implicit mode the
    latest three. Raises `InvalidRequestError` for a breakpoint that is none, and for options next
    to `retention`, which says the same.
    """
    if options is not None and retention is not None:
        raise wrong("prompt_cache_retention", "excludes prompt_cache_options: give one, not both")
    default = (options and options.ttl) or "30m"
    breakpoints = [
        Breakpoint(place, _ttl_seconds(value, field, ("mode", "explicit"), ("30m", "12h"), default))
        for place, field, value in marked
    ]
    explicit = options is not None and options.mode == "explicit"
    most = _MAX_BREAKPOINTS if explicit else _MAX_BREAKPOINTS - 1
    implicit = None if options is None or explicit else default
    kept = retention if retention == "24h" else implicit
    return CachingControls(
        breakpoints=tuple(breakpoints[-most:]),
        explicit=explicit,
        ttl_s=None if kept is None else _SECONDS[kept],
    )


def anthropic_controls(
    marked: Iterable[Marked], *, automatic: object = None, last_block: Place | None = None
) -> CachingControls:
    """The meaning of `cache_control` on blocks, in the order tools, system, messages.

    `automatic` is the one at the top level, which marks `last_block`. Raises `InvalidRequestError`
    for one that is not ephemeral for 5m or 1h, for more than four, and for a longer TTL behind a
    shorter one.
    """
    marks = list(marked)
    if automatic is not None and last_block is not None:
        marks.append(Marked(last_block, "cache_control", automatic))
    if len(marks) > _MAX_BREAKPOINTS:
        raise InvalidRequestError(
            f"At most {_MAX_BREAKPOINTS} blocks may have cache_control, found {len(marks)}.",
            param=marks[_MAX_BREAKPOINTS].field,
        )
    breakpoints = [
        Breakpoint(place, _ttl_seconds(value, field, ("type", "ephemeral"), ("5m", "1h"), "5m"))
        for place, field, value in marks
    ]
    for (before, after), mark in zip(itertools.pairwise(breakpoints), marks[1:], strict=True):
        if after.ttl_s > before.ttl_s:
            raise wrong(
                f"{mark.field}.ttl",
                "is longer than that of a block before it: longer TTLs come "
                "first, in the order tools, system, messages",
            )
    return CachingControls(breakpoints=tuple(breakpoints), explicit=bool(breakpoints))


def marked_parts(contents: Iterable[object]) -> Iterator[Marked]:
    """The parts with a breakpoint, in order, of the contents of a chat's messages."""
    for index, content in enumerate(contents):
        parts = cast("list[object]", content) if isinstance(content, list) else []
        for part, value in enumerate(parts):
            fields: Mapping[str, object] = value if is_mapping(value) else {}
            if (control := fields.get(_BREAKPOINT)) is not None:
                field = f"messages[{index}].content[{part}].{_BREAKPOINT}"
                yield Marked(Place("messages", index, part), field, control)


def breakpoint_ends(
    text: str, places: Iterable[Place], rendered_with: Callable[[Place], str]
) -> list[int]:
    """How many characters of the prompt's `text` lie before the end of each block.

    `rendered_with` makes the prompt again, of `changed_behind` that block. It ends where the two
    differ, under any template, wherever that shows the block; 0 where it does not show it.
    """
    return [_end(text, rendered_with(place)) for place in places]


def changed_behind(
    place: Place, messages: Messages, tools: Tools = ()
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Copies of messages and tools, as a template takes them, with more text behind the block."""
    messages, tools = list(messages), list(tools)
    if place.kind == "tools":
        function: dict[str, Any] = {"name": _CHANGE, "description": _CHANGE, "parameters": {}}
        tools.insert(place.index + 1, {"type": "function", "function": function})
    else:
        message = messages[place.index]
        messages[place.index] = {**message, "content": _extended(message["content"], place.part)}
    return messages, tools


def prompt_caching(
    controls: CachingControls, positions: Sequence[int], num_tokens: int = 0
) -> PromptCaching:
    """The controls in tokens of a prompt that has `num_tokens`.

    `positions` are the tokens before the ends of its breakpoints.
    What lies before several breakpoints is kept for the longest of their TTLs: none of them is of
    use without it.
    """
    ends = [
        (position, mark.ttl_s)
        for position, mark in zip(positions, controls.breakpoints, strict=True)
        if position
    ]
    written = max((position for position, _ in ends), default=0)
    ranges = tuple(_ranges(sorted(ends), controls.ttl_s))
    return PromptCaching(
        retention=ranges or clipped(controls.earlier, num_tokens),
        write_upto=written if controls.explicit else None,
    )


def written_by_ttl(
    retention: Iterable[RetentionRange], num_cached: int, num_written: int
) -> dict[float | None, int]:
    """The tokens that were written behind `num_cached` hits, by the seconds they are kept for."""
    begin, end = num_cached, num_cached + num_written
    by_ttl: dict[float | None, int] = {}
    for hint in retention:
        within = min(end, end if hint.end is None else hint.end) - max(begin, hint.start)
        if within > 0:
            by_ttl[hint.ttl_s] = by_ttl.get(hint.ttl_s, 0) + within
    rest = num_written - sum(by_ttl.values())
    return {**by_ttl, None: rest + by_ttl.get(None, 0)} if rest else by_ttl


def _ranges(ends: Sequence[tuple[int, int]], rest: int | None) -> Iterator[RetentionRange]:
    """Ranges up to the ends in turn; `rest` are the seconds for what follows, if any."""
    start = 0
    for place, (end, _) in enumerate(ends):
        later = [ttl_s for _, ttl_s in ends[place:]]
        ttl_s = max(later if rest is None else [*later, rest])
        if end > start:
            yield RetentionRange(start, end, ttl_s=ttl_s)
            start = end
    if rest is not None:
        yield RetentionRange(start, ttl_s=rest)


def _ttl_seconds(
    value: object, field: str, kind: tuple[str, str], ttls: Sequence[str], default: str
) -> int:
    """The seconds of a control that must be an object with `kind`, and may have a `ttl`."""
    key, word = kind
    if not isinstance(value, Mapping):
        raise wrong(field, f"must be an object, got {shown(value)}")
    given = cast("Mapping[str, object]", value)
    if given.get(key) != word:
        raise wrong(f"{field}.{key}", f"must be {word!r}, got {shown(given.get(key))}")
    ttl = given.get("ttl")
    if ttl is None:
        return _SECONDS[default]
    if not isinstance(ttl, str) or ttl not in ttls:
        raise wrong(f"{field}.ttl", f"must be {' or '.join(map(repr, ttls))}, got {shown(ttl)}")
    return _SECONDS[ttl]


def _extended(content: Any, part: int | None) -> Any:
    """The content with more text in one of its parts, or behind all of it."""
    if isinstance(content, str):
        return content + _CHANGE
    if content is None:
        return _CHANGE
    at = len(content) - 1 if part is None else part
    changed = {**content[at], "text": content[at]["text"] + _CHANGE}
    return [*content[:at], changed, *content[at + 1 :]]


def _end(text: str, other: str) -> int:
    """The length of the beginning that two texts share; 0 where they are the same."""
    if text == other:
        return 0
    shortest = min(len(text), len(other))
    return bisect.bisect_left(
        range(1, shortest + 1), True, key=lambda end: text[:end] != other[:end]
    )
