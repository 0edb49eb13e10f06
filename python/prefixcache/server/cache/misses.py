"""`GET /prefix_cache/misses`: which prompts were computed again, why, and what to do about it.

The administrator's: it shows what clients sent.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from prefixcache.diagnostics.advice import Summary, summarize
from prefixcache.diagnostics.room import CacheDiagnostics
from prefixcache.exceptions import wrong
from prefixcache.server.jobs.diagnosis import diagnostics_off
from prefixcache.server.jobs.job_maker import JobMaker

_MOST = 1000


def misses_router(maker: JobMaker) -> APIRouter:
    """The endpoint, for one served model."""
    router = APIRouter()

    @router.get("/prefix_cache/misses")
    async def show_misses(request: Request) -> dict[str, Any]:
        limit = _limit(request.query_params.get("limit", "20"))
        diagnostics = maker.diagnostics
        if diagnostics is None:
            raise diagnostics_off("/prefix_cache/misses")
        summary = await maker.workers.beside(lambda: _summary(diagnostics))
        return _told(summary, limit)

    return router


def _limit(given: str) -> int:
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= _MOST):
        raise wrong("limit", f"must be from 1 to {_MOST}")
    return int(given[:9])


def _summary(diagnostics: CacheDiagnostics) -> Summary:
    diagnostics.settle()
    return summarize(diagnostics.history.prompts(), block_size=diagnostics.block_size)


def _told(summary: Summary, limit: int) -> dict[str, Any]:
    return {
        "since": summary.since,
        "num_requests": summary.num_requests,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "tokens_recomputed": summary.tokens_recomputed,
        "num_findings": len(summary.findings),
        "findings": [finding.as_json() for finding in summary.findings[:limit]],
    }
