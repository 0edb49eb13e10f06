"""What `prefixcache verify` asks, and of whom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen

from prefixcache.config.checked import Checked, Count, NonNegativeFloat, PositiveFloat, PositiveInt
from prefixcache.config.flags import flag

Api = Literal["chat", "completions"]

# More than most APIs give; a server may refuse fewer.
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(Checked):
    """The questions, and how answers are compared. `url` is a server's address, with /v1 or not."""

    url: str
    api: Api = flag("chat", "Send chats or plain completions.", "Verification")
    model: str | None = flag(
        None, "Model to ask.", "Verification", shown="the first that the server lists"
    )
    api_key: Annotated[str, MinLen(1)] | None = flag(
        None, "Key of the server.", "Verification", secret=True
    )
    num_questions: PositiveInt = flag(8, "Questions of each round.", "Verification")
    prompt_words: Annotated[int, Ge(16), Le(1_000_000)] = flag(
        600, "Words of the longest question; the shortest has half.", "Verification"
    )
    max_tokens: PositiveInt = flag(32, "Most tokens of an answer.", "Verification")
    top_logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] = flag(
        5, "Likeliest tokens to compare at each position; 0 compares texts alone.", "Verification"
    )
    tolerance: NonNegativeFloat = flag(
        0.0, "Largest allowed difference of a log probability.", "Verification"
    )
    seed: Count | None = flag(
        None, "Seed of the questions.", "Verification", shown="a new one, so that none is cached"
    )
    timeout: PositiveFloat = flag(300.0, "Most seconds for an answer.", "Verification")
    output: Path | None = flag(None, "File for the report (JSON).", "Verification")
