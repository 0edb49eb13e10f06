"""Why prompts were not cached.

`POST /prefix_cache/explain` takes the body of a completion, a chat, a response or a message, checks
it as one, and says how much of it is cached and why no more; nothing is computed. The answer holds
only what the caller may know: see `jobs/diagnosis.py`. `GET /prefix_cache/misses` says which
prompts were computed again, why, and what to do about it. It is the administrator's, since it shows
what clients sent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from prefixcache.diagnostics.advice import summarize
from prefixcache.diagnostics.room import CacheDiagnostics
from prefixcache.server.cache.prompt_body import describes_prompt, prompt_job
from prefixcache.server.http.json_text import json_response, object_json
from prefixcache.server.http.paging import page_limit
from prefixcache.server.http.routes import Router, describes, limit_parameter
from prefixcache.server.jobs.diagnosis import Diagnosis, check_may_ask, diagnostics_off
from prefixcache.server.jobs.job_maker import JobMaker
from prefixcache.server.openai.response_store import ResponseStore

_MOST_FINDINGS = 1000
_EXPLANATION = {"prompt_tokens": int, "cached_tokens": int, "reason": str, "description": str}
_MISSES = {
    "num_requests": int,
    "prompt_tokens": int,
    "cached_tokens": int,
    "tokens_recomputed": int,
    "num_findings": int,
    "findings": [{"reason": str, "tokens_recomputed": int, "description": str}],
}


def misses_router(maker: JobMaker, store: ResponseStore) -> Router:
    """The endpoints, for one served model and the responses that a body may go on from."""
    router = Router()

    @router.post("/prefix_cache/explain")
    @describes_prompt(
        "How many tokens of a request's prompt are cached now, and why no more.",
        {"prompt_tokens": int, "cached_tokens": int, "prompts": [_EXPLANATION]},
    )
    async def explain_prefix_cache(request: Request) -> Response:
        job = await prompt_job(request, maker, store, "explain")
        check_may_ask(job.call.caller, job.requests[0].cache.salt, "an explanation")
        diagnosis = job.diagnosis
        if diagnosis is None:
            raise diagnostics_off("/prefix_cache/explain")
        for prompt in job.requests[:: job.params.n]:
            maker.engine.check(prompt)
        diagnosis.explains = True
        return json_response(await maker.workers.in_thread(partial(_explained, diagnosis)))

    @router.get("/prefix_cache/misses")
    @describes(
        "Which prompts were computed again, why, and what to do about it.",
        _MISSES,
        parameters=(limit_parameter(_MOST_FINDINGS),),
    )
    async def show_misses(request: Request) -> dict[str, Any]:
        limit = page_limit(request.query_params, _MOST_FINDINGS)
        diagnostics = maker.diagnostics
        if diagnostics is None:
            raise diagnostics_off("/prefix_cache/misses")
        return await maker.workers.in_thread(partial(_summary, diagnostics, limit))

    return router


def _explained(diagnosis: Diagnosis) -> bytes:
    """The answer's JSON: of thousands of prompts it is long, and so nothing for the event loop."""
    diagnosis.explain()
    prompts = diagnosis.explanations or []
    counts = ("prompt_tokens", "cached_tokens", "disk_tokens")
    sums = {name: sum(prompt[name] for prompt in prompts) for name in counts}
    return object_json({**sums, "prompts": prompts})


def _summary(diagnostics: CacheDiagnostics, limit: int) -> dict[str, Any]:
    diagnostics.settle()
    summary = summarize(diagnostics.history.prompts(), block_size=diagnostics.block_size)
    return {
        "since": summary.since,
        "num_requests": summary.num_requests,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "disk_cached_tokens": summary.disk_cached_tokens,
        "tokens_recomputed": summary.tokens_recomputed,
        "num_findings": len(summary.findings),
        "findings": [finding.as_json() for finding in summary.findings[:limit]],
    }
