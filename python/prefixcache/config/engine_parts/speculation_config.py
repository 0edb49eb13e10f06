"""The flags of guesses at an answer's next tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from annotated_types import Ge, Le

from prefixcache.config.checked import Checked, PositiveInt, ReadBy
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError

Speculation = Literal["off", "prompt", "cache"]

MAX_DRAFTS = 31
# vLLM's methods of speculative decoding that need no second model, by what they are here.
_SPECULATIVE_METHODS: dict[object, Speculation] = {"ngram": "prompt", "suffix": "cache"}
_SPECULATIVE_KEYS = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}


def parse_speculative_config(value: object) -> tuple[Speculation, int | None]:
    """Where guesses come from and how many at most, of vLLM's JSON or the same as a mapping.

    What was read before, a tuple, is returned as it is. The lengths that its n-gram lookup compares
    are passed over: here the longest match counts, and how often such matches were right. Raises
    `ValueError`.
    """
    if isinstance(value, tuple):
        return cast("tuple[Speculation, int | None]", value)
    try:
        given = json.loads(value) if isinstance(value, str) else value
        method = _SPECULATIVE_METHODS[given["method"]]  # type: ignore[index]
    except (ValueError, RecursionError, TypeError, KeyError):
        raise ValueError("must be JSON with method ngram or suffix") from None
    options = cast("dict[str, object]", given)
    unknown = [key for key in options if key not in _SPECULATIVE_KEYS]
    if unknown:
        raise ValueError(f"has {unknown[0]}, which is not supported")
    count = options.get("num_speculative_tokens")
    if count is not None and (type(count) is not int or not 1 <= count <= MAX_DRAFTS):
        raise ValueError(f"must have num_speculative_tokens from 1 to {MAX_DRAFTS}")
    return method, count


SpeculativeConfig = Annotated[tuple[Speculation, int | None], ReadBy(parse_speculative_config)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(Checked):
    """Several tokens a step: guesses that the model checks together with the next token.

    `speculative_config` is vLLM's way to say it, and excludes the others.
    """

    speculate: Speculation = flag(
        "off",
        "Source of guesses at an answer's next tokens. prompt: its own prompt and text; "
        "cache: also other requests under the same salt and API key. Answers do not change.",
        "Scheduling",
        common=True,
    )
    speculate_tokens: Annotated[PositiveInt, Le(MAX_DRAFTS)] = flag(
        7, "Most tokens guessed in a step for one answer.", "Scheduling"
    )
    speculate_history: Annotated[int, Ge(64), Le(2**24)] = flag(
        2**20,
        "Tokens of recent requests to take guesses from, about 17 bytes each.",
        "Scheduling",
    )
    speculative_config: SpeculativeConfig | None = flag(
        None,
        "vLLM's form of --speculate: method ngram is prompt, suffix is cache.",
        "Scheduling",
        aliases=("sc",),
        shown="off",
        metavar="<JSON>",
    )

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.speculative_config is not None and self.speculate != "off":
            raise FieldError("speculative_config", "excludes speculate: give one, not both.")

    @property
    def source(self) -> Speculation:
        """Where guesses come from."""
        return self.speculate if self.speculative_config is None else self.speculative_config[0]

    @property
    def most(self) -> int:
        """Most tokens of an answer that are guessed in a step."""
        given = None if self.speculative_config is None else self.speculative_config[1]
        return self.speculate_tokens if given is None else given
