"""`POST /prefix_cache/warm`: computes the prompt of a body and keeps it, so that its next use hits.

The body is that of a completion, a chat, a response or a message, its caching controls and
retention hints included.
What it says of the answer has no effect: there is none. The request waits for its turn as any.
"""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, Request

from prefixcache.server.cache.prompt_body import prompt_job
from prefixcache.server.http.sse import unless_disconnected
from prefixcache.server.jobs.answers import gathered, usage
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.openai.response_store import ResponseStore
from prefixcache.types.request import Request as EngineRequest
from prefixcache.types.sampling_params import SamplingParams

_PROMPT_ALONE = SamplingParams(max_tokens=0, temperature=0)


def warm_router(maker: JobMaker, store: ResponseStore) -> APIRouter:
    """The endpoint, for one served model and the responses that a body may go on from."""
    router = APIRouter()

    @router.post("/prefix_cache/warm")
    async def warm_prefix_cache(request: Request) -> dict[str, int]:
        job = _prompts_alone(await prompt_job(request, maker, store, "warm"))
        choices = await unless_disconnected(request.receive, gathered(maker, job))
        counts = usage(choices.counts)
        return {"prompt_tokens": counts["prompt_tokens"], **counts["prompt_tokens_details"]}

    return router


def _prompts_alone(job: Job) -> Job:
    requests = job.requests[:: job.params.n]
    return dataclasses.replace(
        job, params=_PROMPT_ALONE, requests=tuple(map(_prompt_alone, requests))
    )


def _prompt_alone(request: EngineRequest) -> EngineRequest:
    cache = dataclasses.replace(request.cache, hit_threshold=0.0)
    return dataclasses.replace(request, params=_PROMPT_ALONE, cache=cache)
