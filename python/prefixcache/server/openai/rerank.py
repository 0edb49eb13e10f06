"""`POST /v1/rerank` and `POST /score`: how well documents answer a query, from 0 to 1.

The prompt is that of the published Qwen3-Reranker models, https://arxiv.org/abs/2506.05176: they
say yes or no, and the rank is the probability of yes among these two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.requests import Request

from prefixcache.exceptions import wrong
from prefixcache.server.http.body import Strings
from prefixcache.server.http.routes import NUMBER, Router, describes
from prefixcache.server.jobs.context import read_fields
from prefixcache.server.jobs.field_names import fields_named
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.jobs.params import check_num_sequences
from prefixcache.server.openai.pooled import PooledFields, Row, check_pooling, run_pooled
from prefixcache.server.options.limits import MAX_BODY_BYTES
from prefixcache.server.options.pooling import rank_tokens
from prefixcache.types.pooling import Pooling

_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Document(BaseModel, strict=True):
    """A document as an object."""

    text: str


class RerankRequest(PooledFields):
    """Body of `POST /v1/rerank`, as Jina, Cohere and vLLM have it."""

    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True)]
    instruction: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreRequest(PooledFields):
    """Body of vLLM's `POST /score`: pairs of texts, or one text and many."""

    text_1: str | Strings
    text_2: str | Strings
    instruction: str | None = None


def rerank_router(maker: JobMaker) -> Router:
    """The endpoints, for one served model."""
    router = Router()

    @router.post("/rerank", include_in_schema=False)
    @router.post("/v2/rerank", include_in_schema=False)
    @router.post("/v1/rerank")
    @describes(
        "Orders documents by how well they answer a query, where the model ranks.",
        {
            "id": str,
            "model": str,
            "results": [{"index": int, "relevance_score": NUMBER}],
            "usage": {"prompt_tokens": int, "total_tokens": int},
        },
        statuses=(404,),
        models=(RerankRequest,),
        example={"query": "What is the capital of Japan?", "documents": ["Tokyo.", "A hat."]},
    )
    async def rerank(request: Request) -> dict[str, Any]:
        check_pooling(maker, "rank", "ranks")
        fields, _ = await read_fields(request, maker.workers, RerankRequest)
        texts = [text if isinstance(text, str) else text.text for text in fields.documents]
        if fields.top_n is not None and fields.top_n < 0:
            raise wrong("top_n", f"must be a number of documents, or 0 for all, got {fields.top_n}")
        pairs = [(fields.query, text) for text in texts]
        job, scores, counts = await _scores(maker, request, fields, pairs, "rerank", "documents")
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: fields.top_n or None]
        shown = fields.return_documents is not False
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if shown else {})
            for index in order
        ]
        return {"id": job.call.id, "model": job.model, "usage": counts, "results": results}

    @router.post("/v1/score", include_in_schema=False)
    @router.post("/score")
    @describes(
        "How well texts answer others, from 0 to 1, where the model ranks.",
        {
            "id": str,
            "object": "list",
            "model": str,
            "data": [{"index": int, "object": "score", "score": NUMBER}],
            "usage": {"prompt_tokens": int, "total_tokens": int},
        },
        statuses=(404,),
        models=(ScoreRequest,),
        example={"text_1": "What is the capital of Japan?", "text_2": ["Tokyo.", "A hat."]},
    )
    async def score(request: Request) -> dict[str, Any]:
        check_pooling(maker, "rank", "scores")
        fields, _ = await read_fields(request, maker.workers, ScoreRequest)
        pairs = _pairs(fields.text_1, fields.text_2)
        job, scores, counts = await _scores(maker, request, fields, pairs, "score", "text_2")
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        head = {"id": job.call.id, "object": "list", "created": job.created, "model": job.model}
        return head | {"data": data, "usage": counts}

    return router


def _pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    firsts = [first] if isinstance(first, str) else first
    seconds = [second] if isinstance(second, str) else second
    if len(firsts) == 1:
        firsts = [*firsts] * len(seconds)
    if len(firsts) != len(seconds):
        raise wrong("text_1", "must be one text, or as many as text_2 has")
    return [*zip(firsts, seconds, strict=True)]


async def _scores(
    maker: JobMaker,
    request: Request,
    fields: RerankRequest | ScoreRequest,
    pairs: Sequence[tuple[str, str]],
    prefix: str,
    param: str,
) -> tuple[Job, list[float], dict[str, Any]]:
    """The job, the probability of "yes" for each pair, and the usage. Errors name `param`."""
    if not pairs:
        raise wrong(param, "must not be empty")
    tokens = rank_tokens(maker.served.tokenizer) or ()
    with fields_named({"prompt": param}):
        check_num_sequences(len(pairs), 1)
        _check_size(pairs, fields.instruction or "", param)
        prompts = [_prompt(query, text, fields.instruction) for query, text in pairs]
        pooling = Pooling(tokens)
        job, rows, counts = await run_pooled(maker, request, fields, prompts, pooling, prefix)
    return job, [*map(_probability, rows)], counts


def _check_size(pairs: Sequence[tuple[str, str]], instruction: str, param: str) -> None:
    """Raises `InvalidRequestError`: each prompt repeats the query, which may be long."""
    size = sum(len(query) + len(text) + len(instruction) for query, text in pairs)
    if size > MAX_BODY_BYTES:
        raise wrong(
            param,
            f"may have at most {MAX_BODY_BYTES} characters with the query before each, got {size}",
            code="too_long",
        )


def _prompt(query: str, document: str, instruction: str | None) -> str:
    """A query that clients of vLLM have written as the prompt's beginning stays as it is."""
    if query.startswith("<|im_start|>"):
        return query + document
    head = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}"
    return f"{_BEGIN}{head}\n<Document>: {document}{_END}"


def _probability(row: Row) -> float:
    """Of yes, of the logits of yes and no."""
    yes, no = row.tolist()
    return 1 / (1 + math.exp(min(no - yes, 700.0)))
