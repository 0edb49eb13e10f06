"""`POST /prefix_cache/explain`: how much of a request is cached, and why no more.

The body is that of a completion, a chat, a response or a message, and is checked as one; nothing
is computed. What is told is what may be told to who asks: see `diagnosis.py`.
"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from prefixcache.server.cache.prompt_body import prompt_job
from prefixcache.server.http.json_text import json_response, object_json
from prefixcache.server.jobs.diagnosis import Diagnosis, check_may_ask, diagnostics_off
from prefixcache.server.jobs.job_maker import JobMaker
from prefixcache.server.openai.response_store import ResponseStore


def explain_router(maker: JobMaker, store: ResponseStore) -> APIRouter:
    """The endpoint, for one served model and the responses that a body may go on from."""
    router = APIRouter()

    @router.post("/prefix_cache/explain")
    async def explain_prefix_cache(request: Request) -> Response:
        job = await prompt_job(request, maker, store, "explain")
        check_may_ask(job.call.caller, job.requests[0].cache.salt, "an explanation")
        diagnosis = job.diagnosis
        if diagnosis is None:
            raise diagnostics_off("/prefix_cache/explain")
        for one in job.requests[:: job.params.n]:
            maker.engine.check(one)
        diagnosis.explains = True
        return json_response(await maker.workers.beside(partial(_told, diagnosis)))

    return router


def _told(diagnosis: Diagnosis) -> bytes:
    """The answer's JSON: of thousands of prompts it is long, and so nothing for the event loop."""
    diagnosis.explain()
    prompts = diagnosis.explanations or []
    counts = ("prompt_tokens", "cached_tokens")
    sums = {name: sum(one[name] for one in prompts) for name in counts}
    return object_json({**sums, "prompts": prompts})
