"""`POST /prefix_cache/probe`: how much of a request is cached, without sending it.

The body is that of a completion or of a chat, and is checked as one. The answer is read from the
cache beside the engine's loop: it waits for no step, changes nothing, and is true at this moment.

Where clients have keys, a probe needs a salt: it would tell one client what others have asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request

from prefixcache.exceptions import InvalidRequestError
from prefixcache.request import Request as EngineRequest
from prefixcache.server.access import Caller
from prefixcache.server.body import read_body
from prefixcache.server.context import new_call, tell_unknown
from prefixcache.server.job_maker import Job, JobMaker
from prefixcache.server.prompt_body import parse_prompt_body, prompt_job
from prefixcache.server.protocol import ChatRequest, SamplingFields

# Prompts looked up in one go; then it is another client's turn.
_PROMPTS_AT_ONCE = 64


def probe_router(maker: JobMaker) -> APIRouter:
    """The endpoint, for one served model."""
    router = APIRouter()

    @router.post("/prefix_cache/probe")
    async def probe_prefix_cache(request: Request) -> dict[str, int]:
        body, call = await read_body(request), new_call(request, "probe")
        parsed = await maker.workers.run(len(body), partial(parse_prompt_body, body))
        fields = parsed if isinstance(parsed, ChatRequest) else parsed[0]
        tell_unknown(request, fields)
        _check_salt(fields, call.caller)
        return await _counts(maker, await prompt_job(maker, parsed, len(body), call))

    return router


def _check_salt(fields: SamplingFields, caller: Caller) -> None:
    if fields.cache_salt is None and caller.namespace is not None and not caller.is_admin:
        raise InvalidRequestError(
            "With API keys a probe needs cache_salt: it tells of prompts that were sent with this "
            "key and salt, and not of other clients' prompts.",
            param="cache_salt",
        )


async def _counts(maker: JobMaker, job: Job) -> dict[str, int]:
    """Sums over the prompts, each counted once as in an answer's `usage`.

    Prompts of a list are looked up one by one, as if the others were not sent.
    """
    requests = job.requests[:: job.params.n]
    parts = [
        requests[begin : begin + _PROMPTS_AT_ONCE]
        for begin in range(0, len(requests), _PROMPTS_AT_ONCE)
    ]
    return {
        "prompt_tokens": sum(map(_length, requests)),
        "cached_tokens": sum([await _cached(maker, part) for part in parts]),
    }


async def _cached(maker: JobMaker, requests: Sequence[EngineRequest]) -> int:
    def count() -> int:
        return sum(map(maker.engine.probe, requests))

    return await maker.workers.run(sum(map(_length, requests)), count)


def _length(request: EngineRequest) -> int:
    return len(request.prompt_token_ids)
