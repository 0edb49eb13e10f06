"""Prompts go where their prefix is cached, unless that replica is too far behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from prefixcache._core import ReplicaChooser, ReplicaIndex

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingWeights:
    """What counts how much; the unit of all costs is a token to compute.

    - `overlap_weight`: what a token costs that is not cached at a replica, where one that waits
      there costs 1. It delays the prompts behind this one too, and takes the place of another.
    - `request_tokens`: the work that a request is besides the tokens of its prompt.
    - `window_tokens`: after this much more work per replica, work counts for less by a factor of e.
    - `balance`: what recent work above the replicas' mean costs: that times the square of the
      surplus over a tenth of the mean, or over 4,096 tokens where that is more.
    - `affinity`: the share of what is missing of a prompt that is taken as cached at its key's
      replica, from 0 to 1.
    """

    overlap_weight: float = 3.0
    request_tokens: float = 64.0
    window_tokens: float = 1e6
    balance: float = 0.4
    affinity: float = 0.5


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica for a prompt, and the tokens of the prompt that should hit there."""

    replica: str
    hit_tokens: int


@dataclass(slots=True, eq=False)
class Routed:
    """A prompt that was sent to a replica; for `PrefixRouting.settle`."""

    replica: str
    number: int
    computed_tokens: int
    # Of the blocks that are to be computed.
    hashes: Hashes
    is_settled: bool = False


class PrefixRouting:
    """Knows what each replica has cached and was sent, and orders replicas for a prompt.

    The cost of a replica is the tokens that it computes before the prompt's first one: the work
    that waits there, and, with more weight, what is not cached there of the prompt. A surplus of
    recent work costs too, so that a prefix in high demand comes to be cached by a second replica.
    Equal replicas take turns. The same calls give the same choices.

    Replicas go by their names, and blocks by the 64-bit hashes of KV events (uint64 arrays). What
    is known of caches may be changed from another thread than the one that chooses.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_blocks: int = 1 << 20,
        weights: RoutingWeights | None = None,
        seed: int = 0,
    ) -> None:
        """Without replicas. Up to `max_blocks` blocks of `block_size` tokens are known of each.

        Raises `ValueError` for a weight that is out of its range.
        """
        self._block_size = block_size
        self._index = ReplicaIndex(max_blocks)
        self._chooser = ReplicaChooser(**asdict(weights or RoutingWeights()), seed=seed)
        self._numbers = dict[str, int]()
        self._names = dict[int, str]()
        # Tokens that each replica was sent to compute and has not; an item a number.
        self._waiting = np.zeros(0)
        # The names that were asked about last, and their numbers: mostly the same ones are next.
        self._asked: list[str] | None = None
        self._asked_numbers = np.zeros(0, np.intp)

    @property
    def replicas(self) -> tuple[str, ...]:
        """The names of the replicas."""
        return tuple(self._numbers)

    @property
    def num_blocks(self) -> int:
        """Different blocks that are known of."""
        return self._index.num_blocks

    def add(self, replica: str) -> None:
        """Add a replica without blocks, unless it is there."""
        if replica in self._numbers:
            return
        number = self._index.add_replica()
        self._chooser.add_replica(number, replica)
        if number == len(self._waiting):
            self._waiting = np.append(self._waiting, 0.0)
        self._waiting[number] = 0.0
        self._numbers[replica] = number
        self._names[number] = replica
        self._asked = None

    def remove(self, replica: str) -> None:
        """Forget a replica, if it is there."""
        number = self._numbers.pop(replica, None)
        if number is None:
            return
        del self._names[number]
        self._asked = None
        self._index.remove_replica(number)
        self._chooser.remove_replica(number)

    def stored(self, replica: str, hashes: Hashes) -> int:
        """A replica has cached blocks. Returns how many found no room. Raises `KeyError`."""
        return self._index.stored(self._numbers[replica], hashes)

    def removed(self, replica: str, hashes: Hashes) -> None:
        """A replica has evicted blocks. Raises `KeyError` for a replica that is not there."""
        self._index.removed(self._numbers[replica], hashes)

    def clear(self, replica: str) -> None:
        """A replica has nothing cached any more. Raises `KeyError`."""
        self._index.clear(self._numbers[replica])

    def choose(
        self,
        hashes: Hashes | Sequence[Hashes],
        prompt_tokens: int,
        loads: Mapping[str, float],
        *,
        hit_tokens: Mapping[str, int] | None = None,
        key: str | None = None,
        most: int | None = None,
    ) -> list[Choice]:
        """The best of the replicas that `loads` names, up to `most`, the best first.

        `hashes` are those of the prompt's full blocks, or several such arrays where replicas have
        unlike root hashes: what matches counts. `loads` are tokens that a replica has to
        compute before it, besides those of requests that this object has routed and not settled; a
        name that was not seen before is added. `hit_tokens` replaces what is known of a replica
        that said itself what the prompt would hit there. `key` is the client's `prompt_cache_key`.
        """
        numbers = self._numbers_of([*loads])
        hits = self._hits(hashes, hit_tokens or {})
        all_loads = np.full(len(hits), np.inf)
        all_loads[numbers] = np.fromiter(loads.values(), np.float64, len(loads))
        all_loads[numbers] += self._waiting[numbers]
        order = self._chooser.choose(hits, prompt_tokens, all_loads, key=key, most=most)
        # At least the last token is computed.
        usable = max(prompt_tokens - 1, 0)
        return [Choice(self._names[at], min(int(hits[at]), usable)) for at in order]

    def _numbers_of(self, replicas: list[str]) -> npt.NDArray[np.intp]:
        if replicas != self._asked:
            for replica in replicas:
                self.add(replica)
            numbers = [self._numbers[replica] for replica in replicas]
            self._asked, self._asked_numbers = replicas, np.array(numbers, np.intp)
        return self._asked_numbers

    def _hits(
        self, hashes: Hashes | Sequence[Hashes], reported: Mapping[str, int]
    ) -> npt.NDArray[np.uint32]:
        arrays = [hashes] if isinstance(hashes, np.ndarray) else hashes
        hits = np.max([self._index.hits(hashes) for hashes in arrays], axis=0)
        hits = hits * np.uint32(self._block_size)
        for replica, tokens in reported.items():
            if replica in self._numbers:
                hits[self._numbers[replica]] = tokens
        return hits

    def route(self, choice: Choice, hashes: Hashes, prompt_tokens: int) -> Routed:
        """The prompt goes to a replica: until it is settled, its blocks count as cached there.

        Raises `KeyError` for a replica that is not there.
        """
        number = self._numbers[choice.replica]
        computed = max(prompt_tokens - choice.hit_tokens, 0)
        hashes = hashes[choice.hit_tokens // self._block_size :]
        self._index.expected(number, hashes)
        self._chooser.note(number, computed)
        self._waiting[number] += computed
        return Routed(choice.replica, number, computed, hashes)

    def settle(self, routed: Routed) -> None:
        """The replica has computed the prompt, or never will. Any number of times."""
        if routed.is_settled:
            return
        routed.is_settled = True
        if self._numbers.get(routed.replica) == routed.number:
            self._waiting[routed.number] = max(
                self._waiting[routed.number] - routed.computed_tokens, 0.0
            )
            self._index.settled(routed.number, routed.hashes)
