"""The fields of the requests: OpenAI's, and vLLM's additions.

Types are strict, so that true is no number and "1" neither. Every field may be null, which means
that it is left out. Values are checked where they are used, once for all endpoints.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from prefixcache.chat.tools import ToolUse, read_tool_use
from prefixcache.checked import shortened
from prefixcache.exceptions import InvalidRequestError
from prefixcache.retention_range import MAX_RANGES
from prefixcache.server.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_MODEL_NAME_CHARACTERS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from prefixcache.server.structured_fields import (
    GuidedFields,
    Named,
    ResponseFormat,
    StructuredOutputsFields,
    only_one,
)

_TYPE_TAGS = ("str", "int", "float", "bool", "none", "list[", "dict[", "function-")


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RetentionFields(BaseModel):
    """One retention hint, as `RetentionRange`; an unknown field is refused, as it does nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")

    start: int | None = None
    end: int | None = None
    priority: int | None = None
    ttl_s: float | None = None


class PromptCacheOptions(BaseModel):
    """OpenAI's options of the prompt cache; `server/caching.py` says what they mean here."""

    model_config = ConfigDict(strict=True)

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class RequestFields(BaseModel):
    """`no_effect` names fields that change nothing here; `refused` those that would have to.

    A refused field may be given with one of the values listed for it, which ask for nothing.
    `max_lengths` are of lists, objects and strings.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    no_effect: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[dict[str, tuple[object, ...]]] = {}
    max_lengths: ClassVar[dict[str, int]] = {}

    @classmethod
    def check_lengths(cls, values: Mapping[str, Any]) -> None:
        """Raises `InvalidRequestError` for a field that is too long, before its items are read."""
        for name, most in cls.max_lengths.items():
            _check_length(name, values.get(name), most)

    def check_other_fields(self) -> None:
        """Raises `InvalidRequestError` for a field that asks for what is not supported."""
        for name, value in (self.model_extra or {}).items():
            if name in self.refused:
                _refuse(name, value, self.refused[name])

    def unknown_fields(self) -> list[str]:
        """Names of fields that nobody reads, in the caller's spelling."""
        known = self.no_effect | self.refused.keys()
        names = [name for name in self.model_extra or {} if name not in known]
        for name, part in self:
            if isinstance(part, BaseModel):
                names += [f"{name}.{other}" for other in part.model_extra or {}]
        return names


def _check_length(name: str, value: object, most: int) -> None:
    if not isinstance(value, (str, list, dict)):
        return
    length, what = len(value), "characters" if isinstance(value, str) else "entries"
    if length > most:
        raise InvalidRequestError(
            f"{name} may have at most {most} {what}, got {length}.", param=name, code="too_long"
        )


def _refuse(name: str, value: object, harmless: tuple[object, ...]) -> None:
    if value is None or value in harmless:
        return
    raise InvalidRequestError(
        f"{name} is not supported by this server.", param=name, code="unsupported_parameter"
    )


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
        "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
        "cache_salt": MAX_SALT_CHARACTERS,
        "logit_bias": MAX_LOGIT_BIASES,
        "model": MAX_MODEL_NAME_CHARACTERS,
        "prompt_cache_key": MAX_SALT_CHARACTERS,
        "retention": MAX_RANGES,
        "stop_token_ids": MAX_STOP_TOKEN_IDS,
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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache_read: bool | None = None
    cache_write: bool | None = None
    cache_hit_threshold: float | None = None
    cache_diagnostics: bool | None = None
    retention: list[RetentionFields] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None

    @property
    def given_max_tokens(self) -> int | None:
        """Most tokens of the answer, where the client says so."""
        return self.max_tokens

    @cached_property
    def structured_output(self) -> Named | None:
        """What answers must look like, and the field that says so.

        Raises `InvalidRequestError` for a field that is incomplete, and for more than one.
        """
        found = [] if self.response_format is None else self.response_format.found()
        if self.structured_outputs is not None:
            found += self.structured_outputs.found()
        return only_one([*found, *self.guided()])

    def check_other_fields(self) -> None:
        """As for all requests, and what answers must look like."""
        super().check_other_fields()
        _ = self.structured_output  # written as text here, where long bodies have a thread

    @classmethod
    def check_lengths(cls, values: Mapping[str, Any]) -> None:
        """As for all requests; stop strings have a limit together, and so have bad words."""
        super().check_lengths(values)
        check_texts("stop", values.get("stop"), MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        check_texts("bad_words", values.get("bad_words"), MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)


def check_texts(name: str, value: object, most: int, most_characters: int) -> None:
    """Raises `InvalidRequestError` for too many texts, or too many characters in all of them."""
    texts = cast("list[object]", value) if isinstance(value, list) else [value]
    _check_length(name, texts, most)
    characters = sum(len(text) for text in texts if isinstance(text, str))
    if characters > most_characters:
        raise InvalidRequestError(
            f"{name} may have at most {most_characters} characters in all, got {characters}.",
            param=name,
            code="too_long",
        )


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`. `prompt`: text, token ids, or a list of either."""

    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        **{
            name: harmless for name, harmless in SamplingFields.refused.items() if name != "best_of"
        },
        "suffix": ("",),
    }

    prompt: Any = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class _Message(BaseModel):
    """One message. Content is text, or parts of type text, which the template's renderer checks."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(min_length=1)
    content: str | list[Any] | None = None


class ChatFields(BaseModel):
    """How messages become a prompt."""

    messages: Annotated[list[_Message], FailFast()] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def tool_use(self) -> ToolUse:
        """The tools, and what the answer does with them. Raises `InvalidRequestError`."""
        parallel = self.parallel_tool_calls is not False
        return read_tool_use(self.tools, self.tool_choice, parallel=parallel)

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages as `ChatTemplate.render` takes them."""
        return [_plain(message, index) for index, message in enumerate(self.messages)]


def _plain(message: _Message, index: int) -> dict[str, Any]:
    field = f"messages[{index}]"
    for name in ("function_call", "audio"):
        _refuse(f"{field}.{name}", (message.model_extra or {}).get(name), ([],))
    return {**message.model_dump(exclude={"content"}), "content": message.content}


class ChatRequest(SamplingFields, ChatFields):
    """Body of `POST /v1/chat/completions`."""

    no_effect = SamplingFields.no_effect | {"reasoning_effort", "verbosity"}
    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        **SamplingFields.refused,
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
    }

    max_lengths: ClassVar[dict[str, int]] = {
        **SamplingFields.max_lengths,
        "messages": MAX_MESSAGES,
    }

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None

    @property
    def given_max_tokens(self) -> int | None:
        """`max_completion_tokens` before its older name."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given


class TokenizeRequest(RequestFields):
    """Body of `POST /tokenize` with a `prompt`."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(RequestFields, ChatFields):
    """Body of `POST /tokenize` with `messages`."""

    max_lengths: ClassVar[dict[str, int]] = {"messages": MAX_MESSAGES}

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestFields):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


def invalid_field(error: ValidationError) -> InvalidRequestError:
    """The first of pydantic's complaints, naming the field in the caller's spelling."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = _path(first["loc"])
    reason = first["msg"][:1].lower() + first["msg"][1:]
    got = "" if first["type"] == "missing" else f", got {_shown(first['input'])}"
    return InvalidRequestError(f"{shortened(param)}: {reason}{got}.", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif path and part.startswith(_TYPE_TAGS):
            break
        else:
            path += f".{part}" if path else part
    return path


def _shown(value: object) -> str:
    """`repr` of at most 60 characters, which reads no more of a long value than it shows."""
    return shortened(reprlib.repr(value))
