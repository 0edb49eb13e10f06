"""What becomes of blocks whose KV is computed: others may find them, or nobody needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.in_flight import InFlight
from prefixcache.scheduler.null_objects import NoSharing
from prefixcache.scheduler.state import RequestState
from prefixcache.types.step_plan import ScheduledSequence, SequenceOutput, StepPlan


class Publisher:
    """Appends what was sampled and registers full blocks; gives back those behind `windows`."""

    def __init__(
        self, cache: CacheManager, sharing: InFlight | NoSharing, *, windows: bool
    ) -> None:
        self._cache = cache
        self._sharing = sharing
        self._windows = windows

    def complete(
        self, plan: StepPlan, states: Sequence[RequestState], outputs: Sequence[SequenceOutput]
    ) -> list[tuple[ScheduledSequence, SequenceOutput]]:
        """Takes note of what a step computed; returns the part of `states` that have not ended."""
        rows: list[tuple[ScheduledSequence, SequenceOutput]] = []
        filled: list[tuple[RequestState, int]] = []
        size = self._cache.block_size
        sampled: dict[str, list[int]] = {}
        drafted = {row: len(inputs) for row, inputs in plan.drafts}
        for row, state in enumerate(states):
            if state.has_ended:
                continue
            scheduled, output = plan.sequences[row], outputs[row]
            rows.append((scheduled, output))
            if output.error is not None:
                continue
            state.take(scheduled, output)
            refused = drafted.get(row, 0) - len(output.after_drafts)
            computed = scheduled.start + scheduled.num_tokens - refused
            if output.is_late:
                computed -= 1
            if computed // size > scheduled.start // size:
                filled.append((state, computed))
            if output.token_id is not None:
                sampled[state.request_id] = output.token_ids
        if drafted:
            self.append_accepted(sampled)
        if filled:
            self.publish(filled)
            self.drop_unneeded(filled)
        if sampled:
            self._cache.append_tokens({name: token_ids[-1] for name, token_ids in sampled.items()})
        return rows

    def append_accepted(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """Adds all tokens but the last of each: their KV is there, and their blocks need names."""
        for place in range(max(map(len, sampled.values()), default=1) - 1):
            longer = {name: t[place] for name, t in sampled.items() if len(t) > place + 1}
            self._cache.append_tokens(longer)

    def publish(self, filled: Iterable[tuple[RequestState, int]]) -> None:
        """Registers full blocks of requests whose KV is there now, up to that many tokens."""
        written = [
            (state, min(upto, state.write_limit)) for state, upto in filled if state.publishes_more
        ]
        if not written:
            return
        duplicates = self._cache.mark_filled(
            [state.request_id for state, _ in written], [upto for _, upto in written]
        )
        for place, (state, upto) in enumerate(written):
            if state.num_resets == self._cache.versions.num_resets:
                state.count_written(upto, duplicates.get(place, 0), self._cache.block_size)
            state.num_published_tokens = upto
            self._sharing.advance(state)

    def drop_unneeded(self, computed: Iterable[tuple[RequestState, int]]) -> None:
        """Gives back what is behind the windows of requests that are computed up to there."""
        if self._windows:
            self._cache.drop_unneeded([(state.request_id, upto) for state, upto in computed])
