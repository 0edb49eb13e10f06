"""A request on its way through the engine, and what comes back of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from prefixcache.config.checked import is_count, shown
from prefixcache.config.engine_parts.scheduler_config import HitTiers
from prefixcache.exceptions import wrong
from prefixcache.types.modes import InFlightMode
from prefixcache.types.retention_range import RetentionRange, check_ranges, check_within
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenIds, as_token_ids
from prefixcache.types.weight_spans import ShownVersion

if TYPE_CHECKING:
    from prefixcache.core import BlockHashes

FinishReason = Literal["stop", "length", "abort", "error", "cache_threshold"]
RoleSpan = tuple[str, int, int]
"""A role, and the tokens of a prompt from the first number to before the second."""

_MAX_GROUP_ID = 256

ErrorCode = Literal["insufficient_kv_cache", "grammar_limit"]


def _check_hit_threshold(value: object) -> None:
    """Raises `InvalidRequestError` unless `value` is a number from 0 to 1; a boolean is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise wrong("cache_hit_threshold", f"must be a number from 0.0 to 1.0, got {value!r}")


def _check_salt(value: str) -> None:
    """Refuses lone surrogates too: block hashes are made of the salt's UTF-8 bytes."""
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise wrong("cache_salt", "must be text that UTF-8 can hold") from None


def _check_group(group_id: object, size: object) -> None:
    if group_id is None:
        if size is not None:
            raise wrong("group_size", "needs a group_id")
        return
    name = group_id if isinstance(group_id, str) else ""
    if not (0 < len(name) <= _MAX_GROUP_ID and name.isprintable()):
        raise wrong(
            "group_id",
            f"must be 1 to {_MAX_GROUP_ID} printable characters, got {shown(group_id)}",
        )
    if size is not None and not is_count(size, 1):
        raise wrong("group_size", f"must be a number of requests, 1 or more, got {shown(size)}")


class CacheScope(NamedTuple):
    """Whose requests may learn of each other's prompts: those of one API key under one salt.

    `client` is the key's name, None without keys. Blocks are shared under the same `salt` alone, of
    which the key's name is a part: without a salt clients share blocks, and nothing else.
    """

    client: str | None = None
    salt: str | None = None

    @property
    def owner(self) -> str | None:
        """Whose budget retention hints count against; None leaves it to the salt."""
        return f"key:{self.client}" if self.salt is None and self.client is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How one request uses the prefix cache.

    Requests share blocks only under the same `salt`. `read` False skips hits, `write` False
    publishes nothing. A request whose share of cached tokens is below `hit_threshold` ends where it
    would start, with `finish_reason` "cache_threshold"; None takes the engine's own threshold, and
    no threshold ends a request with `max_tokens` 0. `hit_tiers` says where cached tokens have to
    lie for that; None takes the engine's own choice.

    `retention` says which tokens are worth keeping (`retention_range.py`), within the budget of
    `owner`: without one that of the salt, or of all who have none. Only full blocks of the first
    `write_upto` tokens are published; None sets no limit.

    Requests of one `group_id` start one after the other, so that a prompt which they share is
    computed once, and the cache keeps their prompts, within a budget of their own, until as many
    as `group_size` have ended, or until five minutes after the last use. Choices of one prompt are
    such a group by themselves.

    `max_weight_staleness` is how many updates of the weights ago hits may have been computed: 0
    takes those of the current weights alone, -1 all, None as many as the engine allows, which
    bounds it.
    `on_weight_update` says what becomes of the request when the weights change while it is in
    flight, whatever the update says: see `engine.control`.

    Raises `InvalidRequestError` for a salt that is not text, for a threshold that is not a number
    from 0 to 1, for ranges that `check_ranges` refuses, for a negative `write_upto`, for a
    group without a name or with a size that is no count, for a staleness below -1, and for a mode
    or tiers that are none.
    """

    salt: str | None = None
    read: bool = True
    write: bool = True
    hit_threshold: float | None = None
    hit_tiers: HitTiers | None = None
    retention: tuple[RetentionRange, ...] = ()
    owner: str | None = None
    write_upto: int | None = None
    group_id: str | None = None
    group_size: int | None = None
    max_weight_staleness: int | None = None
    on_weight_update: InFlightMode | None = None

    @property
    def retention_owner(self) -> str:
        """Whose budget the retention hints count against."""
        if self.owner is not None:
            return self.owner
        return "" if self.salt is None else f"salt:{self.salt}"

    def __post_init__(self) -> None:
        if self.retention:
            object.__setattr__(self, "retention", tuple(self.retention))
            check_ranges(self.retention)
        _check_group(self.group_id, self.group_size)
        staleness, upto = self.max_weight_staleness, self.write_upto
        if staleness is not None and not is_count(staleness, -1):
            problem = f"must be a count of updates or -1, got {shown(staleness)}"
            raise wrong("max_weight_staleness", problem)
        if self.on_weight_update not in (None, *get_args(InFlightMode)):
            raise wrong("on_weight_update", f"is no mode: {shown(self.on_weight_update)}")
        if upto is not None and not is_count(upto):
            raise wrong("write_upto", f"must be a number of tokens, 0 or more, got {upto!r}")
        if self.salt is not None:
            _check_salt(self.salt)
        if self.hit_threshold is not None:
            _check_hit_threshold(self.hit_threshold)
        if self.hit_tiers not in (None, *get_args(HitTiers)):
            raise wrong("cache_hit_threshold_tiers", f"are no tiers: {shown(self.hit_tiers)}")


class PromptGroup(NamedTuple):
    """Requests with one prompt: a name that is theirs alone, and how many there are, if known."""

    name: tuple[str | None, ...]
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One sequence to generate: immutable input. `n` choices are `n` requests.

    `prompt_token_ids` may be given as any list of integers; requests can share one array.

    A lower `priority` value is served earlier, as in vLLM. `arrival_time` is in seconds of
    `time.monotonic`. Requests of one `job_id` came together: jobs take turns, and without an id a
    request is a job of its own. So do clients, whatever number of jobs each has; `client` None is
    one of them. `roles` are who wrote which tokens of the prompt, where that is to be recorded.
    `affinity` is a key whose requests a router sends to one replica where nothing
    speaks against it. `hashes` are those of the prompt under its salt, where they are known:
    they must be made of these very tokens. Choices of one prompt share an id in `choices`, which
    says how many there are too. `prediction` is what the answer may look like, a source
    of drafts.

    Raises `InvalidRequestError` for token ids that `as_token_ids` refuses, for a retention hint
    that leaves the prompt, and for a priority or a time that has no place in an order.
    """

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    cache: CacheOptions = field(default_factory=CacheOptions)
    priority: int = 0
    arrival_time: float = 0.0
    job_id: str | None = None
    client: str | None = None
    choices: tuple[str, int] | None = None
    roles: tuple[RoleSpan, ...] = ()
    affinity: str | None = None
    hashes: BlockHashes | None = None
    prediction: TokenIds | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", as_token_ids(self.prompt_token_ids))
        if self.cache.retention:
            check_within(self.cache.retention, len(self.prompt_token_ids))
        for name in ("priority", "arrival_time"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or value != value:
                raise wrong(name, f"must be a number, got {value!r}")

    @property
    def job(self) -> str:
        """The id of the job that the request belongs to."""
        return self.job_id or self.request_id

    @property
    def scope(self) -> CacheScope:
        """Whose prompts the request may learn of."""
        return CacheScope(self.client, self.cache.salt)

    @property
    def group(self) -> PromptGroup | None:
        """The requests that it shares a prompt with, where that is said."""
        if self.cache.group_id is not None:
            return PromptGroup((*self.scope, self.cache.group_id), self.cache.group_size)
        return None if self.choices is None else PromptGroup(self.choices[:1], self.choices[1])


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended; `finish_reason` None as long as it goes on.

    `stop_reason` is the stop string or token id that ended it, `error` why it failed. `error_code`
    tells errors that are no failure of the engine: a cache that has become too small for the
    request, a grammar that cannot be followed any further. `pooled` is what the request's
    `pooling` asked for.
    """

    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    pooled: npt.NDArray[np.float32] | None = field(default=None, compare=False)


GOES_ON = Ending(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUse:
    """What became of a prompt of `num_tokens` when its request first started or was rejected."""

    num_tokens: int = 0
    num_cached_tokens: int = 0
    """Of them came from the cache."""
    num_disk_tokens: int = 0
    """Of these came from a disk."""
    num_written_tokens: int = 0
    """Of them are in blocks that this request was the first to publish."""
    num_window_missed_tokens: int = 0
    """Of them would have come from the cache but for blocks of sliding windows."""
    hit_staleness: int = 0
    """How many updates of the weights before the start the oldest hit was computed."""


NO_USE = PromptUse()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the token taken, then the likeliest ones.

    `rank` is 1 for the likeliest token of the vocabulary.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What one step added to a request: tokens, their text, and the end if it is reached.

    `text` is the new text alone and never holds half of a character. `prompt_logprobs` comes with
    the first token; its first entry is None, since nothing precedes the first token. `prompt` is
    one object for all outputs of an answer. `num_accepted_drafts` tokens of the answer so far had
    been guessed, and `num_refused_drafts` guesses were wrong. `started_at`, in seconds of
    `time.monotonic`, comes with the first token: when its first step was submitted. `restarted`
    says that the weights were replaced: all that came before is void, the answer begins again.
    `weight_version` is that of the weights that the tokens came from.

    Nobody changes one: it is not frozen only because it is made for every token, and each field
    of a frozen one costs as much as three of these.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prompt: PromptUse = NO_USE
    ending: Ending = GOES_ON
    num_accepted_drafts: int = 0
    num_refused_drafts: int = 0
    started_at: float | None = None
    restarted: bool = False
    weight_version: ShownVersion | None = None

    # What both parts tell, by the names that callers of an `AsyncEngine` read.
    num_prompt_tokens = property(attrgetter("prompt.num_tokens"))
    num_cached_tokens = property(attrgetter("prompt.num_cached_tokens"))
    num_disk_tokens = property(attrgetter("prompt.num_disk_tokens"))
    num_written_tokens = property(attrgetter("prompt.num_written_tokens"))
    num_window_missed_tokens = property(attrgetter("prompt.num_window_missed_tokens"))
    hit_staleness = property(attrgetter("prompt.hit_staleness"))
    finish_reason = property(attrgetter("ending.finish_reason"))
    stop_reason = property(attrgetter("ending.stop_reason"))
    error = property(attrgetter("ending.error"))
    error_code = property(attrgetter("ending.error_code"))
    pooled = property(attrgetter("ending.pooled"))

    @property
    def finished(self) -> bool:
        """Whether no further output follows."""
        return self.ending.finish_reason is not None

    @property
    def ended_well(self) -> bool:
        """Whether the answer came to its end: it neither failed nor was cut off."""
        return self.ending.finish_reason in ("stop", "length")
