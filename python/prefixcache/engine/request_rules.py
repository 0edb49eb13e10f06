"""Which requests a model can serve, and what holds where a request says nothing."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Collection, Iterable
from typing import NamedTuple

from prefixcache.exceptions import InvalidRequestError, wrong
from prefixcache.text.grammar.answer_matcher import Grammar
from prefixcache.text.grammar.grammars import Grammars
from prefixcache.text.grammar.sandbox import Sandbox
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import NOTHING_SUPPRESSED, SuppressedTokens
from prefixcache.types.structured_output import StructuredOutput
from prefixcache.types.token_ids import TokenIds


class CheckedRequest(NamedTuple):
    """A request that the model can serve, and the grammar that its answer follows, if any."""

    request: Request
    grammar: Grammar | None


CheckedParts = dict[tuple[int, ...], Grammar | None]
"""Prompts and options of one job that were checked, by the identity of the objects that hold them.

Of options there is the grammar.
"""


class RequestRules:
    """The rules of one model. Without `grammars` no answer can be kept to one. From any thread."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        *,
        suppressed: SuppressedTokens = NOTHING_SUPPRESSED,
        grammars: Grammars | None = None,
        seed: int = 0,
    ) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.suppressed = suppressed
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._seeds = random.Random(seed)

    def check(self, request: Request, checked: CheckedParts) -> CheckedRequest:
        """Raises `InvalidRequestError` when the request asks for what the model lacks.

        What is `checked` is not looked at again, what is looked at becomes so.
        """
        prompt, options = _identities(request)
        if prompt not in checked:
            self._check_prompt(request.prompt_token_ids)
            if request.prediction is not None:
                self._check_in_vocabulary("prediction", request.prediction.tolist())
            checked[prompt] = None
        if options not in checked:
            self._check_chosen_ids(request.params)
            output = request.params.structured_output
            checked[options] = None if output is None else self.compile(output)
        return CheckedRequest(request, checked[options])

    def find_grammar(self, output: StructuredOutput) -> Grammar | None:
        """The grammar of such answers, if it is compiled already."""
        return None if self._grammars is None else self._grammars.find(output)

    def compile(
        self,
        output: StructuredOutput,
        sandbox: Sandbox | None = None,
        cancelled: threading.Event | None = None,
    ) -> Grammar:
        """The grammar of such answers, which takes a while when it is new.

        As long as it is held, `check` need not wait for it. Raises what `Grammars.compile` does.
        """
        if self._grammars is None:
            raise InvalidRequestError(
                "This engine cannot keep answers to grammars.", param="structured_output"
            )
        return self._grammars.compile(output, sandbox, cancelled)

    def seed(self, params: SamplingParams) -> int:
        """What the request is sampled with."""
        return self._seeds.getrandbits(64) if params.seed is None else params.seed

    def end_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that end the answer, ascending."""
        ids = self.eos_token_ids.union(params.stop_token_ids)
        return tuple(sorted(token_id for token_id in ids if 0 <= token_id < self._vocab_size))

    def _check_prompt(self, token_ids: TokenIds) -> None:
        if not len(token_ids):
            raise InvalidRequestError("The prompt must hold at least one token.", param="prompt")
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self._vocab_size:
            raise InvalidRequestError(
                f"The prompt holds the token id {low if low < 0 else high}; ids are from 0 to "
                f"{self._vocab_size - 1}.",
                param="prompt",
            )

    def _check_chosen_ids(self, params: SamplingParams) -> None:
        words = itertools.chain.from_iterable(params.bad_words_token_ids)
        self._check_in_vocabulary("logit_bias", params.logit_bias)
        self._check_in_vocabulary("bad_words", words)
        if params.bad_words and not params.bad_words_token_ids:
            raise wrong("bad_words", "need their token ids")
        if params.allowed_token_ids is not None:
            self._check_in_vocabulary("allowed_token_ids", params.allowed_token_ids)
            if {*params.allowed_token_ids} <= {*self.suppressed.first}:
                raise wrong(
                    "allowed_token_ids", "must hold a token that the model's suppress_tokens lack"
                )
            if params.min_tokens and {*params.allowed_token_ids} <= {*self.end_token_ids(params)}:
                raise wrong(
                    "allowed_token_ids",
                    "must hold a token that does not end the answer, since min_tokens is given",
                )

    def _check_in_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        outside = next((i for i in token_ids if not 0 <= i < self._vocab_size), None)
        if outside is not None:
            allowed = f"ids are from 0 to {self._vocab_size - 1}"
            raise wrong(name, f"holds the token id {outside}; {allowed}")


def _identities(request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of prompt and options, the same for all choices of a job; they mean nothing after it."""
    params = request.params
    chosen = (params.logit_bias, params.allowed_token_ids, params.bad_words_token_ids)
    options = (*chosen, params.stop_token_ids, params.structured_output)
    prompt = (request.prompt_token_ids, request.prediction)
    return tuple(map(id, prompt)), (*map(id, options), params.min_tokens > 0)
