"""What diagnostics remember of the prompts of one HTTP request, and tell of them in its answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prefixcache.diagnostics.difference import find_difference
from prefixcache.diagnostics.history import RememberedPrompt, shared_tokens
from prefixcache.diagnostics.reasons import Asked, Explanation
from prefixcache.diagnostics.room import Admitted, CacheDiagnostics, asked_of
from prefixcache.diagnostics.spans import PromptSource
from prefixcache.exceptions import InvalidRequestError, wrong
from prefixcache.server.http.access import Caller
from prefixcache.server.jobs.context import Call
from prefixcache.types.request import Request

# Prompts of one request that are remembered; more are not.
_MOST_PROMPTS = 64
_APIS = {"cmpl": "completions", "chatcmpl": "chat", "resp": "responses", "msg": "messages"}
_PREFIX = re.compile(r"[a-z]*")
_SYSTEM = ("system", "developer")

ChangedPart = Literal["model", "tools", "system", "messages"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a prompt compares with that of the earlier answer which the client named.

    `is_known` is False where that is not remembered. Where they `differ` within the full blocks of
    the earlier one, `changed` names the first part that did, None without the texts. Of its
    `reusable_tokens`, those in full blocks, `missed_tokens` did not hit.
    """

    is_known: bool = False
    differs: bool = False
    changed: ChangedPart | None = None
    reusable_tokens: int = 0
    missed_tokens: int = 0


@dataclass(slots=True)
class Diagnosis:
    """The prompts of one job: `begin` when they go to the engine, `end` when its answers ended.

    `explain` says why they missed, as far as the caller may know. `explanations`, one for each
    prompt, and `comparison` hold what it found; they stay None where they are not asked for.
    `requests` are one for each prompt, `sources` what that was made of.
    """

    diagnostics: CacheDiagnostics
    call: Call
    model: str
    requests: Sequence[Request]
    sources: Sequence[PromptSource | None]
    explains: bool
    compared_with: str | None = None
    explanations: list[dict[str, Any]] | None = None
    comparison: Comparison | None = None
    _prompts: Sequence[RememberedPrompt] = ()
    _is_explained: bool = False

    @property
    def is_due(self) -> bool:
        """Whether `explain` is to be called before the answer is sent."""
        return (self.explains or self.compared_with is not None) and not self._is_explained

    def begin(self) -> None:
        """Remembers the prompts. What is not to be explained is held no longer."""
        prompts = [*self._remembered()][:_MOST_PROMPTS]
        for request, prompt in zip(self.requests, prompts, strict=False):
            self.diagnostics.begin(request.request_id, prompt)
        self._prompts = prompts if self.is_due else ()

    def end(self, admitted: Sequence[Admitted | None]) -> None:
        """What became of the prompts; None of one that was not computed."""
        for request, admission in zip(self.requests, admitted, strict=True):
            self.diagnostics.end(request.request_id, admission)

    def explain(self, admitted: Sequence[Admitted | None] | None = None) -> None:
        """Finds out what the answer is to tell, or without `admitted` what the cache has now.

        For a thread: it takes a while.
        """
        self.diagnostics.settle()
        prompts = self._prompts or [*self._remembered()]
        outcomes = [None] * len(prompts) if admitted is None else admitted[: len(prompts)]
        if self.explains:
            pairs = zip(self.requests, prompts, outcomes, strict=False)
            self.explanations = [self._explained(*pair) for pair in pairs]
        if self.compared_with is not None:
            self.comparison = self._compared(self.compared_with, prompts[0], outcomes[0])
        self._prompts, self._is_explained = (), True

    def _remembered(self) -> Iterator[RememberedPrompt]:
        """The prompts as they are remembered; their arrival is now on both clocks."""
        wall, clock = time.time(), time.monotonic()
        sources = self.sources or [None] * len(self.requests)
        keeps_text = self.diagnostics.keeps_text
        kind = _PREFIX.match(self.call.id)
        api = "" if kind is None else _APIS.get(kind[0], kind[0])
        for index, (request, source) in enumerate(zip(self.requests, sources, strict=True)):
            length, cache = len(request.prompt_token_ids), request.cache
            upto = length if cache.write_upto is None else min(cache.write_upto, length)
            yield RememberedPrompt(
                request_id=self.call.id if not index else f"{self.call.id}-{index}",
                time=wall,
                scope=request.scope,
                model=self.model,
                api=api,
                token_ids=request.prompt_token_ids,
                source=source if keeps_text else None,
                prompt_tokens=length,
                cached_tokens=0,
                miss=None,
                arrival=clock,
                write_upto=upto if cache.write else 0,
            )

    def _explained(
        self, request: Request, prompt: RememberedPrompt, admitted: Admitted | None
    ) -> dict[str, Any]:
        asked = _unsent(request, prompt) if admitted is None else asked_of(prompt, admitted)
        explanation = self.diagnostics.explain(asked, sees_all=self.call.caller.is_admin)
        return explanation_fields(explanation, prompt, self.call.caller)

    def _compared(
        self, name: str, prompt: RememberedPrompt, admitted: Admitted | None
    ) -> Comparison:
        earlier = self.diagnostics.history.find(name, prompt.scope.client)
        if earlier is None or earlier.scope != prompt.scope:
            return Comparison()
        hit = 0 if admitted is None else admitted.hit_tokens
        return compared(prompt, earlier, hit, self.diagnostics.block_size)


_OPENAI_REASONS: Mapping[ChangedPart, str] = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "input_changed",
    "messages": "input_changed",
}


def openai_comparison(comparison: Comparison) -> dict[str, Any]:
    """`prompt_cache_diagnostics` of OpenAI's Responses API.

    Blocks that are gone though nothing differs have no reason there: the result is "unavailable",
    as where the text that differs is not kept.
    """
    if not comparison.is_known:
        return {"type": "comparison_response_not_found"}
    if not comparison.missed_tokens:
        return {"type": "cache_hit"}
    if comparison.changed is None:
        return {"type": "unavailable"}
    return {
        "type": "cache_miss",
        "reason": _OPENAI_REASONS[comparison.changed],
        "comparison_reusable_tokens": comparison.reusable_tokens,
        "cache_missed_tokens": comparison.missed_tokens,
    }


def anthropic_comparison(comparison: Comparison) -> dict[str, Any] | None:
    """`diagnostics` of Anthropic's Messages API: what differs, whether or not it was cached."""
    if not comparison.is_known:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if not comparison.differs:
        return None
    if comparison.changed is None:
        return {"cache_miss_reason": {"type": "unavailable"}}
    reason = {
        "type": f"{comparison.changed}_changed",
        "cache_missed_input_tokens": comparison.missed_tokens,
    }
    return {"cache_miss_reason": reason}


def diagnostics_off(param: str) -> InvalidRequestError:
    """The error for asking `param` of a server without diagnostics."""
    return wrong(param, "needs a server whose --diagnostics-memory is not 0")


def check_may_ask(caller: Caller, salt: str | None, what: str) -> None:
    """Raises `InvalidRequestError` where `what` would tell a client of other clients' prompts."""
    if salt is None and caller.namespace is not None and not caller.is_admin:
        raise InvalidRequestError(
            f"With API keys {what} needs cache_salt: it tells of prompts that were sent with this "
            "key and salt, and not of other clients' prompts.",
            param="cache_salt",
        )


def explanation_fields(
    explanation: Explanation, prompt: RememberedPrompt, caller: Caller
) -> dict[str, Any]:
    """An explanation in JSON's types, as the caller may read it."""
    block, lost = explanation.first_block, explanation.miss.detail
    return {
        "prompt_tokens": explanation.prompt_tokens,
        "cached_tokens": explanation.miss.hit_tokens,
        "disk_tokens": explanation.disk_tokens,
        "reason": explanation.miss.reason,
        "description": str(explanation),
        "first_missed_block": {"start": block.start, "end": block.stop} if block else None,
        "lost": None if lost is None else asdict(lost),
        "earlier": None
        if explanation.nearest is None
        else _earlier_fields(explanation.nearest, explanation.shared_tokens, prompt, caller),
    }


def _earlier_fields(
    earlier: RememberedPrompt, shared: int, prompt: RememberedPrompt, caller: Caller
) -> dict[str, Any]:
    """What a caller may know of an earlier prompt: name and text only where the caller sent it."""
    client = earlier.scope.client
    is_own = caller.is_admin or (client is not None and client == caller.namespace)
    difference = find_difference(
        prompt.token_ids, prompt.source, earlier.token_ids, earlier.source, shows_earlier=is_own
    )
    return {
        "request_id": earlier.request_id if is_own else None,
        "ago_s": max(0.0, time.monotonic() - earlier.arrival),
        "shared_tokens": shared,
        "difference": None if difference is None else difference.as_json(),
    }


def compared(
    prompt: RememberedPrompt, earlier: RememberedPrompt, hit_tokens: int, block_size: int
) -> Comparison:
    """How a prompt of which `hit_tokens` hit compares with an earlier one of the same client."""
    shared = shared_tokens(prompt.token_ids, earlier.token_ids)
    reusable = earlier.prompt_tokens // block_size * block_size
    usable = min(reusable, (prompt.prompt_tokens - 1) // block_size * block_size)
    differs = shared < min(reusable, prompt.prompt_tokens)
    return Comparison(
        is_known=True,
        differs=differs,
        changed=_changed(prompt, earlier) if differs else None,
        reusable_tokens=reusable,
        missed_tokens=max(0, (reusable if differs else usable) - hit_tokens),
    )


def _changed(prompt: RememberedPrompt, earlier: RememberedPrompt) -> ChangedPart | None:
    if prompt.model != earlier.model:
        return "model"
    if prompt.source is None or earlier.source is None:
        return None
    if prompt.source.tools != earlier.source.tools:
        return "tools"
    difference = find_difference(
        prompt.token_ids, prompt.source, earlier.token_ids, earlier.source, shows_earlier=False
    )
    return "system" if difference is not None and difference.role in _SYSTEM else "messages"


def _unsent(request: Request, prompt: RememberedPrompt) -> Asked:
    return Asked(
        token_ids=prompt.token_ids,
        scope=prompt.scope,
        reads=request.cache.read,
        num_unscored=request.params.num_unscored,
    )
