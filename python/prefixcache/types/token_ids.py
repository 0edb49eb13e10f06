"""Token ids in one form from the tokenizer to block hashes and model: an array of int32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from prefixcache.exceptions import InvalidRequestError

TokenIds = npt.NDArray[np.int32]
"""One dimension, dense, never written to: take a view of a part."""


def as_token_ids(values: Sequence[int] | npt.NDArray[np.integer]) -> TokenIds:
    """The prompt's ids as an array: `values` themselves if they are one already, else a copy.

    Raises `InvalidRequestError` for anything but a list of integers, and for integers that int32
    does not hold. Whether the model has the ids is for `Engine.check` to say.
    """
    if _is_token_ids(values):
        return values
    try:
        given: npt.NDArray[Any] = np.asarray(values)
    except ValueError:  # lists of several lengths
        given = np.empty((0, 0))
    if given.ndim != 1 or (given.dtype.kind not in "iu" and len(given)):
        raise InvalidRequestError("The prompt's token ids must be integers.", param="prompt")
    token_ids = given.astype(np.int32)
    if not np.array_equal(token_ids, given):
        wrong = given[token_ids != given][0]
        raise InvalidRequestError(
            f"The prompt holds the token id {wrong}, which no vocabulary has.", param="prompt"
        )
    token_ids.flags.writeable = False
    return token_ids


def _is_token_ids(values: object) -> TypeGuard[TokenIds]:
    if not isinstance(values, np.ndarray):
        return False
    array, flags = cast("npt.NDArray[Any]", values), values.flags
    fits = array.dtype == np.int32 and array.ndim == 1
    return fits and flags.c_contiguous and not flags.writeable


class TokenBuffer:
    """A request's prompt, and behind it the answer as far as it is known, in one array that grows.

    What it returns are views, which never change: a known token is written once, and growing takes
    new memory. Until the answer begins that is the prompt's own.
    """

    __slots__ = ("_ids", "_length", "num_prompt_tokens")

    def __init__(self, prompt: TokenIds) -> None:
        self._ids = prompt
        self._length = self.num_prompt_tokens = len(prompt)

    def __len__(self) -> int:
        return self._length

    @property
    def known(self) -> TokenIds:
        """Prompt and answer."""
        return self._ids[: self._length]

    @property
    def prompt(self) -> TokenIds:
        """The prompt."""
        return self._ids[: self.num_prompt_tokens]

    @property
    def answer(self) -> TokenIds:
        """What was generated."""
        return self._ids[self.num_prompt_tokens : self._length]

    def at(self, position: int) -> int:
        """One known token."""
        return self._ids.item(position)

    def append(self, token_id: int) -> None:
        """Adds a token to the answer."""
        self._make_room(1)
        self._ids[self._length] = token_id
        self._length += 1

    def with_drafts(self, drafts: Sequence[int]) -> list[TokenBuffer]:
        """What would be known after each of these guesses. Good until the next `append`."""
        self._make_room(len(drafts))
        self._ids[self._length : self._length + len(drafts)] = drafts
        return [self._of_length(self._length + count) for count in range(1, len(drafts) + 1)]

    def _of_length(self, length: int) -> TokenBuffer:
        other = TokenBuffer(self._ids)
        other._length, other.num_prompt_tokens = length, self.num_prompt_tokens
        return other

    def _make_room(self, count: int) -> None:
        if self._length + count > len(self._ids):
            grown = np.empty((self._length + count) * 3 // 2 + 16, dtype=np.int32)
            grown[: self._length] = self.known
            self._ids = grown

    def forget_answer(self) -> None:
        """Leaves the prompt alone."""
        self._ids = self.prompt
        self._length = self.num_prompt_tokens
