"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from prefixcache.server.http.body import parse_fields
from prefixcache.server.http.json_text import json_response, list_json, text_json
from prefixcache.server.http.routes import TOKENS, Router, describes
from prefixcache.server.jobs.context import read_fields, read_parsed
from prefixcache.server.jobs.job_maker import JobMaker
from prefixcache.server.jobs.params import check_ids
from prefixcache.server.openai.chat import chat_tokens
from prefixcache.server.openai.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from prefixcache.types.token_ids import TokenIds


def tokenize_router(maker: JobMaker) -> Router:
    """The endpoints, for one served model."""
    router = Router()
    workers = maker.workers

    @router.post("/tokenize")
    @describes(
        "Token ids of a text or of a chat.",
        {"count": int, "max_model_len": int, "tokens": TOKENS},
        models=(TokenizeRequest, TokenizeChatRequest),
        example={"prompt": "Hello"},
    )
    async def tokenize(request: Request) -> Response:
        fields, _, size = await read_parsed(request, workers, _parse)
        maker.check_model(fields.model)
        ids = await _token_ids(maker, fields, size)
        write = partial(_token_json, maker, ids, bool(fields.return_token_strs))
        return json_response(await workers.run(len(ids), write))

    @router.post("/detokenize")
    @describes(
        "The text of token ids.",
        {"prompt": str},
        models=(DetokenizeRequest,),
        example={"tokens": [1, 2, 3]},
    )
    async def detokenize(request: Request) -> Response:
        fields, size = await read_fields(request, workers, DetokenizeRequest)
        maker.check_model(fields.model)
        return json_response(await workers.run(size, partial(_text, maker, fields)))

    return router


def _parse(values: dict[str, Any]) -> tuple[TokenizeRequest | TokenizeChatRequest, None]:
    model = TokenizeChatRequest if "messages" in values else TokenizeRequest
    return parse_fields(values, model), None


async def _token_ids(
    maker: JobMaker, fields: TokenizeRequest | TokenizeChatRequest, size: int
) -> TokenIds:
    if isinstance(fields, TokenizeChatRequest):
        special = fields.add_special_tokens is True
        return await chat_tokens(maker, fields, size, add_special_tokens=special)
    special = fields.add_special_tokens is not False
    return await maker.encoder.encode(fields.prompt, param="prompt", add_special_tokens=special)


def _token_json(maker: JobMaker, ids: TokenIds, with_names: bool) -> bytes:
    token = maker.served.tokenizer.token
    names = list_json([token(token_id) for token_id in ids.tolist()]) if with_names else b"null"
    return b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
        len(ids),
        maker.engine.max_model_len,
        list_json(ids.tolist()),
        names,
    )


def _text(maker: JobMaker, fields: DetokenizeRequest) -> bytes:
    tokenizer = maker.served.tokenizer
    check_ids(fields.tokens, tokenizer, "tokens")
    text = tokenizer.decode_long(fields.tokens, skip_special_tokens=False)
    return b'{"prompt":%b}' % text_json(text)
