"""Ways to have a server compute what it has cached: to ask the same text without a hit.

None of them empties a cache that others use.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefixcache.tools.openai_api import RefusedStreamError
from prefixcache.tools.verify.client import Asker
from prefixcache.tools.verify.comparison import ServerAnswer, missed
from prefixcache.tools.verify.questions import Question


@dataclass(frozen=True, slots=True)
class Cooling:
    """How a request is asked without a hit.

    `fields` makes what is added to its body: those of one call share what they cache. Where
    `asks_other` says so, another question goes before it, which takes the only place that such a
    server has; then none can be asked cold at the same time.
    """

    name: str
    fields: Callable[[], dict[str, Any]]
    asks_other: bool = False


COOLINGS = (
    Cooling("a new cache_salt", lambda: {"cache_salt": secrets.token_hex(8)}),
    Cooling("another question before it", dict, asks_other=True),
)


async def find_cooling(asker: Asker, question: Question, other: Question) -> Cooling | None:
    """The first way that works with this server; None where none does. None was asked before.

    The fastest answers count, with a hit and without: on a busy machine some take much longer.
    Raises `StreamError` where the server ends to answer.
    """
    cold, warm = await asker.ask(question), await asker.ask(question)
    for cooling in COOLINGS:
        if cooling.asks_other:
            cold = min(cold, await asker.ask(other), key=_ttft)
        try:
            again = await asker.ask(question, cooling.fields())
        except RefusedStreamError:
            continue
        if missed(again, cold, warm):
            return cooling
        warm = min(warm, again, key=_ttft)
    return None


def _ttft(answer: ServerAnswer) -> float:
    return answer.ttft
