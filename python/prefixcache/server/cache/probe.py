"""`POST /prefix_cache/probe` and `/prefix_cache/warm`: prompts that are looked up, or computed.

Both take the body of a completion, a chat, a response or a message, and check it as one.

A probe tells how much of a prompt is cached. It is read from the cache in parallel with the
engine's loop: it waits for no step, changes nothing, and is true at this moment. Where clients have
keys, it needs a salt: it would tell one client what others have asked.

Warming computes the prompt and keeps it, so that its next use hits. Caching controls and retention
hints count; what the body says of the answer has no effect, since there is none.
"""

from __future__ import annotations

import dataclasses

from starlette.requests import Request

from prefixcache.server.cache.prompt_body import describes_prompt, prompt_job
from prefixcache.server.http.routes import Router
from prefixcache.server.http.sse import unless_disconnected
from prefixcache.server.jobs.answers import gathered, usage
from prefixcache.server.jobs.diagnosis import check_may_ask
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.openai.response_store import ResponseStore
from prefixcache.types.request import Request as EngineRequest
from prefixcache.types.sampling_params import SamplingParams

# Prompts looked up in one go; then it is another client's turn.
_PROMPTS_AT_ONCE = 64
_PROMPT_ALONE = SamplingParams(max_tokens=0, temperature=0)
_CACHED = {"prompt_tokens": int, "cached_tokens": int}


def probe_router(maker: JobMaker, store: ResponseStore) -> Router:
    """The endpoints, for one served model and the responses that a body may go on from."""
    router = Router()

    @router.post("/prefix_cache/probe")
    @describes_prompt("How many tokens of a request's prompt are cached now.", _CACHED)
    async def probe_prefix_cache(request: Request) -> dict[str, int]:
        job = await prompt_job(request, maker, store, "probe")
        check_may_ask(job.call.caller, job.requests[0].cache.salt, "a probe")
        return await _counts(maker, job)

    @router.post("/prefix_cache/warm")
    @describes_prompt("Computes a request's prompt and keeps it.", _CACHED)
    async def warm_prefix_cache(request: Request) -> dict[str, int]:
        job = await prompt_job(request, maker, store, "warm")
        prompts = tuple(map(_prompt_alone, job.requests[:: job.params.n]))
        job = dataclasses.replace(job, params=_PROMPT_ALONE, requests=prompts)
        choices = await unless_disconnected(request.receive, gathered(maker, job))
        counts = usage(choices.counts)
        return {"prompt_tokens": counts["prompt_tokens"], **counts["prompt_tokens_details"]}

    return router


async def _counts(maker: JobMaker, job: Job) -> dict[str, int]:
    """Sums over the prompts, each counted once as in an answer's `usage`.

    Prompts of a list are looked up one by one, as if the others were not sent.
    """
    requests = job.requests[:: job.params.n]
    cached = 0
    for begin in range(0, len(requests), _PROMPTS_AT_ONCE):
        cached += sum(await maker.engine.probe_all(requests[begin : begin + _PROMPTS_AT_ONCE]))
    length = sum(len(request.prompt_token_ids) for request in requests)
    return {"prompt_tokens": length, "cached_tokens": cached}


def _prompt_alone(request: EngineRequest) -> EngineRequest:
    return dataclasses.replace(request, params=_PROMPT_ALONE)
