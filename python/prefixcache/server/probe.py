"""`POST /prefix_cache/probe`: how much of a request is cached, without sending it.

The body is that of a completion or of a chat, and is checked as one. The answer is read from the
cache beside the engine's loop: it waits for no step, changes nothing, and is true at this moment.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from prefixcache.server.body import parse_fields, read_body
from prefixcache.server.chat import chat_job, chat_names
from prefixcache.server.completions import completion_job
from prefixcache.server.context import new_id
from prefixcache.server.protocol import ChatRequest, CompletionRequest
from prefixcache.server.requests import Job, JobMaker, fields_named, parse_prompts


def probe_router(maker: JobMaker) -> APIRouter:
    """The endpoint, for one served model."""
    router = APIRouter()

    @router.post("/prefix_cache/probe")
    async def probe_prefix_cache(request: Request) -> dict[str, int]:
        body, job_id = await read_body(request), new_id(request, "probe")
        if "messages" in body:
            return await _probe_chat(maker, body, job_id)
        return await _probe_completion(maker, body, job_id)

    return router


async def _probe_chat(maker: JobMaker, body: dict[str, Any], job_id: str) -> dict[str, int]:
    fields = parse_fields(body, ChatRequest)
    with fields_named(chat_names(fields)):
        return _counts(maker, await chat_job(maker, fields, job_id))


async def _probe_completion(maker: JobMaker, body: dict[str, Any], job_id: str) -> dict[str, int]:
    fields = parse_fields(body, CompletionRequest)
    prompts = parse_prompts(fields.prompt)
    return _counts(maker, await completion_job(maker, fields, prompts, job_id))


def _counts(maker: JobMaker, job: Job) -> dict[str, int]:
    """Sums over the prompts, each counted once as in an answer's `usage`.

    Prompts of a list are looked up one by one, as if the others were not sent.
    """
    requests = job.requests[:: job.params.n]
    return {
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "cached_tokens": sum(map(maker.engine.probe, requests)),
    }
