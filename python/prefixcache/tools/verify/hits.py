"""Whether an answer hit: as the server reports, else by its TTFT beside those of its question."""

from __future__ import annotations

from math import sqrt

from prefixcache.tools.verify.comparison import Answer

# Of the time without a hit: what saves less is no hit but noise.
_MOST_SHARE = 0.7


def reported_hit(answer: Answer) -> bool | None:
    """Whether more than half of the prompt hit; None where the server does not tell."""
    if answer.cached_tokens is None or not answer.prompt_tokens:
        return None
    return answer.cached_tokens * 2 > answer.prompt_tokens


def hit_mostly(answer: Answer, cold: Answer, warm: Answer) -> bool:
    """Whether more than half of the prompt hit: then TTFT is nearer to that of a whole hit."""
    reported = reported_hit(answer)
    if reported is not None:
        return reported
    return _shows_hits(cold, warm) and answer.ttft < (cold.ttft + warm.ttft) / 2


def missed(answer: Answer, cold: Answer, warm: Answer) -> bool:
    """Whether it did not hit at all, as well as a single TTFT on a busy machine tells it."""
    reported = reported_hit(answer)
    return not reported if reported is not None else answer.ttft > sqrt(cold.ttft * warm.ttft)


def _shows_hits(cold: Answer, warm: Answer) -> bool:
    return warm.ttft < cold.ttft * _MOST_SHARE
