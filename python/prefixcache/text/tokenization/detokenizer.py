"""Token ids to text while they arrive: never half a character, never a part of a stop string."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from weakref import WeakValueDictionary

from prefixcache._core import StopStrings
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.sampling_params import SamplingParams

_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokenizers:
    """Makes the detokenizers of one tokenizer. For one thread.

    Answers with the same stop strings share their automaton, however many choices a request asks
    for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._automatons: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()

    def __call__(self, params: SamplingParams) -> IncrementalDetokenizer:
        """An unused detokenizer."""
        return IncrementalDetokenizer(self._tokenizer, params, self._automaton(params.stop))

    def _automaton(self, stops: tuple[str, ...]) -> StopStrings | None:
        if not stops:
            return None
        automaton = self._automatons.get(stops)
        if automaton is None:
            automaton = self._automatons[stops] = StopStrings(stops)
        return automaton


class IncrementalDetokenizer:
    """Text of one request, piece by piece. `stops` may be the automaton of `params.stop`.

    The pieces joined are the text that the tokens add after a prompt, a leading space kept, up to
    a stop string, and less a character that the last token left unfinished. Bytes that make no
    character are shown as U+FFFD. How the tokens are split over calls makes no difference.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams | None = None,
        stops: StopStrings | None = None,
    ) -> None:
        params = params or SamplingParams()
        self._token_bytes = tokenizer.token_bytes
        self._skipped: frozenset[int] = frozenset()
        if params.skip_special_tokens:
            self._skipped = tokenizer.special_token_ids
        self._utf8 = _Utf8Decoder("replace")
        self._automaton = stops or (StopStrings(params.stop) if params.stop else None)
        self._held = None
        if self._automaton is not None:
            self._held = _HeldBack(self._automaton, params.stop, params.include_stop_str_in_output)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._held is None else self._held.matched

    def push(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> str:
        """New text that is certain after these tokens.

        With `ended_by_token` the last token is one that ends the answer: its text is left out
        unless `include_stop_str_in_output` asks for it. After a stop string nothing more comes.
        """
        shown = token_ids[:-1] if ended_by_token and not self._include_stop else token_ids
        return "".join([self._push_one(token_id) for token_id in shown])

    def finish(self) -> str:
        """The text that was held back; call once, when no more tokens come."""
        return "" if self._held is None else self._held.finish()

    def _push_one(self, token_id: int) -> str:
        if self.stopped_by is not None:
            return ""
        self._num_tokens += 1
        skipped = token_id in self._skipped
        text = "" if skipped else self._utf8.decode(self._token_bytes(token_id))
        if self._held is None:
            return text
        return self._held.push(text, may_end=self._num_tokens > self._min_tokens)


class _HeldBack:
    """Passes text on until a stop string appears; holds back what may be the start of one."""

    def __init__(self, stops: StopStrings, texts: Sequence[str], include: bool) -> None:
        self._stream = stops.stream()
        self._texts = texts
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_end: bool) -> str:
        """Text that is certain. A stop string that ends in `text` counts if the answer may end."""
        if self.matched is not None:
            return ""
        before = len(self._held)
        self._held += text
        stop = self._stream.push(text)
        if stop is not None and may_end:
            start, index = stop
            return self._end_at(before + start, self._texts[index])
        return self._release(len(self._held) - self._stream.num_held)

    def finish(self) -> str:
        return self._release(len(self._held))

    def _end_at(self, start: int, stop: str) -> str:
        self.matched = stop
        text = self._held[: start + len(stop) if self._include else start]
        self._held = ""
        return text

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text
