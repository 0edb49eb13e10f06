"""From the fields of a body, its prompts and sampling options to requests of the engine."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from prefixcache.config.checked import shown
from prefixcache.config.logs import with_fields
from prefixcache.diagnostics.room import CacheDiagnostics
from prefixcache.diagnostics.spans import PromptSource
from prefixcache.exceptions import wrong
from prefixcache.server.http.errors import ApiError
from prefixcache.server.http.workers import Workers
from prefixcache.server.jobs.caching import PromptCaching
from prefixcache.server.jobs.compile_queue import CompileQueue
from prefixcache.server.jobs.context import Call
from prefixcache.server.jobs.diagnosis import Diagnosis, check_may_ask, diagnostics_off
from prefixcache.server.jobs.encode import EncodedPrompts, PromptEncoder
from prefixcache.server.jobs.field_names import fields_named, schemas_named
from prefixcache.server.jobs.params import choice_params
from prefixcache.server.jobs.sampling_fields import SamplingFields
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.text.chat.message import MessageParser
from prefixcache.types.request import CacheOptions, CacheScope, Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenIds

if TYPE_CHECKING:
    from prefixcache.engine.client import EngineClient
    from prefixcache.text.grammar.answer_matcher import Grammar
    from prefixcache.types.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

# What making a request costs, in characters that are encoded in that time.
_REQUEST_COST = 256
MAX_PRIORITY = 2**31 - 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMaker:
    """Makes jobs for one served model; `workers` do what takes long, `diagnostics` may be off."""

    engine: EngineClient
    served: ServedModel
    workers: Workers = dataclasses.field(default_factory=Workers)
    compiling: CompileQueue = dataclasses.field(default_factory=CompileQueue)
    diagnostics: CacheDiagnostics | None = None
    encoder: PromptEncoder = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        encoder = PromptEncoder(self.served, self.engine.max_model_len, self.workers)
        object.__setattr__(self, "encoder", encoder)

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises `ApiError` (404) when the model is another one."""
        first = self.served.names[0]
        if not (name is None or name in self.served.names or self.served.any_name):
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"The model {shown(name)} does not exist. Served here: {first!r}.",
                param="model",
                code="model_not_found",
            )
        return name or first

    async def job(
        self,
        fields: SamplingFields,
        prompts: EncodedPrompts,
        params: SamplingParams,
        *,
        model: str,
        call: Call,
        new_parser: Callable[[], MessageParser] | None = None,
    ) -> Job:
        """All requests of one HTTP request, whose number `check_num_sequences` has allowed.

        `model` is what `check_model` returned. Answers go on to the end of the context at most; see
        `ServedModel.clamps_max_tokens`. They are read by parsers of `new_parser` where it is given.
        """
        self._check_priority(fields.priority or 0)
        scope = call.caller.scope(fields.cache_salt)
        cache_options = _cache_options(fields, scope, prompts.caching)
        if fields.cache_diagnostics:
            if self.diagnostics is None:
                raise diagnostics_off("cache_diagnostics")
            check_may_ask(call.caller, scope.salt, "cache_diagnostics")
        make = partial(self._requests, fields, prompts, params, call, cache_options)
        grammar = None
        if (output := params.structured_output) is not None:
            field = "tools" if fields.structured_output is None else fields.structured_output[0]
            grammar = await self.grammar(output, field, call)
        if self.served.num_logged_characters:
            self._log_prompts(prompts.token_ids, call)
        requests = await self.workers.run(
            len(prompts.token_ids) * params.n * _REQUEST_COST, lambda: tuple(make())
        )
        parts, diagnosis = [*prompts.sources], None
        if self.diagnostics is not None:
            diagnosis = Diagnosis(
                self.diagnostics,
                call,
                model,
                requests[:: params.n],
                parts,
                explains=bool(fields.cache_diagnostics),
            )
        return Job(
            call=call,
            model=model,
            created=int(time.time()),
            prompts=tuple(prompts.token_ids),
            params=params,
            requests=requests,
            new_parser=new_parser,
            grammar=grammar,
            sources=parts,
            diagnosis=diagnosis,
        )

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
        extra = with_fields(event="prompts", message=f"Prompts of {call.id}", prompts=texts)
        logger.info("Prompts of %s: %s", call.id, texts, extra=extra)

    async def grammar(self, output: StructuredOutput, field: str, call: Call) -> Grammar:
        """A grammar, compiled. Errors name the `field` that says it."""
        with fields_named({"structured_output": field}), schemas_named(output.text):
            if (grammar := self.engine.find_grammar(output)) is not None:
                return grammar
            client = call.caller.namespace or call.address
            compiling = self.compiling.compile(self.engine, output, client)
            return await call.within_bounds(compiling)

    def _check_priority(self, priority: int) -> None:
        if priority and not self.served.priorities:
            raise wrong("priority", "needs a server with --scheduling-policy priority")
        if abs(priority) > MAX_PRIORITY:
            raise wrong("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")

    def _requests(
        self,
        fields: SamplingFields,
        prompts: EncodedPrompts,
        params: SamplingParams,
        call: Call,
        cache_options: CacheOptions,
    ) -> Iterator[Request]:
        fits = fields.given_max_tokens is None or self.served.clamps_max_tokens
        limit = self.engine.max_model_len if fits else sys.maxsize
        now = time.monotonic()
        job = f"{call.id}-{uuid.uuid4().hex[:8]}"  # clients may send one request id twice
        choices = cache(partial(choice_params, params))
        for prompt_index, prompt in enumerate(prompts.token_ids):
            max_tokens = params.most_tokens(limit - len(prompt))
            for choice, of_choice in enumerate(choices(max_tokens)):
                yield Request(
                    request_id=f"{job}-{prompt_index * params.n + choice}",
                    job_id=job,
                    prompt_token_ids=prompt,
                    params=of_choice,
                    cache=cache_options,
                    priority=fields.priority or 0,
                    arrival_time=now,
                    client=call.caller.namespace,
                    roles=prompts.roles,
                    affinity=call.caller.own(fields.prompt_cache_key),
                    choices=(f"{job}-{prompt_index}", params.n) if params.n > 1 else None,
                    prediction=prompts.prediction,
                )


def _cache_options(
    fields: SamplingFields, scope: CacheScope, caching: PromptCaching
) -> CacheOptions:
    if fields.retention and caching.retention:
        raise wrong("retention", "excludes TTLs of another caching control: give one, not both")
    retention = tuple(hint.range() for hint in fields.retention or ())
    return CacheOptions(
        salt=scope.salt,
        read=fields.cache_read is not False,
        write=fields.cache_write is not False,
        hit_threshold=fields.cache_hit_threshold,
        hit_tiers=fields.cache_hit_threshold_tiers,
        retention=caching.retention or retention,
        owner=scope.owner,
        write_upto=caching.write_upto,
        group_id=fields.group_id,
        group_size=fields.group_size,
        max_weight_staleness=fields.max_weight_staleness,
        on_weight_update=fields.on_weight_update,
    )
