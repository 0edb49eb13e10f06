"""From the fields of a body to requests of the engine: the one validation both endpoints share."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple, cast

from prefixcache.config.logs import with_fields
from prefixcache.diagnostics.room import CacheDiagnostics
from prefixcache.diagnostics.spans import PromptSource
from prefixcache.exceptions import InvalidRequestError, RequestTooLargeError
from prefixcache.server.http.access import Caller
from prefixcache.server.http.errors import ApiError
from prefixcache.server.http.workers import Workers
from prefixcache.server.jobs.caching import (
    CachingControls,
    Marked,
    Place,
    PromptCaching,
    breakpoint_ends,
    openai_controls,
    prompt_caching,
)
from prefixcache.server.jobs.compile_queue import CompileQueue
from prefixcache.server.jobs.context import Call
from prefixcache.server.jobs.diagnosis import Diagnosis, check_may_ask
from prefixcache.server.jobs.sampling_fields import RetentionFields, SamplingFields
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.options.limits import MAX_SEQUENCES
from prefixcache.text.chat.grammars import schema_problem
from prefixcache.text.chat.message import MessageParser
from prefixcache.text.tokenization.bad_words import with_bad_words
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import CacheOptions, Request, RoleSpan
from prefixcache.types.retention_range import RetentionRange
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenIds, as_token_ids

if TYPE_CHECKING:
    from prefixcache.engine.client import EngineClient
    from prefixcache.text.grammar.guide import Grammar

logger = logging.getLogger(__name__)

# Characters that are encoded in one go; then it is another client's turn.
_SLICE = 2**18
# What a text or a request costs beside its length, in characters.
_OVERHEAD = 256
# Tokens before those that are kept of a prompt's end, which may be other ones for the cut.
_CUT_TOKENS = 64
MAX_PRIORITY = 2**31 - 1
_FIELD = re.compile(r"[\[.]")
_INDEX = re.compile(r"\[\d+\]")

# Fields of a body that are sampling options as they are.
_PASSED_ON = (
    SamplingFields.model_fields.keys() & {one.name for one in dataclasses.fields(SamplingParams)}
) - {"max_tokens", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks of the engine: `params.n` requests for each prompt, in order.

    It holds their grammar, so that the engine finds it.

    `new_parser` makes the parser of an answer that is a message; other answers are text alone.
    `sources` are what each prompt's text was made of, None for one that came as token ids. They are
    parts of the body, and so taken out once the engine has the requests. Without diagnostics
    there is no `diagnosis`.
    """

    call: Call
    model: str
    created: int
    prompts: tuple[TokenIds, ...]
    params: SamplingParams
    requests: tuple[Request, ...]
    grammar: Grammar | None = None
    new_parser: Callable[[], MessageParser] | None = None
    sources: list[PromptSource | None] = dataclasses.field(
        default_factory=list["PromptSource | None"]
    )
    diagnosis: Diagnosis | None = None


class EncodedChat(NamedTuple):
    """A chat's prompt, what caching controls mean for it, and who wrote which of its tokens."""

    token_ids: TokenIds
    caching: PromptCaching
    roles: tuple[RoleSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMaker:
    """Makes jobs for one served model; `workers` do what takes long, `diagnostics` may be off."""

    engine: EngineClient
    served: ServedModel
    workers: Workers = dataclasses.field(default_factory=Workers)
    compiling: CompileQueue = dataclasses.field(default_factory=CompileQueue)
    diagnostics: CacheDiagnostics | None = None

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises `ApiError` (404) when the model is another one."""
        first = self.served.names[0]
        if not (name is None or name in self.served.names or self.served.any_name):
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"The model {name!r} does not exist. Served here: {first!r}.",
                param="model",
                code="model_not_found",
            )
        return name or first

    async def encode(
        self, text: str, *, param: str, add_special_tokens: bool = True, last: int | None = None
    ) -> TokenIds:
        """Token ids of `text`; see `encode_all`."""
        encoded = await self.encode_all(
            [text], param=param, add_special_tokens=add_special_tokens, last=last
        )
        return encoded[0]

    async def encode_all(
        self,
        texts: Sequence[str],
        *,
        param: str,
        add_special_tokens: bool = True,
        last: int | None = None,
    ) -> list[TokenIds]:
        """Token ids of `texts`, in turns with other clients when they are long.

        With `last` so many tokens of each text's end. Raises `RequestTooLargeError`, without
        encoding any, for a text that can never fit.
        """
        if last is not None:
            texts = [self._end_of(text, last) for text in texts]
        for text in texts if last is None else ():
            self._check_can_fit(text, param)
        encode = partial(
            self.served.tokenizer.encode_batch, add_special_tokens=add_special_tokens, param=param
        )
        encoded: list[TokenIds] = []
        for part in _slices(texts):
            encoded += await self.workers.run(sum(map(_cost, part)), partial(encode, part))
        return encoded if last is None else [ids[-last:] for ids in encoded]

    def _end_of(self, text: str, last: int) -> str:
        """Text that its last tokens are made of, and more, so that the cut changes none of them."""
        return text[-2 * (last + _CUT_TOKENS) * self.served.tokenizer.longest_token :]

    def num_kept(self, fields: SamplingFields) -> int | None:
        """How many tokens of a prompt's end are taken; None takes all.

        Raises `InvalidRequestError` for a number that none can have.
        """
        kept, limit = fields.truncate_prompt_tokens, self.engine.max_model_len
        if kept is None:
            return None
        if kept == -1:
            answer = fields.given_max_tokens
            return max(limit - (1 if answer is None else answer), 1)
        if not 1 <= kept <= limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be from 1 to {limit}, or -1 for what has room, "
                f"got {kept}.",
                param="truncate_prompt_tokens",
            )
        return kept

    async def encode_chat(
        self,
        source: PromptSource,
        controls: CachingControls,
        rendered_with: Callable[[Place], str],
        *,
        param: str,
        add_special_tokens: bool = True,
        last: int | None = None,
    ) -> EncodedChat:
        """`encode` of the source's text, and what is to be known of its tokens.

        `rendered_with` is as in `breakpoint_ends`.
        """
        text, places = source.text, [one.place for one in controls.breakpoints]
        if not (places or self.served.records_roles):
            encoded = await self.encode(
                text, param=param, add_special_tokens=add_special_tokens, last=last
            )
            return EncodedChat(encoded, prompt_caching(controls, ()))
        if last is None:
            self._check_can_fit(text, param)
        tail = text if last is None else self._end_of(text, last)
        cut = len(text) - len(tail)

        def encode() -> EncodedChat:
            spans = source.role_spans() if self.served.records_roles else []
            marks = breakpoint_ends(text, places, rendered_with)
            marks += [edge for _, *edges in spans for edge in edges]
            encoded, positions = self.served.tokenizer.encode_marked(
                tail,
                [max(0, mark - cut) for mark in marks],
                add_special_tokens=add_special_tokens,
                param=param,
            )
            dropped = 0 if last is None else max(0, len(encoded) - last)
            positions = [max(0, position - dropped) for position in positions]
            return EncodedChat(
                encoded[dropped:],
                prompt_caching(controls, positions[: len(places)]),
                _roles((role for role, *_ in spans), positions[len(places) :]),
            )

        return await self.workers.run(_cost(text) * (2 + len(places)), encode)

    def _check_can_fit(self, text: str, param: str) -> None:
        limit = self.engine.max_model_len
        least = len(text) // self.served.tokenizer.longest_token
        if least > limit:
            raise RequestTooLargeError(
                f"The model's context length is {limit} tokens, but the text of {len(text)} "
                f"characters makes {least} or more.",
                param=param,
                code="context_length_exceeded",
            )

    async def job(
        self,
        fields: SamplingFields,
        prompts: Sequence[TokenIds],
        params: SamplingParams,
        *,
        call: Call,
        new_parser: Callable[[], MessageParser] | None = None,
        caching: PromptCaching | None = None,
        roles: tuple[RoleSpan, ...] = (),
        sources: Sequence[PromptSource | None] = (),
    ) -> Job:
        """All requests of one HTTP request, whose number `check_num_sequences` has allowed.

        Where `params.max_tokens` is a default, it is shortened to what fits. Answers are read by
        parsers of `new_parser` where it is given. `caching` is what the API's caching controls mean
        for each of the prompts, `roles` who wrote which of their tokens, `sources` what each was
        made of.
        """
        self._check_priority(fields.priority or 0)
        cache_options = _cache_options(fields, call.caller, caching or PromptCaching())
        if fields.cache_diagnostics:
            self._check_diagnostics(call.caller, cache_options.salt)
        make = partial(self._requests, fields, prompts, params, call, cache_options, roles)
        grammar = await self._grammar(fields, params, call)
        if self.served.num_logged_characters:
            self._log_prompts(prompts, call)
        requests = await self.workers.run(
            len(prompts) * params.n * _OVERHEAD, lambda: tuple(make())
        )
        model, parts = self.check_model(fields.model), [*sources]
        explains = bool(fields.cache_diagnostics)
        return Job(
            call=call,
            model=model,
            created=int(time.time()),
            prompts=tuple(prompts),
            params=params,
            requests=requests,
            new_parser=new_parser,
            grammar=grammar,
            sources=parts,
            diagnosis=self._diagnosis(call, model, requests[:: params.n], parts, explains),
        )

    def _diagnosis(
        self,
        call: Call,
        model: str,
        requests: Sequence[Request],
        sources: Sequence[PromptSource | None],
        explains: bool,
    ) -> Diagnosis | None:
        if self.diagnostics is None:
            return None
        return Diagnosis(
            self.diagnostics,
            name=call.id,
            caller=call.caller,
            model=model,
            requests=requests,
            sources=sources,
            explains=explains,
        )

    def _check_diagnostics(self, caller: Caller, salt: str | None) -> None:
        if self.diagnostics is None:
            raise diagnostics_off("cache_diagnostics")
        check_may_ask(caller, salt, "cache_diagnostics")

    def _log_prompts(self, prompts: Sequence[TokenIds], call: Call) -> None:
        """As the model gets them, up to the limit together."""
        room, texts = self.served.num_logged_characters, list[str]()
        for prompt in prompts:
            if room <= 0:
                break
            # A token has a character or is a part of one: more tokens are not looked at.
            text = self.served.tokenizer.decode(prompt[:room].tolist(), skip_special_tokens=False)
            texts.append(text[:room])
            room -= len(texts[-1]) + 1
        told = with_fields(event="prompts", message=f"Prompts of {call.id}", prompts=texts)
        logger.info("Prompts of %s: %s", call.id, texts, extra=told)

    async def _grammar(
        self, fields: SamplingFields, params: SamplingParams, call: Call
    ) -> Grammar | None:
        """What answers must look like, compiled. Errors name the field that says so."""
        output = params.structured_output
        if output is None:
            return None
        field = "tools" if fields.structured_output is None else fields.structured_output[0]
        with fields_named({"structured_output": field}), schemas_named(output.text):
            if (grammar := self.engine.find_grammar(output)) is not None:
                return grammar
            client = call.caller.namespace or call.address
            compiling = self.compiling.compile(self.engine, output, client)
            return await call.within_bounds(compiling)

    def _check_priority(self, priority: int) -> None:
        if priority and not self.served.priorities:
            raise InvalidRequestError(
                "priority needs a server with --scheduling-policy priority.", param="priority"
            )
        if abs(priority) > MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}.", param="priority"
            )

    def _requests(
        self,
        fields: SamplingFields,
        prompts: Sequence[TokenIds],
        params: SamplingParams,
        call: Call,
        cache_options: CacheOptions,
        roles: tuple[RoleSpan, ...],
    ) -> Iterator[Request]:
        fits = fields.given_max_tokens is None or self.served.clamps_max_tokens
        limit = self.engine.max_model_len if fits else None
        now = time.monotonic()
        job = f"{call.id}-{uuid.uuid4().hex[:8]}"  # clients may send one request id twice
        affinity = call.caller.own_salt(fields.prompt_cache_key)
        choices = cache(partial(_choices, params))
        for prompt_index, prompt in enumerate(prompts):
            for choice, choice_params in enumerate(choices(_max_tokens(params, prompt, limit))):
                yield Request(
                    request_id=f"{job}-{prompt_index * params.n + choice}",
                    job_id=job,
                    prompt_token_ids=prompt,
                    params=choice_params,
                    cache=cache_options,
                    priority=fields.priority or 0,
                    arrival_time=now,
                    client=call.caller.namespace,
                    roles=roles,
                    affinity=affinity,
                )


def _roles(roles: Iterable[str], edges: Sequence[int]) -> tuple[RoleSpan, ...]:
    """Spans of tokens from the first and behind the last of each; those without tokens are none."""
    spans = zip(roles, edges[::2], edges[1::2], strict=True)
    return tuple((role, start, end) for role, start, end in spans if start < end)


def diagnostics_off(param: str) -> InvalidRequestError:
    """The error for asking `param` of a server without diagnostics."""
    return InvalidRequestError(
        f"{param} needs a server whose --diagnostics-memory is not 0.", param=param
    )


def sampling_params(
    fields: SamplingFields,
    served: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Checked sampling options. What the request leaves out comes from the model's defaults."""
    _check_stream_fields(fields)
    given = {name: getattr(fields, name) for name in _PASSED_ON}
    chosen = {name: value for name, value in given.items() if value is not None}
    params = SamplingParams(
        **{**served.generation.sampling_options(), **chosen},
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=_stop_strings(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        structured_output=fields.structured_output and fields.structured_output[1],
        allowed_token_ids=_tuple_or_none(fields.allowed_token_ids),
        bad_words=tuple(fields.bad_words or ()),
    )
    check_ids(params.stop_token_ids, served.tokenizer, "stop_token_ids")
    return with_bad_words(params, served.tokenizer)


def _check_stream_fields(fields: SamplingFields) -> None:
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; set stream to false.", param="prompt_logprobs"
        )
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError("stream_options needs stream to be true.", param="stream_options")


def check_num_sequences(num_prompts: int, n: int) -> None:
    """Raises `InvalidRequestError` for more answers than one request may ask for."""
    if num_prompts * n > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={n} are more than {MAX_SEQUENCES} answers.",
            param="n" if n > 1 else "prompt",
        )


@contextmanager
def fields_named(names: Mapping[str, str]) -> Generator[None, None, None]:
    """Renames fields in errors, where an endpoint calls a field by a name of its own.

    What is wrong with a part of a field, as `messages[0].tool_call_id`, is told of that field:
    endpoints number their parts otherwise. A name with `[]` is of a part that all number alike.
    """
    try:
        yield
    except InvalidRequestError as error:
        param = error.param or ""
        name, told = _part_named(param, names) or _field_named(param, names) or (None, "")
        if name is None:
            raise
        message = str(error).replace(param, told, 1)
        raise type(error)(message, param=name, code=error.code) from None


def _part_named(param: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    """The field of the first name that `param` begins with, in `names` and in messages."""
    index = _INDEX.search(param)
    for known, name in names.items():
        begin = known.replace("[]", index[0], 1) if index else known
        if "[]" in known and param.startswith(begin):
            told = name.replace("[]", index[0] if index else "", 1) + param.removeprefix(begin)
            return told, told
    return None


def _field_named(param: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    name = names.get(param) or names.get(_FIELD.split(param, maxsplit=1)[0])
    if name is None:
        return None
    _, inside, member = param.rpartition(".")
    told = f"{name}: {names.get(member, member)}" if inside and param not in names else name
    return name, told


@contextmanager
def schemas_named(grammar: str) -> Generator[None, None, None]:
    """Names the tool in errors about its part of a grammar."""
    try:
        yield
    except InvalidRequestError as error:
        problem = schema_problem(grammar, str(error))
        if problem is None:
            raise
        field, reason = problem
        raise InvalidRequestError(f"{field}: {reason}", param=field, code=error.code) from None


def parse_prompts(prompt: object) -> list[str | TokenIds]:
    """The prompts of a completion, each as text or as token ids.

    Raises `InvalidRequestError` for what is neither, for ids that none has, and for too many.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt("a string, token ids, or a list of either, and not empty")
    items = cast("list[object]", prompt)
    if _all_ids(items):
        return [as_token_ids(cast("list[int]", items))]
    check_num_sequences(len(items), 1)
    return [_one_prompt(item, index) for index, item in enumerate(items)]


def check_ids(token_ids: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    """Raises `InvalidRequestError` for ids outside the vocabulary."""
    wrong = next((i for i in token_ids if not 0 <= i < tokenizer.vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{param} holds the token id {wrong}; ids are from 0 to {tokenizer.vocab_size - 1}.",
            param=param,
        )


def _one_prompt(item: object, index: int) -> str | TokenIds:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _all_ids(cast("list[object]", item)):
        return as_token_ids(cast("list[int]", item))
    raise _bad_prompt(f"a string or a list of token ids at [{index}]")


def _all_ids(items: Sequence[object]) -> bool:
    """Whether all are integers, and none a bool, which is one too."""
    return set(map(type, items)) <= {int}


def _bad_prompt(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt must be {what}.", param="prompt")


def _cache_options(fields: SamplingFields, caller: Caller, caching: PromptCaching) -> CacheOptions:
    if fields.retention and caching.retention:
        raise InvalidRequestError(
            "retention stands beside TTLs of another caching control: give one, not both.",
            param="retention",
        )
    return CacheOptions(
        salt=caller.own_salt(fields.cache_salt),
        read=fields.cache_read is not False,
        write=fields.cache_write is not False,
        hit_threshold=fields.cache_hit_threshold,
        retention=caching.retention or tuple(map(_range, fields.retention or ())),
        owner=caller.owner(fields.cache_salt),
        write_upto=caching.write_upto,
    )


def caching_controls(fields: SamplingFields, marked: Iterable[Marked] = ()) -> CachingControls:
    """What OpenAI's caching fields of a body ask; `marked` are the breakpoints of its content."""
    options = fields.prompt_cache_options
    return openai_controls(
        marked,
        mode=None if options is None else options.mode,
        ttl=None if options is None else options.ttl,
        has_options=options is not None,
        retention=fields.prompt_cache_retention,
    )


def _range(fields: RetentionFields) -> RetentionRange:
    return RetentionRange(fields.start or 0, fields.end, fields.priority, fields.ttl_s)


def _max_tokens(params: SamplingParams, prompt: TokenIds, limit: int | None) -> int | None:
    """`params.max_tokens`, or what fits behind the prompt where that is less."""
    if limit is None or params.max_tokens is None:
        return params.max_tokens
    return min(params.max_tokens, max(limit - len(prompt), min(params.max_tokens, 1)))


def _choices(params: SamplingParams, max_tokens: int | None) -> tuple[SamplingParams, ...]:
    fitted = dataclasses.replace(params, max_tokens=max_tokens)
    if params.seed is None:
        return (fitted.for_choice(0),) * params.n
    return tuple(fitted.for_choice(choice) for choice in range(params.n))


def _cost(text: str) -> int:
    return len(text) + _OVERHEAD


def _slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in order, in parts of about `_SLICE` characters."""
    begin = size = 0
    for end, text in enumerate(texts, 1):
        size += _cost(text)
        if size >= _SLICE:
            yield texts[begin:end]
            begin, size = end, 0
    if begin < len(texts):
        yield texts[begin:]


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _tuple_or_none(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise InvalidRequestError(
            "logit_bias must map token ids to numbers.", param="logit_bias"
        ) from None
