"""`POST /prefix_cache/explain`: how much of a request is cached, and why no more.

The body is that of a completion, a chat, a response or a message, and is checked as one; nothing
is computed. What is told is what may be told to who asks: see `diagnosis.py`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from prefixcache.server.diagnosis import check_may_ask
from prefixcache.server.job_maker import JobMaker, diagnostics_off
from prefixcache.server.prompt_body import prompt_job
from prefixcache.server.response_store import ResponseStore


def explain_router(maker: JobMaker, store: ResponseStore) -> APIRouter:
    """The endpoint, for one served model and the responses that a body may go on from."""
    router = APIRouter()

    @router.post("/prefix_cache/explain")
    async def explain_prefix_cache(request: Request) -> dict[str, Any]:
        job = await prompt_job(request, maker, store, "explain")
        check_may_ask(job.call.caller, job.requests[0].cache.salt, "an explanation")
        diagnosis = job.diagnosis
        if diagnosis is None:
            raise diagnostics_off("/prefix_cache/explain")
        for one in job.requests[:: job.params.n]:
            maker.engine.check(one)
        diagnosis.explains = True
        await maker.workers.beside(diagnosis.explain)
        prompts = diagnosis.explanations or []
        counts = ("prompt_tokens", "cached_tokens")
        return {**{name: sum(one[name] for one in prompts) for name in counts}, "prompts": prompts}

    return router
