"""Questions that no server has seen: random words behind a random beginning."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

_TEXT = (
    "river mill farmer wood winter child bridge family house summer visitor window door garden "
    "water letter country morning ship market music street road mountain weather train bread "
    "price paper game school north table salt copper engine harbour island question answer"
)
_PIECES = 4
_SENTENCE = 12
_ASKED = "\nThe next words are these:"
_FOLLOW_UP = "\nName another one.\n"


@dataclass(frozen=True, slots=True)
class Question:
    """Turns of a dialogue: a user's, an answer, a user's, and so on."""

    turns: tuple[str, ...]

    def pieces(self) -> list[Question]:
        """Its beginnings, each longer than the one before, and itself at last."""
        *earlier, last = self.turns
        ends = [len(last) * number // _PIECES for number in range(1, _PIECES)]
        return [*(replace(self, turns=(*earlier, last[:end])) for end in ends), self]

    def next_turn(self, answer: str) -> Question:
        """What a user asks once it was answered so."""
        return Question((*self.turns, answer, _FOLLOW_UP))

    def messages(self) -> list[dict[str, str]]:
        """As those of a chat."""
        roles = ("user", "assistant")
        return [
            {"role": roles[number % 2], "content": text} for number, text in enumerate(self.turns)
        ]

    def prompt(self) -> str:
        """As that of a completion."""
        return "".join(self.turns)


def make_questions(count: int, num_words: int, seed: int) -> list[Question]:
    """Of half of the words and more, so that no batch is even; equal for equal arguments."""
    return [_question(random.Random(f"{seed} {index}"), num_words) for index in range(count)]


def _question(draw: random.Random, num_words: int) -> Question:
    words = draw.choices(_TEXT.split(), k=draw.randint(num_words // 2, num_words))
    sentences = [" ".join(words[i : i + _SENTENCE]) for i in range(0, len(words), _SENTENCE)]
    return Question((f"{draw.getrandbits(64):016x}: {'. '.join(sentences)}.{_ASKED}",))
