"""The shapes of work that can be asked for, and their sizes.

All are equal for equal sizes and seed. `agents` follows what vLLM reported in September 2026 of the
traces of AgentX: a median of 43 turns, 142K prompt tokens and 444 tokens of answer, sub-agents in
44 % of the sessions, four of them where there are any.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from prefixcache.config.checked import Checked, Count, NonNegativeFloat, PositiveFloat, PositiveInt
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError
from prefixcache.tools.bench.sessions import Session, Text, Turn

WorkloadName = Literal["shared-prefix", "multi-turn", "documents", "agents", "trace"]

_SHARE_WITH_SUB_AGENTS = 0.44
_MEDIAN_SUB_AGENTS = 4
_MEDIAN_SUB_AGENT_TURNS = 10
# Of turns and lengths, which are log-normal: one in six is over 1.8 times the median.
_SPREAD = 0.6


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a workload, lengths in tokens. Of agents, all but the prefix are medians."""

    prefix_len: int
    suffix_len: int
    output_len: int
    turns: int = 1


_DEFAULT_SIZES: dict[WorkloadName, Sizes] = {
    "shared-prefix": Sizes(1024, 64, 32),
    "multi-turn": Sizes(1024, 64, 32, turns=5),
    "documents": Sizes(2048, 64, 32),
    "agents": Sizes(16_000, 3200, 444, turns=43),
    "trace": Sizes(0, 0, 0),
}
_DEFAULT_REQUESTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig(Checked):
    """Which workload, and its sizes where they are not its own. Lengths are in tokens."""

    workload: WorkloadName = flag("shared-prefix", "Kind of requests.", "Benchmark")
    trace: Path | None = flag(
        None,
        "Trace to send: Mooncake's JSON lines, PTT or a recording, plain, gzip or xz.",
        "Benchmark",
    )
    num_requests: PositiveInt | None = flag(
        None,
        "Requests of each run of shared-prefix and documents; at most of a trace.",
        "Benchmark",
        shown=f"{_DEFAULT_REQUESTS}; all of a trace",
    )
    num_sessions: PositiveInt = flag(8, "Dialogues of multi-turn and agents.", "Benchmark")
    num_documents: PositiveInt = flag(4, "Number of documents.", "Benchmark")
    turns: PositiveInt | None = flag(
        None,
        "Turns of a dialogue; for agents the median.",
        "Benchmark",
        shown="5; of agents 43",
    )
    prefix_len: Count | None = flag(
        None,
        "Prompt tokens that all requests share, or of a document.",
        "Benchmark",
        shown="1024; documents 2048; agents 16000",
    )
    suffix_len: Count | None = flag(
        None,
        "New prompt tokens of each turn; for agents the median of a tool's result.",
        "Benchmark",
        shown="64; agents 3200",
    )
    output_len: PositiveInt | None = flag(
        None,
        "Tokens generated for each request; for agents the median.",
        "Benchmark",
        shown="32; agents 444",
    )
    scale_lengths: PositiveFloat = flag(
        1.0, "Factor for all lengths, so that they fit the model's context.", "Benchmark"
    )
    pause: NonNegativeFloat = flag(
        0.0, "Mean seconds between an answer and the session's next turn.", "Benchmark"
    )
    seed: Count = flag(0, "Seed of prompts and arrivals.", "Benchmark")

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.trace is not None and self.workload == "shared-prefix":
            object.__setattr__(self, "workload", "trace")
        if (self.trace is None) == (self.workload == "trace"):
            raise FieldError("trace", "must be given for the workload trace, and for no other.")
        if self.workload != "trace" and self.sizes.prefix_len + self.sizes.suffix_len == 0:
            raise FieldError("suffix_len", "and prefix_len must not both be 0.")

    @property
    def sizes(self) -> Sizes:
        """What was asked for, else the workload's own; lengths before they are scaled."""
        own = _DEFAULT_SIZES[self.workload]
        return Sizes(
            prefix_len=own.prefix_len if self.prefix_len is None else self.prefix_len,
            suffix_len=own.suffix_len if self.suffix_len is None else self.suffix_len,
            output_len=self.output_len or own.output_len,
            turns=self.turns or own.turns,
        )

    @property
    def request_count(self) -> int:
        """Requests of shared-prefix and documents."""
        return self.num_requests or _DEFAULT_REQUESTS

    def scaled(self, length: float) -> int:
        """A length times the scale; at least 1 where it was not 0."""
        return max(1, round(length * self.scale_lengths)) if length else 0


def make_sessions(config: WorkloadConfig) -> list[Session]:
    """The sessions of any workload but `trace`, in the order in which they begin."""
    return list(_MAKERS[config.workload](config, random.Random(config.seed)))


def _shared_prefix(config: WorkloadConfig, _draw: random.Random) -> Iterator[Session]:
    for number in range(config.request_count):
        yield Session(
            name=str(number),
            opening=_text(config, "prefix", config.sizes.prefix_len),
            turns=(_turn(config, number),),
        )


def _documents(config: WorkloadConfig, draw: random.Random) -> Iterator[Session]:
    """Each document is asked about as often as the others, in rounds of another order each."""
    order = list[int]()
    for number in range(config.request_count):
        order = order or draw.sample(range(config.num_documents), config.num_documents)
        document = _text(config, ("document", order.pop()), config.sizes.prefix_len)
        question = _turn(config, number)
        yield Session(name=str(number), turns=(replace(question, adds=document + question.adds),))


def _multi_turn(config: WorkloadConfig, draw: random.Random) -> Iterator[Session]:
    for number in range(config.num_sessions):
        yield Session(
            name=str(number),
            opening=_text(config, "system", config.sizes.prefix_len),
            turns=tuple(
                _turn(config, (number, turn), pause=_pause(config, draw, turn))
                for turn in range(config.sizes.turns)
            ),
        )


def _agents(config: WorkloadConfig, draw: random.Random) -> Iterator[Session]:
    for number in range(config.num_sessions):
        count = _drawn(draw, config.sizes.turns)
        turns = [_tool_turn(config, draw, (number, turn), turn) for turn in range(count)]
        for sub_agent in range(_count_sub_agents(draw)):
            at = draw.randrange(count)
            below = _sub_agent(config, draw, f"{number}.{sub_agent}")
            turns[at] = replace(turns[at], sub_sessions=(*turns[at].sub_sessions, below))
        opening = _text(config, "system and tools", config.sizes.prefix_len)
        yield Session(name=str(number), opening=opening, turns=tuple(turns))


def _count_sub_agents(draw: random.Random) -> int:
    if draw.random() >= _SHARE_WITH_SUB_AGENTS:
        return 0
    return _drawn(draw, _MEDIAN_SUB_AGENTS)


def _sub_agent(config: WorkloadConfig, draw: random.Random, name: str) -> Session:
    """A context of its own, behind a shorter prompt that all sub-agents share."""
    count = _drawn(draw, min(_MEDIAN_SUB_AGENT_TURNS, config.sizes.turns))
    opening = _text(config, "sub-agent's system and tools", config.sizes.prefix_len / 2)
    turns = [_tool_turn(config, draw, (name, turn), turn) for turn in range(count)]
    return Session(name=name, opening=opening, turns=tuple(turns))


def _tool_turn(config: WorkloadConfig, draw: random.Random, key: Hashable, turn: int) -> Turn:
    """A task, or what a tool said, and the next call of one."""
    sizes = config.sizes
    return Turn(
        adds=_text(config, ("own", key), _drawn(draw, sizes.suffix_len)),
        output_len=config.scaled(_drawn(draw, sizes.output_len)),
        pause=_pause(config, draw, turn),
    )


def _turn(config: WorkloadConfig, key: Hashable, pause: float = 0.0) -> Turn:
    return Turn(
        adds=_text(config, ("own", key), config.sizes.suffix_len),
        output_len=config.scaled(config.sizes.output_len),
        pause=pause,
    )


def _pause(config: WorkloadConfig, draw: random.Random, turn: int) -> float:
    """Exponential, before all turns but the first."""
    return draw.expovariate(1 / config.pause) if config.pause and turn else 0.0


def _drawn(draw: random.Random, median: float) -> int:
    """A count or length of a log-normal distribution; 0 where the median is."""
    return max(1, round(median * math.exp(draw.gauss(0.0, _SPREAD)))) if median else 0


def _text(config: WorkloadConfig, key: Hashable, length: float) -> tuple[Text, ...]:
    return (Text(key, config.scaled(length)),) if length else ()


_MAKERS: dict[WorkloadName, Callable[[WorkloadConfig, random.Random], Iterator[Session]]] = {
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "documents": _documents,
    "agents": _agents,
}
