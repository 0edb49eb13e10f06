"""`POST /prefix_cache/probe`: how much of a request is cached, without sending it.

The body is that of a completion or of a chat, and is checked as one. The answer is read from the
cache beside the engine's loop: it waits for no step, changes nothing, and is true at this moment.

Where clients have keys, a probe needs a salt: it would tell one client what others have asked.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from prefixcache.exceptions import InvalidRequestError
from prefixcache.server.access import Caller
from prefixcache.server.body import parse_fields, read_body
from prefixcache.server.chat import chat_job, chat_names
from prefixcache.server.completions import completion_job
from prefixcache.server.context import Call, new_call
from prefixcache.server.protocol import ChatRequest, CompletionRequest, SamplingFields
from prefixcache.server.requests import Job, JobMaker, fields_named, parse_prompts


def probe_router(maker: JobMaker) -> APIRouter:
    """The endpoint, for one served model."""
    router = APIRouter()

    @router.post("/prefix_cache/probe")
    async def probe_prefix_cache(request: Request) -> dict[str, int]:
        body, call = await read_body(request), new_call(request, "probe")
        if "messages" in body:
            return await _probe_chat(maker, body, call)
        return await _probe_completion(maker, body, call)

    return router


async def _probe_chat(maker: JobMaker, body: dict[str, Any], call: Call) -> dict[str, int]:
    fields = parse_fields(body, ChatRequest)
    _check_salt(fields, call.caller)
    with fields_named(chat_names(fields)):
        return _counts(maker, await chat_job(maker, fields, call))


async def _probe_completion(maker: JobMaker, body: dict[str, Any], call: Call) -> dict[str, int]:
    fields = parse_fields(body, CompletionRequest)
    _check_salt(fields, call.caller)
    prompts = parse_prompts(fields.prompt)
    return _counts(maker, await completion_job(maker, fields, prompts, call))


def _check_salt(fields: SamplingFields, caller: Caller) -> None:
    if fields.cache_salt is None and caller.namespace is not None and not caller.is_admin:
        raise InvalidRequestError(
            "With API keys a probe needs cache_salt: it tells of prompts that were sent with this "
            "key and salt, and not of other clients' prompts.",
            param="cache_salt",
        )


def _counts(maker: JobMaker, job: Job) -> dict[str, int]:
    """Sums over the prompts, each counted once as in an answer's `usage`.

    Prompts of a list are looked up one by one, as if the others were not sent.
    """
    requests = job.requests[:: job.params.n]
    return {
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "cached_tokens": sum(map(maker.engine.probe, requests)),
    }
