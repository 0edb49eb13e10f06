"""From the texts of a body to token ids, in turns with other clients' texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

from prefixcache.diagnostics.spans import PromptSource
from prefixcache.exceptions import InvalidRequestError, RequestTooLargeError, wrong
from prefixcache.server.http.workers import Workers
from prefixcache.server.jobs.caching import (
    CachingControls,
    Place,
    PromptCaching,
    breakpoint_ends,
    prompt_caching,
)
from prefixcache.server.jobs.params import check_num_sequences
from prefixcache.server.jobs.sampling_fields import SamplingFields
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.types.request import RoleSpan
from prefixcache.types.token_ids import TokenIds, as_token_ids

# Characters that are encoded in one go; then it is another client's turn.
_SLICE = 2**18
# What a text costs on top of its length, in characters.
_OVERHEAD = 256
# Tokens before those that are kept of a prompt's end, which may be other ones for the cut.
_CUT_TOKENS = 64


class EncodedPrompts(NamedTuple):
    """The prompts of one HTTP request, and what is known of each.

    `caching` is what the API's caching controls mean for it, `roles` who wrote which of its tokens,
    `sources` what each was made of, None for one that came as token ids. `prediction` is what the
    answers may look like.
    """

    token_ids: Sequence[TokenIds]
    caching: PromptCaching
    roles: tuple[RoleSpan, ...] = ()
    sources: Sequence[PromptSource | None] = ()
    prediction: TokenIds | None = None


class PromptEncoder:
    """Encodes the prompts of one served model; `workers` do what takes long."""

    def __init__(self, served: ServedModel, max_model_len: int, workers: Workers) -> None:
        self._tokenizer = served.tokenizer
        self._records_roles = served.records_roles
        self._max_model_len = max_model_len
        self._workers = workers

    async def encode(
        self, text: str, *, param: str, add_special_tokens: bool = True, last: int | None = None
    ) -> TokenIds:
        """Token ids of `text`; see `encode_all`."""
        encoded = await self.encode_all(
            [text], param=param, add_special_tokens=add_special_tokens, last=last
        )
        return encoded[0]

    async def encode_all(
        self,
        texts: Sequence[str],
        *,
        param: str,
        add_special_tokens: bool = True,
        last: int | None = None,
    ) -> list[TokenIds]:
        """Token ids of `texts`, in turns with other clients when they are long.

        With `last` that many tokens of each text's end. Raises `RequestTooLargeError`, without
        encoding any, for a text that can never fit.
        """
        if last is not None:
            texts = [self._end_of(text, last) for text in texts]
        for text in texts if last is None else ():
            self._check_can_fit(text, param)
        encode = partial(
            self._tokenizer.encode_batch, add_special_tokens=add_special_tokens, param=param
        )
        encoded: list[TokenIds] = []
        for part in _slices(texts):
            encoded += await self._workers.run(sum(map(_cost, part)), partial(encode, part))
        return encoded if last is None else [ids[-last:] for ids in encoded]

    def _end_of(self, text: str, last: int) -> str:
        """Text that its last tokens are made of, and more, so that the cut changes none of them."""
        return text[-2 * (last + _CUT_TOKENS) * self._tokenizer.longest_token :]

    def num_kept(self, fields: SamplingFields) -> int | None:
        """How many tokens of a prompt's end are taken; None takes all.

        Raises `InvalidRequestError` for a number that none can have.
        """
        kept, limit = fields.truncate_prompt_tokens, self._max_model_len
        if kept is None:
            return None
        if kept == -1:
            answer = fields.most_tokens(None)
            return max(limit - (1 if answer is None else answer), 1)
        if not 1 <= kept <= limit:
            raise wrong(
                "truncate_prompt_tokens",
                f"must be from 1 to {limit}, or -1 for what has room, got {kept}",
            )
        return kept

    async def encode_chat(
        self,
        source: PromptSource,
        controls: CachingControls,
        rendered_with: Callable[[Place], str],
        *,
        add_special_tokens: bool,
        last: int | None,
    ) -> EncodedPrompts:
        """`encode` of the source's text, and what is to be known of its tokens.

        `rendered_with` is as in `breakpoint_ends`.
        """
        param = "messages"
        text, places = source.text, [mark.place for mark in controls.breakpoints]
        if not (places or self._records_roles):
            encoded = await self.encode(
                text, param=param, add_special_tokens=add_special_tokens, last=last
            )
            caching = prompt_caching(controls, (), len(encoded))
            return EncodedPrompts([encoded], caching, sources=[source])
        if last is None:
            self._check_can_fit(text, param)
        tail = text if last is None else self._end_of(text, last)
        cut = len(text) - len(tail)

        def encode() -> EncodedPrompts:
            spans = source.role_spans() if self._records_roles else []
            marks = breakpoint_ends(text, places, rendered_with)
            marks += [edge for _, *edges in spans for edge in edges]
            encoded, positions = self._tokenizer.encode_marked(
                tail,
                [max(0, mark - cut) for mark in marks],
                add_special_tokens=add_special_tokens,
                param=param,
            )
            dropped = 0 if last is None else max(0, len(encoded) - last)
            positions = [max(0, position - dropped) for position in positions]
            return EncodedPrompts(
                [encoded[dropped:]],
                prompt_caching(controls, positions[: len(places)], len(encoded) - dropped),
                _roles((role for role, *_ in spans), positions[len(places) :]),
                [source],
            )

        return await self._workers.run(_cost(text) * (2 + len(places)), encode)

    def _check_can_fit(self, text: str, param: str) -> None:
        limit = self._max_model_len
        if len(text) <= limit:  # to find the longest token takes a while
            return
        least = len(text) // self._tokenizer.longest_token
        if least > limit:
            raise RequestTooLargeError(
                f"This model's maximum context length is {limit} tokens, but the text of "
                f"{len(text)} characters makes {least} or more.",
                param=param,
                code="context_length_exceeded",
            )


def parse_prompts(prompt: object) -> list[str | TokenIds]:
    """The prompts of a completion, each as text or as token ids.

    Raises `InvalidRequestError` for what is neither, for ids that none has, and for too many.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt("a string, token ids, or a list of either, and not empty")
    items = cast("list[object]", prompt)
    if _all_ids(items):
        return [as_token_ids(cast("list[int]", items))]
    check_num_sequences(len(items), 1)
    return [_one_prompt(item, index) for index, item in enumerate(items)]


def _one_prompt(item: object, index: int) -> str | TokenIds:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _all_ids(cast("list[object]", item)):
        return as_token_ids(cast("list[int]", item))
    raise _bad_prompt(f"a string or a list of token ids at [{index}]")


def _all_ids(items: Sequence[object]) -> bool:
    """Whether all are integers, and none a bool, which is one too."""
    return set(map(type, items)) <= {int}


def _bad_prompt(what: str) -> InvalidRequestError:
    return wrong("prompt", f"must be {what}")


def _roles(roles: Iterable[str], edges: Sequence[int]) -> tuple[RoleSpan, ...]:
    """Spans of tokens from the first and behind the last of each; those without tokens are none."""
    spans = zip(roles, edges[::2], edges[1::2], strict=True)
    return tuple((role, start, end) for role, start, end in spans if start < end)


def _cost(text: str) -> int:
    return len(text) + _OVERHEAD


def _slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in order, in parts of about `_SLICE` characters."""
    begin = size = 0
    for end, text in enumerate(texts, 1):
        size += _cost(text)
        if size >= _SLICE:
            yield texts[begin:end]
            begin, size = end, 0
    if begin < len(texts):
        yield texts[begin:]
