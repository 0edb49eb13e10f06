"""What the pages show of remembered prompts: the prefixes that they share, and why they missed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefixcache.diagnostics.advice import advice_for
from prefixcache.diagnostics.history import PromptHistory, RememberedPrompt
from prefixcache.diagnostics.hottest import HotPrefix, HotPrefixes
from prefixcache.server.http.sse import named_event

if TYPE_CHECKING:
    from prefixcache.text.tokenization.tokenizer import Tokenizer

_MOST_PREFIXES = 40
_MOST_MISSES = 20
# Of what a prefix adds to the one above, this is shown; texts are for administrators, who see all.
_SHOWN_TOKENS = 48
_SHOWN_CHARACTERS = 240
# The tree costs more than the rest, and changes less.
_PERIOD = 5.0


class PromptsView:
    """The event about prompts, for one history. One thread at a time uses it."""

    def __init__(self, history: PromptHistory, tokenizer: Tokenizer) -> None:
        self._history = history
        self._tokenizer = tokenizer
        self._prefixes = HotPrefixes()
        self._last: tuple[float, bytes] | None = None
        self._advice: dict[tuple[float, str], str] = {}

    def take(self, block_size: int) -> Mapping[str, bytes]:
        """The event, made again every few seconds; a page that was opened since needs the last."""
        now = time.monotonic()
        if self._last is None or now - self._last[0] >= _PERIOD:
            self._last = now, named_event(self._event(block_size))
        return {"prefixes": self._last[1]}

    def _event(self, block_size: int) -> dict[str, Any]:
        prompts = self._history.in_token_order()
        tree = self._prefixes.tree(prompts, block_size, _MOST_PREFIXES)
        misses = self._history.recent_misses(_MOST_MISSES)
        return {
            "type": "prefixes",
            "prefixes": [self._prefix(node, 0) for node in tree],
            "misses": self._with_advice(misses, block_size),
        }

    def _with_advice(
        self, misses: Sequence[RememberedPrompt], block_size: int
    ) -> list[dict[str, Any]]:
        """Each in JSON. Advice takes comparing texts, and is made once for a miss."""
        before, self._advice = self._advice, {}
        shown = list[dict[str, Any]]()
        for prompt in misses:
            key = prompt.arrival, prompt.request_id
            advice = before.get(key)
            if advice is None:
                advice = advice_for(prompt, self._history, block_size=block_size)
            self._advice[key] = advice
            shown.append(_miss(prompt) | {"advice": advice})
        return shown

    def _prefix(self, node: HotPrefix, depth: int) -> dict[str, Any]:
        """In JSON. As deep as the tree, which has few nodes."""
        return {
            "id": _name(node),
            "depth": depth,
            "tokens": node.tokens,
            "requests": node.requests,
            "hits": node.hits,
            "last_use": node.last_use,
            "salted": node.prompt.scope.salt is not None,
            "text": self._text(node),
            "children": [self._prefix(child, depth + 1) for child in node.children],
        }

    def _text(self, node: HotPrefix) -> str | None:
        """The beginning of what the node adds; None where no text of prompts is kept."""
        if node.prompt.text is None:
            return None
        end = min(node.tokens, node.start + _SHOWN_TOKENS)
        shown = self._tokenizer.decode_long(
            node.prompt.token_ids[node.start : end].tolist(), skip_special_tokens=False
        )
        cut = end < node.tokens or len(shown) > _SHOWN_CHARACTERS
        return shown[:_SHOWN_CHARACTERS] + "…" * cut


def _name(node: HotPrefix) -> str:
    """The same for the same tokens and scope, so that a page knows a prefix again."""
    prompt = node.prompt
    digest = hashlib.blake2b(repr(prompt.scope).encode(), digest_size=8)
    digest.update(prompt.token_ids[: node.tokens].tobytes())
    return digest.hexdigest()


def _miss(prompt: RememberedPrompt) -> dict[str, Any]:
    return {
        "request_id": prompt.request_id,
        "time": prompt.time,
        "api": prompt.api,
        "prompt_tokens": prompt.prompt_tokens,
        **({} if prompt.miss is None else asdict(prompt.miss)),
    }
