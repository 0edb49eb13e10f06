"""Endpoints of OpenAI and vLLM that clients look for and that are not served here."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter

from prefixcache.server.http.errors import ApiError


def not_served_router() -> APIRouter:
    """Answers them by their names, so that nobody takes them for a wrong address."""
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def create_embedding() -> None:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            "/v1/embeddings is not served: this server generates text and computes no embeddings.",
            code="unsupported_endpoint",
        )

    return router
