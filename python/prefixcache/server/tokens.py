"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from prefixcache.server.body import parse_fields, read_body
from prefixcache.server.chat import chat_prompt
from prefixcache.server.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from prefixcache.server.requests import JobMaker, check_ids


def tokens_router(maker: JobMaker) -> APIRouter:
    """The endpoints, for one served model."""
    router = APIRouter()
    tokenizer = maker.served.tokenizer

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request)
        model = TokenizeChatRequest if "messages" in body else TokenizeRequest
        fields = parse_fields(body, model)
        maker.check_model(fields.model)
        ids = await _token_ids(maker, fields)
        names = [tokenizer.token(token_id) for token_id in ids]
        return {
            "count": len(ids),
            "max_model_len": maker.engine.max_model_len,
            "tokens": ids,
            "token_strs": names if fields.return_token_strs else None,
        }

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        fields = parse_fields(await read_body(request), DetokenizeRequest)
        maker.check_model(fields.model)
        check_ids(fields.tokens, tokenizer, "tokens")
        return {"prompt": tokenizer.decode(fields.tokens, skip_special_tokens=False)}

    return router


async def _token_ids(maker: JobMaker, fields: TokenizeRequest | TokenizeChatRequest) -> list[int]:
    if isinstance(fields, TokenizeChatRequest):
        special = fields.add_special_tokens is True
        return await chat_prompt(maker, fields, add_special_tokens=special)
    special = fields.add_special_tokens is not False
    return await maker.encode(fields.prompt, param="prompt", add_special_tokens=special)
