"""The fields that every generating endpoint takes: OpenAI's, and vLLM's additions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel

from prefixcache.config.engine_parts.scheduler_config import HitTiers
from prefixcache.exceptions import wrong
from prefixcache.server.http.body import RequestFields, Strings, check_length
from prefixcache.server.jobs.structured_fields import (
    GuidedFields,
    Named,
    ResponseFormat,
    StructuredOutputsFields,
    only_one,
)
from prefixcache.server.options import limits
from prefixcache.types.modes import InFlightMode
from prefixcache.types.retention_range import MAX_RANGES, RetentionRange

_NO_LIMIT = -1


class StreamOptions(BaseModel, strict=True, extra="allow"):
    """What a stream tells besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RetentionFields(BaseModel, strict=True, extra="forbid"):
    """One retention hint, as `RetentionRange`; an unknown field is refused, as it does nothing."""

    start: int | None = None
    end: int | None = None
    priority: int | None = None
    ttl_s: float | None = None

    def range(self) -> RetentionRange:
        """The hint, unchecked."""
        return RetentionRange(self.start or 0, self.end, self.priority, self.ttl_s)


class PromptCacheOptions(BaseModel, strict=True):
    """OpenAI's options of the prompt cache; `server/jobs/caching.py` says what they mean here."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class ResponseCacheOptions(BaseModel, strict=True):
    """Those of `/v1/responses`, where a longer TTL may be asked for, and that nothing be said."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class SamplingFields(RequestFields, GuidedFields):
    """What both completion endpoints take.

    `prompt_cache_key` groups requests for routers in front of servers; it is no salt.
    """

    no_effect = frozenset(
        {
            "guided_decoding_backend",
            "metadata",
            "parallel_tool_calls",
            "safety_identifier",
            "service_tier",
            "spaces_between_special_tokens",
            "store",
            "user",
        }
    )
    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        "best_of": (1,),
        "length_penalty": (1.0,),
        "logits_processors": ([],),
        "prompt_embeds": ([],),
        "return_tokens_as_token_ids": (False,),
        "use_beam_search": (False,),
    }
    max_lengths: ClassVar[dict[str, int]] = {
        "allowed_token_ids": limits.MAX_ALLOWED_TOKEN_IDS,
        "cache_salt": limits.MAX_SALT_CHARACTERS,
        "logit_bias": limits.MAX_LOGIT_BIASES,
        "model": limits.MAX_MODEL_NAME_CHARACTERS,
        "prompt_cache_key": limits.MAX_SALT_CHARACTERS,
        "retention": MAX_RANGES,
        "stop_token_ids": limits.MAX_STOP_TOKEN_IDS,
    }

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Strings | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache_read: bool | None = None
    cache_write: bool | None = None
    cache_hit_threshold: float | None = None
    cache_hit_threshold_tiers: HitTiers | None = None
    cache_diagnostics: bool | None = None
    retention: list[RetentionFields] | None = None
    group_id: str | None = None
    group_size: int | None = None
    max_weight_staleness: int | None = None
    on_weight_update: InFlightMode | None = None
    return_weight_versions: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None

    @property
    def given_max_tokens(self) -> int | None:
        """Most tokens of the answer, where the client says so; -1 sets no limit."""
        return self.max_tokens

    def most_tokens(self, default: int | None) -> int | None:
        """Most tokens of the answer, `default` where the client does not say; None is no limit."""
        given = self.given_max_tokens
        if given is None:
            return default
        return None if given == _NO_LIMIT else given

    @cached_property
    def structured_output(self) -> Named | None:
        """What answers must look like, and the field that says so.

        Raises `InvalidRequestError` for a field that is incomplete, and for more than one.
        """
        wanted = [] if self.response_format is None else self.response_format.found()
        if self.structured_outputs is not None:
            wanted += self.structured_outputs.found()
        return only_one([*wanted, *self.guided()])

    def check_other_fields(self) -> None:
        """As for all requests, and what answers must look like."""
        super().check_other_fields()
        _ = self.structured_output  # written as text here, where long bodies have a thread

    @classmethod
    def check_lengths(cls, values: Mapping[str, Any]) -> None:
        """As for all requests; stop strings have a limit together, and so have bad words."""
        super().check_lengths(values)
        check_texts("stop", values.get("stop"), limits.MAX_STOP_STRINGS, limits.MAX_STOP_CHARACTERS)
        check_texts(
            "bad_words",
            values.get("bad_words"),
            limits.MAX_BAD_WORDS,
            limits.MAX_BAD_WORD_CHARACTERS,
        )


def check_texts(name: str, value: object, most: int, most_characters: int) -> None:
    """Raises `InvalidRequestError` for too many texts, or too many characters in all of them."""
    texts = cast("list[object]", value) if isinstance(value, list) else [value]
    check_length(name, texts, most)
    characters = sum(len(text) for text in texts if isinstance(text, str))
    if characters > most_characters:
        raise wrong(
            name,
            f"may have at most {most_characters} characters in all, got {characters}",
            code="too_long",
        )
