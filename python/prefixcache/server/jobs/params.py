"""From the fields of a body to checked sampling options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from prefixcache.exceptions import InvalidRequestError, wrong
from prefixcache.server.jobs.sampling_fields import SamplingFields
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.options.limits import MAX_SEQUENCES
from prefixcache.text.tokenization.tokenizer import Tokenizer, with_bad_words
from prefixcache.types.sampling_params import SamplingParams

# Fields of a body that are sampling options as they are.
_PASSED_ON = (
    SamplingFields.model_fields.keys()
    & {field.name for field in dataclasses.fields(SamplingParams)}
) - {"max_tokens", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"}


def sampling_params(
    fields: SamplingFields,
    served: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Checked sampling options. What the request leaves out comes from the model's defaults."""
    _check_stream_fields(fields)
    given = {name: getattr(fields, name) for name in _PASSED_ON}
    chosen = {name: value for name, value in given.items() if value is not None}
    allowed, structured = fields.allowed_token_ids, fields.structured_output
    params = SamplingParams(
        **{**served.generation.sampling_options(), **chosen},
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        structured_output=None if structured is None else structured[1],
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(fields.bad_words or ()),
    )
    check_ids(params.stop_token_ids, served.tokenizer, "stop_token_ids")
    return with_bad_words(params, served.tokenizer)


def _check_stream_fields(fields: SamplingFields) -> None:
    if fields.stream and fields.prompt_logprobs is not None:
        raise wrong("prompt_logprobs", "cannot be streamed; set stream to false")
    if fields.stream_options is not None and not fields.stream:
        raise wrong("stream_options", "needs stream to be true")


def check_num_sequences(num_prompts: int, n: int) -> None:
    """Raises `InvalidRequestError` for more answers than one request may ask for."""
    if num_prompts * n > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={n} are more than {MAX_SEQUENCES} answers.",
            param="n" if n > 1 else "prompt",
        )


def check_ids(token_ids: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    """Raises `InvalidRequestError` for ids outside the vocabulary."""
    unknown = next((i for i in token_ids if not 0 <= i < tokenizer.vocab_size), None)
    if unknown is not None:
        raise wrong(
            param, f"holds the token id {unknown}; ids are from 0 to {tokenizer.vocab_size - 1}"
        )


def choice_params(params: SamplingParams, max_tokens: int | None) -> tuple[SamplingParams, ...]:
    """The options of each of `params.n` choices, which share all but their seeds."""
    fitted = params.shortened(max_tokens)
    if params.seed is None:
        return (fitted.for_choice(0),) * params.n
    return tuple(fitted.for_choice(choice) for choice in range(params.n))


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        biases = {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        biases = {}
    if [*map(str, biases)] != [*bias]:  # int also takes "+1", " 1", "1_0" and digits of all scripts
        raise wrong("logit_bias", "must map token ids to numbers")
    return biases
