"""`POST /prefix_cache/probe`: how much of a request is cached, without sending it.

The body is that of a completion, a chat, a response or a message, and is checked as one. The answer
is read from the cache beside the engine's loop: it waits for no step, changes nothing, and is true
at this moment.

Where clients have keys, a probe needs a salt: it would tell one client what others have asked.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from prefixcache.server.cache.prompt_body import prompt_job
from prefixcache.server.jobs.diagnosis import check_may_ask
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.openai.response_store import ResponseStore
from prefixcache.types.request import Request as EngineRequest

# Prompts looked up in one go; then it is another client's turn.
_PROMPTS_AT_ONCE = 64


def probe_router(maker: JobMaker, store: ResponseStore) -> APIRouter:
    """The endpoint, for one served model and the responses that a body may go on from."""
    router = APIRouter()

    @router.post("/prefix_cache/probe")
    async def probe_prefix_cache(request: Request) -> dict[str, int]:
        job = await prompt_job(request, maker, store, "probe")
        check_may_ask(job.call.caller, job.requests[0].cache.salt, "a probe")
        return await _counts(maker, job)

    return router


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
        "cached_tokens": sum([sum(await maker.engine.probe_all(part)) for part in parts]),
    }


def _length(request: EngineRequest) -> int:
    return len(request.prompt_token_ids)
