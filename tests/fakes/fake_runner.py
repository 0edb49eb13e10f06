"""A `PlainRunner` that checks its block tables, and can fail.

A wrong block table, a hit on a block that was not filled, or a block in two tables gives another
token than `answer_alone`. Every group of layers writes and reads through a table of its own, and
all of them must see the same tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fakes.plain_runner import KnownStep, PlainRunner, next_token
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.kv.specs import GroupKind
from prefixcache.types.step_plan import ScheduledSequence, SequenceOutput, StepPlan

T = TypeVar("T")


def tokens_of_plan(plan: StepPlan) -> list[tuple[ScheduledSequence, list[int]]]:
    """Each sequence with its part of the step's tokens."""
    ends = list(itertools.accumulate(sequence.num_tokens for sequence in plan.sequences))
    assert plan.num_tokens == (ends[-1] if ends else 0)
    tokens = plan.token_ids.tolist()
    parts = zip(plan.sequences, ends, strict=True)
    return [(sequence, tokens[end - sequence.num_tokens : end]) for sequence, end in parts]


def window_of(groups: Sequence[GroupKind]) -> int | None:
    """The last tokens that a model of these groups sees at all; None for all of them."""
    return None if "full" in groups else max(kind[1] for kind in groups)


def answer_alone(
    prompt: Sequence[int],
    max_tokens: int,
    eos: Sequence[int] = (),
    *,
    groups: Sequence[GroupKind] = ("full",),
) -> list[int]:
    """What a request gets that nobody shares anything with."""
    window = window_of(groups) or len(prompt) + max_tokens
    answer: list[int] = []
    while len(answer) < max_tokens and (not answer or answer[-1] not in eos):
        answer.append(next_token([*prompt, *answer][-window:]))
    return answer


class FakeRunner(PlainRunner):
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_tokens: int,
        max_seqs: int,
        max_pages: int,
        groups: Sequence[GroupKind] = ("full",),
    ) -> None:
        sizes = {"max_tokens": max_tokens, "max_seqs": max_seqs, "max_pages": max_pages}
        super().__init__(num_blocks, block_size, **sizes)
        self.arrays = [self._kv]
        self.block_tables = tuple(BlockTableBuffers.of_size(**sizes) for _ in groups)
        self.tables = self.block_tables
        self._windows = [None if kind == "full" else kind[1] for kind in groups]
        self._widest = self._windows.index(window_of(groups))
        self.plans: list[StepPlan] = []
        self.failures: list[Exception] = []
        self.on_row: Callable[[int, ScheduledSequence], None] = lambda row, sequence: None
        self.before_writes: Callable[[npt.NDArray[np.int64]], None] = lambda blocks: None
        self.lost: Exception | None = None

    def use(self, kv: npt.NDArray[np.int64]) -> None:
        """Keeps the tokens in this memory instead, [blocks, slots of a block]."""
        self._kv, self.arrays = kv, [kv]

    def run_empty_step(self) -> None:
        if self.lost is not None:
            raise self.lost

    def execute(self, plan: StepPlan) -> list[SequenceOutput]:
        self.plans.append(plan)
        self.run_empty_step()
        if self.failures:
            raise self.failures.pop(0)
        for tables in self.tables:
            self.before_writes(tables.slot_mapping[: plan.num_tokens] // self._kv.shape[1])
        self._write(self._kv, plan.token_ids)
        for row, (sequence, tokens) in enumerate(tokens_of_plan(plan)):
            self._check_tables(row, sequence, tokens)
            self.on_row(row, sequence)
        return self._outputs(plan)

    def _write(self, kv: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Puts the values of the step's tokens into the slots that each group has for them."""
        for tables in self.tables:
            slots = tables.slot_mapping[: values.size]
            kv[slots // kv.shape[1], slots % kv.shape[1]] = values

    def _read(self, kv: npt.NDArray[np.int64], row: int, group: int) -> tuple[int, list[int]]:
        """The first position on the pages that the group lists, and the values from there on."""
        tables = self.tables[group]
        pages = tables.indices[tables.indptr[row] : tables.indptr[row + 1]]
        assert 0 not in pages, "nobody holds the null block"
        unused = kv.shape[1] - int(tables.last_page_len[row])
        values = kv[pages].reshape(-1).tolist()
        return int(tables.first_pages[row]) * kv.shape[1], values[: len(values) - unused]

    def _check_tables(self, row: int, sequence: ScheduledSequence, tokens: list[int]) -> None:
        """Each group reads what the step's tokens see, and all read the same."""
        end = sequence.start + sequence.num_tokens
        widest_first, widest = self._read(self._kv, row, self._widest)
        for group, window in enumerate(self._windows):
            first, seen = self._read(self._kv, row, group)
            assert first + len(seen) == end
            assert first <= max(0, sequence.start + 1 - (window or end))
            assert seen[sequence.start - first :] == tokens
            assert seen == widest[first - widest_first :]

    def _seen(self, kv: npt.NDArray[np.int64], row: int, end: int) -> list[int]:
        """What the model sees at all that computes the position before `end`."""
        first, values = self._read(kv, row, self._widest)
        window = self._windows[self._widest] or end
        return values[max(0, end - window) - first : end - first]


async def loop_passes(engine: AsyncEngine) -> None:
    """Waits until the loop has done whatever it does now: it does it between two commands."""
    for _ in range(2):
        await engine.abort("nobody")


class StepGate:
    """A turnstile before a runner's steps, so that no test depends on how fast a step is."""

    def __init__(self, runner: FakeRunner) -> None:
        self._changed = threading.Condition()
        self._steps_left: int | None = None
        self.num_steps = 0
        self._is_held = False
        start = runner.submit

        def submit(plan: StepPlan) -> KnownStep:
            self._pass()
            self.num_steps += 1
            return start(plan)

        runner.submit = submit  # type: ignore[method-assign]

    def hold_after(self, steps: int = 0) -> None:
        """Lets that many steps through, and no more until `open`."""
        self._set(steps)

    def open(self) -> None:
        self._set(None)

    async def until_held(self) -> None:
        """Waits until a step stands before the closed gate."""
        assert await asyncio.to_thread(self._wait_for_a_held_step)

    async def open_for(self, engine: AsyncEngine, operation: Coroutine[Any, Any, T]) -> T:
        """Lets the held step go on once `operation` waits for its end."""
        task = asyncio.create_task(operation)
        while not engine.num_commands:
            await asyncio.sleep(0.001)
        self.open()
        return await task

    def _set(self, steps: int | None) -> None:
        with self._changed:
            self._steps_left = steps
            self._changed.notify_all()

    def _wait_for_a_held_step(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_held, 240)

    def _pass(self) -> None:
        with self._changed:
            self._is_held = self._steps_left == 0
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._steps_left != 0, 600)
            self._is_held = False
            if self._steps_left is not None:
                self._steps_left -= 1
