"""The model's names, as OpenAI's and Anthropic's clients list them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request

from prefixcache.server.http.errors import MODELS_PATH, has_anthropic_header
from prefixcache.server.http.paging import page
from prefixcache.server.http.routes import (
    ANTHROPIC_VERSION,
    Router,
    describes,
    limit_parameter,
    parameter,
)
from prefixcache.server.jobs.job_maker import JobMaker

# Anthropic's own limit of a page.
_MOST_MODELS = 1000
_CARD = {"id": str, "object": "model", "created": int, "max_model_len": int}
_ANTHROPIC_CARD = {"type": "model", "id": str, "display_name": str, "created_at": str}
_ANTHROPIC_CARDS = {"data": [_ANTHROPIC_CARD], "has_more": bool}


def models_router(maker: JobMaker) -> Router:
    """The endpoints of the served model's names, and those that clients look for in vain."""
    router, served = Router(), maker.served

    @router.get(MODELS_PATH)
    @describes(
        "The served model, under each of its names.",
        ({"object": "list", "data": [_CARD]}, _ANTHROPIC_CARDS),
        parameters=(
            ANTHROPIC_VERSION,
            limit_parameter(_MOST_MODELS),
            parameter("after_id"),
            parameter("before_id"),
        ),
    )
    async def list_models(request: Request) -> dict[str, Any]:
        if has_anthropic_header(request.scope):
            return _anthropic_cards(maker, request.query_params)
        return {"object": "list", "data": [_card(maker, name) for name in served.names]}

    @router.get(f"{MODELS_PATH}/{{name:path}}")
    @describes(
        "The served model.",
        (_CARD, _ANTHROPIC_CARD),
        statuses=(404,),
        parameters=(ANTHROPIC_VERSION,),
    )
    async def show_model(name: str, request: Request) -> dict[str, Any]:
        card = _anthropic_card if has_anthropic_header(request.scope) else _card
        return card(maker, maker.check_model(name))

    return router


def _anthropic_cards(maker: JobMaker, query: Mapping[str, str]) -> dict[str, Any]:
    """The page of names that the query asks for."""
    names = maker.served.names
    places, more = page(query, names, most=_MOST_MODELS, after="after_id", before="before_id")
    shown = [names[place] for place in places]
    return {
        "data": [_anthropic_card(maker, name) for name in shown],
        "has_more": more,
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def _anthropic_card(maker: JobMaker, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(maker.served.created, timezone.utc)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": maker.engine.max_model_len,
        "max_tokens": maker.engine.max_model_len,
    }


def _card(maker: JobMaker, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": maker.served.created,
        "owned_by": "prefixcache",
        "root": maker.served.root or name,
        "parent": None,
        "max_model_len": maker.engine.max_model_len,
    }
