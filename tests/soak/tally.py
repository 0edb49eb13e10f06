"""What became of every request, and whatever should not have happened."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MOST_SHOWN = 40
OVERLOAD_ENDS = "the overload ends"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was answered or refused: when, as what, and after how many seconds."""

    at: float
    outcome: str
    first_token: float | None
    seconds: float


@dataclass(slots=True)
class Tally:
    """Times are seconds since `begun`."""

    begun: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)
    asked: list[Asked] = field(default_factory=list)
    commands: Counter[str] = field(default_factory=Counter)
    events: list[tuple[float, str]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    blamed: Counter[str] = field(default_factory=Counter)

    @property
    def num_violations(self) -> int:
        return self.blamed.total()

    @property
    def now(self) -> float:
        return time.monotonic() - self.begun

    def add(
        self, outcome: str, *, since: float, first_token: float | None = None, timed: bool = True
    ) -> None:
        """Counts a request that began at the monotonic time `since`."""
        self.outcomes[outcome] += 1
        if timed:
            seconds = time.monotonic() - since
            self.asked.append(Asked(since - self.begun, outcome, first_token, seconds))

    def tell(self, event: str) -> None:
        """Something that the plots mark."""
        self.events.append((self.now, event))
        print(f"{self.now:8.1f} s  {event}", flush=True)

    def blame(self, what: str, **details: Any) -> None:
        """Something that must not happen."""
        self.blamed[what] += 1
        self.outcomes["VIOLATION"] += 1
        if len(self.violations) < MOST_SHOWN:
            reported = f"at {self.now:.1f} s: {what}"
            reported += "".join(f"; {name}={value!r}" for name, value in details.items())
            self.violations.append(reported[:1500])
            print(f"VIOLATION {reported[:1500]}", flush=True)
