"""Token ids to text while they arrive: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.sampling_params import SamplingParams
from prefixcache.tokenization.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_WAIT = 8
_LONGEST_TAIL = 3


class IncrementalDetokenizer:
    """Text of one request, piece by piece.

    The pieces joined are the text that the tokens add behind a prompt: `Tokenizer.decode` of all,
    with a leading space kept, up to a stop string, and less a character that the last token left
    unfinished. How the tokens are split over calls of `push` makes no difference.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams | None = None) -> None:
        params = params or SamplingParams()
        self._characters = _CharacterStream(tokenizer, params.skip_special_tokens)
        self._stops = _StopStrings(params.stop, params.include_stop_str_in_output)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> str:
        """New text that is certain after these tokens.

        With `ended_by_token` the last token is one that ends the answer: its text is left out
        unless `include_stop_str_in_output` asks for it. After a stop string nothing more comes.
        """
        shown = token_ids[:-1] if ended_by_token and not self._include_stop else token_ids
        return "".join([self._push_one(token_id) for token_id in shown])

    def finish(self) -> str:
        """The text that was held back; call once, when no more tokens come."""
        rest = self._stops.push(self._characters.finish())
        return rest + self._stops.finish()

    def _push_one(self, token_id: int) -> str:
        if self.stopped_by is not None:
            return ""
        self._num_tokens += 1
        text = self._characters.push(token_id)
        if self._num_tokens <= self._min_tokens:
            return text
        return self._stops.push(text)


class _CharacterStream:
    """Whole characters of a token stream.

    Tokens wait until their text ends in a whole character. They are decoded behind an anchor, a
    token of plain text, since decoders treat the start of a text in a way of its own.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._anchor = tokenizer.plain_token_ids
        self._anchor_length = len(tokenizer.decode(self._anchor))
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        if self._adds_nothing(token_id):
            return ""
        self._waiting.append(token_id)
        text = self._text(self._waiting)
        if text.endswith(_REPLACEMENT):
            return self._certain_head(text)
        self._waiting = []
        return text

    def finish(self) -> str:
        text = self._text(self._waiting).rstrip(_REPLACEMENT)
        self._waiting = []
        return text

    def _adds_nothing(self, token_id: int) -> bool:
        special = self._skip_special and token_id in self._tokenizer.special_token_ids
        return special or self._tokenizer.token(token_id) is None

    def _text(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            [*self._anchor, *token_ids], skip_special_tokens=self._skip_special
        )
        return text[self._anchor_length :]

    def _certain_head(self, text: str) -> str:
        """In a long run of broken bytes all is certain but what the last few tokens may begin."""
        if len(self._waiting) < _LONGEST_WAIT:
            return ""
        for length in range(_LONGEST_TAIL, 0, -1):
            head, tail = self._waiting[:-length], self._waiting[-length:]
            head_text = self._text(head)
            if head_text + self._text(tail) == text:
                self._waiting = tail
                return head_text
        return ""


class _StopStrings:
    """Passes text on until a stop string appears; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        self._held += text
        found = self._first_match()
        if found is not None:
            return self._end_at(*found)
        return self._release(len(self._held) - self._possible_start())

    def finish(self) -> str:
        return self._release(len(self._held))

    def _first_match(self) -> tuple[int, str] | None:
        hits = [(self._held.find(stop), stop) for stop in self._stops]
        return min((hit for hit in hits if hit[0] >= 0), key=lambda hit: hit[0], default=None)

    def _end_at(self, start: int, stop: str) -> str:
        self.matched = stop
        text = self._held[: start + len(stop) if self._include else start]
        self._held = ""
        return text

    def _possible_start(self) -> int:
        """Length of the longest suffix that is the beginning of a stop string."""
        return max(_overlap(self._held, stop) for stop in self._stops)

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
