"""What embeddings and ranks share: requests that read something of a prompt's last token.

Their prompts are computed and cached as any other's, so a prefix that they share is a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from prefixcache.server.http.body import RequestFields
from prefixcache.server.http.errors import ApiError
from prefixcache.server.http.sse import unless_disconnected
from prefixcache.server.jobs.answers import gathered, usage
from prefixcache.server.jobs.caching import PromptCaching
from prefixcache.server.jobs.context import new_call
from prefixcache.server.jobs.encode import EncodedPrompts
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.jobs.sampling_fields import SamplingFields
from prefixcache.server.openai.completions import encode_prompts
from prefixcache.types.pooling import Pooling
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenIds

Row: TypeAlias = npt.NDArray[np.float32]


class PooledFields(RequestFields):
    """What such endpoints take besides their texts."""

    no_effect = frozenset({"user", "truncation_side"})
    max_lengths = {  # noqa: RUF012 - pydantic's own
        name: SamplingFields.max_lengths[name] for name in ("cache_salt", "model")
    }

    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache_read: bool | None = None
    cache_write: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    def job_fields(self) -> SamplingFields:
        """The same fields, of a completion without an answer."""
        given = {name: getattr(self, name) for name in PooledFields.model_fields}
        return SamplingFields(**given, max_tokens=0)


def check_pooling(maker: JobMaker, wanted: str, what: str) -> None:
    """Raises `ApiError` (404) where the served model gives none of `what`."""
    pooling = maker.served.pooling
    if pooling == wanted:
        return
    why = f"the server was started without --pooling {wanted}"
    if pooling not in (None, "last", "rank"):
        why = f"its files ask for the pooling {pooling}, and only last and rank are supported"
    raise ApiError(
        HTTPStatus.NOT_FOUND,
        f"The model {maker.served.names[0]!r} gives no {what}: {why}.",
        code="unsupported_endpoint",
    )


async def run_pooled(
    maker: JobMaker,
    request: Request,
    fields: PooledFields,
    prompts: Sequence[str | TokenIds],
    pooling: Pooling,
    prefix: str,
) -> tuple[Job, list[Row], dict[str, Any]]:
    """The job of all prompts, the row of each, and the usage.

    Raises `ApiError` (503) where a prompt was aborted, as new weights may do, and has no row.
    """
    model = maker.check_model(fields.model)
    given = fields.job_fields()
    special, kept = fields.add_special_tokens is not False, maker.encoder.num_kept(given)
    encoded = await encode_prompts(maker, prompts, special, kept)
    params = SamplingParams(max_tokens=0, temperature=0, pooling=pooling)
    made = EncodedPrompts(encoded, PromptCaching(), sources=[None] * len(encoded))
    call = new_call(request, prefix)
    job = await maker.job(given, made, params, model=model, call=call)
    choices = await unless_disconnected(request.receive, gathered(maker, job))
    rows = [row for choice in choices if (row := choice.last.ending.pooled) is not None]
    if len(rows) < len(choices):
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "The request was aborted before all its prompts were computed. Send it again.",
            code="aborted",
            retry_after=1,
        )
    return job, rows, usage(choices.counts)
