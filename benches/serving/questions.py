"""100 simple questions, whose answers are facts of public lists.

40 capitals, of states of the G20 and of the European Union, and the first 20 elements' symbols
(dariusk/corpora), the continents of 20 of these states that lie on one (mledoze/countries), and 10
sums and 10 opposites.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasília",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "China": "Beijing",
    "Croatia": "Zagreb",
    "Cyprus": "Nicosia",
    "the Czech Republic": "Prague",
    "Denmark": "Copenhagen",
    "Estonia": "Tallinn",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Latvia": "Riga",
    "Lithuania": "Vilnius",
    "Luxembourg": "Luxembourg",
    "Malta": "Valletta",
    "Mexico": "Mexico City",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Saudi Arabia": "Riyadh",
    "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana",
    "South Africa": "Pretoria",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Turkey": "Ankara",
}
_SYMBOLS = {
    "hydrogen": "H",
    "helium": "He",
    "lithium": "Li",
    "beryllium": "Be",
    "boron": "B",
    "carbon": "C",
    "nitrogen": "N",
    "oxygen": "O",
    "fluorine": "F",
    "neon": "Ne",
    "sodium": "Na",
    "magnesium": "Mg",
    "aluminium": "Al",
    "silicon": "Si",
    "phosphorus": "P",
    "sulfur": "S",
    "chlorine": "Cl",
    "argon": "Ar",
    "potassium": "K",
    "calcium": "Ca",
}
_CONTINENTS = {
    "Argentina": "South America",
    "Austria": "Europe",
    "Brazil": "South America",
    "Canada": "North America",
    "Croatia": "Europe",
    "Denmark": "Europe",
    "Estonia": "Europe",
    "France": "Europe",
    "Greece": "Europe",
    "India": "Asia",
    "Ireland": "Europe",
    "Japan": "Asia",
    "Lithuania": "Europe",
    "Malta": "Europe",
    "Poland": "Europe",
    "Romania": "Europe",
    "Saudi Arabia": "Asia",
    "Slovenia": "Europe",
    "South Korea": "Asia",
    "Sweden": "Europe",
}
_SUMS = [(1, 1), (2, 3), (4, 4), (5, 2), (3, 6), (10, 5), (7, 1), (6, 6), (8, 2), (20, 10)]
_OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "day": "night",
    "black": "white",
    "left": "right",
    "happy": "sad",
    "fast": "slow",
    "open": "closed",
    "old": "young",
}


@dataclass(frozen=True)
class Question:
    """Asked as it stands; an answer that has the word is right."""

    text: str
    word: str

    def is_right(self, answer: str) -> bool:
        """Symbols and numbers as they are spelled, other words in any case."""
        flags = 0 if len(self.word) < 3 else re.IGNORECASE
        return re.search(rf"(?<!\w){re.escape(self.word)}(?!\w)", answer, flags) is not None


QUESTIONS = [
    *(Question(f"What is the capital of {state}?", city) for state, city in _CAPITALS.items()),
    *(
        Question(f"What is the chemical symbol of {element}?", symbol)
        for element, symbol in _SYMBOLS.items()
    ),
    *(Question(f"On which continent is {state}?", name) for state, name in _CONTINENTS.items()),
    *(Question(f"What is {a} plus {b}?", str(a + b)) for a, b in _SUMS),
    *(Question(f"What is the opposite of {word}?", other) for word, other in _OPPOSITES.items()),
]
assert len(QUESTIONS) == 100
