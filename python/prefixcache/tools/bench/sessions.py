"""What is asked of a server, as shapes: sessions of turns, whose words are drawn when sent.

A `Text` names its content by a key, so two prompts share exactly the texts with equal keys,
whatever tokenizer draws them, and a trace of gigabytes is never held as text.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """`length` tokens of content that its key decides, within one run."""

    key: Hashable
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: what it adds to its session's context, and how long an answer it asks for.

    It is sent `pause` seconds after the answer before, once the `sub_sessions` have run, side by
    side; their last answers join what it adds.
    """

    adds: tuple[Text, ...]
    output_len: int
    pause: float = 0.0
    sub_sessions: tuple[Session, ...] = ()

    @property
    def num_requests(self) -> int:
        """Itself, and the requests of its sub-sessions."""
        return 1 + sum(sub.num_requests for sub in self.sub_sessions)

    @property
    def grows_by(self) -> int:
        """Tokens by which context and answer grow."""
        answers = sum(below.turns[-1].output_len for below in self.sub_sessions)
        return sum(text.length for text in self.adds) + answers + self.output_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A dialogue: a prompt is all that was said before, the real answers too, and its turn's own.

    `opening` stands before the first turn, as a system prompt does. `due` is the recorded arrival,
    in seconds from the first one.
    """

    name: str
    opening: tuple[Text, ...] = ()
    turns: tuple[Turn, ...]
    due: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of the last prompt and its answer, if every answer has its full length."""
        opening = sum(text.length for text in self.opening)
        return opening + sum(turn.grows_by for turn in self.turns)

    @property
    def first_prompt(self) -> int:
        """Tokens of the first prompt."""
        return sum(text.length for text in (*self.opening, *self.turns[0].adds))

    @property
    def num_requests(self) -> int:
        """Requests of its turns and sub-sessions."""
        return sum(turn.num_requests for turn in self.turns)

    def family(self) -> list[Session]:
        """The session, its sub-sessions and theirs."""
        below = [sub for turn in self.turns for sub in turn.sub_sessions]
        return [self, *(member for sub in below for member in sub.family())]
