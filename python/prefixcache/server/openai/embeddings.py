"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from prefixcache.exceptions import wrong
from prefixcache.server.http.body import parse_fields
from prefixcache.server.http.json_text import Written, json_response, list_json, object_json
from prefixcache.server.http.routes import NUMBER, PROMPT, Router, describes
from prefixcache.server.jobs.context import read_parsed
from prefixcache.server.jobs.encode import parse_prompts
from prefixcache.server.jobs.field_names import fields_named
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.openai.pooled import PooledFields, Row, check_pooling, run_pooled
from prefixcache.types.pooling import Pooling, unit
from prefixcache.types.token_ids import TokenIds


class EmbeddingRequest(PooledFields):
    """Body of `POST /v1/embeddings`. `input`: text, token ids, or a list of either."""

    input: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


def embeddings_router(maker: JobMaker) -> Router:
    """The endpoint, for one served model."""
    router = Router()

    @router.post("/v1/embeddings")
    @describes(
        "Embeddings of texts, where the model gives them.",
        {
            "id": str,
            "object": "list",
            "model": str,
            "data": [{"object": "embedding", "index": int, "embedding": (str, [NUMBER])}],
            "usage": {"prompt_tokens": int, "total_tokens": int},
        },
        statuses=(404,),
        models=(EmbeddingRequest,),
        properties={"input": PROMPT},
        example={"input": "Hello"},
    )
    async def create_embedding(request: Request) -> Response:
        check_pooling(maker, "last", "embeddings")
        with fields_named({"prompt": "input"}):
            fields, prompts, _ = await read_parsed(request, maker.workers, _parse)
            _check_dimensions(fields.dimensions, maker.served.hidden_size)
            job, rows, counts = await run_pooled(maker, request, fields, prompts, Pooling(), "embd")
        write = partial(_body, fields, job, rows, counts)
        return json_response(await maker.workers.run(sum(map(len, rows)), write))

    return router


def _parse(values: dict[str, Any]) -> tuple[EmbeddingRequest, list[str | TokenIds]]:
    fields = parse_fields(values, EmbeddingRequest)
    return fields, parse_prompts(fields.input)


def _check_dimensions(dimensions: int | None, most: int) -> None:
    """Raises `InvalidRequestError` for other than 1 to `most`."""
    if dimensions is not None and not 1 <= dimensions <= most:
        raise wrong("dimensions", f"must be from 1 to {most}, got {dimensions}")


def _body(fields: EmbeddingRequest, job: Job, rows: Sequence[Row], counts: dict[str, Any]) -> bytes:
    body = {
        "id": job.call.id,
        "object": "list",
        "created": job.created,
        "model": job.model,
        "data": _embeddings(fields, rows),
        "usage": counts,
    }
    return object_json(body)


def _embeddings(fields: EmbeddingRequest, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        shown = _shown(_cut(row, fields.dimensions), fields.encoding_format)
        yield {"object": "embedding", "index": index, "embedding": shown}


def _cut(row: Row, dimensions: int | None) -> Row:
    """The first `dimensions` numbers, of length 1 again, as models trained for it allow."""
    return row if dimensions is None else unit(row[:dimensions])


def _shown(row: Row, form: str | None) -> str | Written:
    if form == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    return Written(list_json(nine_digits(row)))  # Number by number it takes ten times as long.


def nine_digits(row: Row) -> list[float]:
    """As many as tell float32 numbers apart; float64's seventeen take half as many bytes more."""
    numbers = row.astype(np.float64)
    magnitudes = np.abs(np.where(numbers == 0, 1, numbers))
    scale = 10.0 ** (8 - np.floor(np.log10(magnitudes)))
    return (np.rint(numbers * scale) / scale).tolist()
