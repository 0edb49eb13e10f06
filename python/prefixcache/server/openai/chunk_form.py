"""OpenAI's answers of several choices, whose streams are chunks of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from prefixcache.server.http.errors import error_body
from prefixcache.server.jobs.answers import AnswerChoice, Choices, diagnosis_fields, usage
from prefixcache.server.jobs.job_maker import Job
from prefixcache.server.jobs.sampling_fields import SamplingFields, StreamOptions
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import RequestOutput


class ChunkForm(ABC):
    """An `AnswerForm`; `chunk_kind` is the `object` of what is streamed."""

    is_named: ClassVar[bool] = False
    chunk_kind: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer, fields: SamplingFields) -> None:
        options = fields.stream_options or StreamOptions()
        self._tokenizer = tokenizer
        self._always_counts = bool(options.continuous_usage_stats)
        self._counts = bool(options.include_usage) or self._always_counts
        self._tells_ids = bool(fields.return_token_ids)
        self._tells_weights = bool(fields.return_weight_versions)
        self._num_prompt_logprobs = fields.prompt_logprobs

    @abstractmethod
    def response(self, job: Job, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """The whole answer, without what it says of all choices together."""

    @abstractmethod
    def chunks(
        self, job: Job, choice: AnswerChoice, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """What is streamed when `output` was added to `choice`, as `response`."""

    def body(self, job: Job, choices: Choices) -> dict[str, Any]:
        """The whole answer."""
        counted = {"usage": usage(choices.counts)}
        return {**self.response(job, choices), **counted, **diagnosis_fields(job)}

    def begin(self, job: Job) -> Sequence[dict[str, Any]]:  # noqa: ARG002
        """Nothing: a choice begins with its own first chunk."""
        return ()

    def events(
        self, job: Job, choices: Choices, index: int, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """The chunks of an output."""
        shown: dict[str, Any] = {}
        if self._counts:
            shown["usage"] = usage(choices.counts) if self._always_counts else None
        for chunk in self.chunks(job, choices[index], output):
            yield {**chunk, **shown}

    def end(self, job: Job, choices: Choices) -> Iterator[dict[str, Any]]:
        """A last chunk of no choice, where there is something to say of all."""
        shown = {"usage": usage(choices.counts)} if self._counts else {}
        shown |= diagnosis_fields(job)
        if shown:
            yield {**head(job, self.chunk_kind), "choices": [], **shown}

    def failed(self, job: Job, error: Exception) -> dict[str, Any]:  # noqa: ARG002
        """The event of an answer that failed."""
        return error_body(error)[1]


def head(job: Job, kind: str) -> dict[str, Any]:
    """The first members of OpenAI's objects of a `kind`."""
    return {"id": job.call.id, "object": kind, "created": job.created, "model": job.model}
