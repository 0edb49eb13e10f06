"""What the run proves, claim by claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from soak.slope import Slope, memory_slope
from soak.tally import OVERLOAD_ENDS, Tally
from soak.watch import LEFT_OVER, Kept, Rest, Watch, longest_life

_MIB = 2**20
_BY_KEY = "refused: 429"
# An idle server may keep a few connections; pools of threads fill up to their size.
_SPARE_FILES, _SPARE_THREADS = 4, 40


@dataclass(frozen=True, slots=True)
class Check:
    claim: str
    holds: bool
    found: str


def verdicts(tally: Tally, watch: Watch) -> list[Check]:
    """All claims, the most telling first."""
    rests = longest_life(watch.rests)
    equal = tally.outcomes["equal"] + tally.outcomes["equal as far as it was read"]
    refused = sum(n for outcome, n in tally.outcomes.items() if outcome.startswith("refused"))
    by_key = sum(n for outcome, n in tally.outcomes.items() if outcome.startswith(_BY_KEY))
    return [
        Check(
            "nothing happened that must not (answers, errors, refusals, blocks, logs)",
            tally.num_violations == 0,
            f"{tally.num_violations} violations",
        ),
        Check(
            "answers were bit for bit those of a quiet server",
            equal > 0 and not any(what.startswith("an answer differs") for what in tally.blamed),
            f"{equal:,} compared, {tally.outcomes['equal']:,} of them to their end",
        ),
        Check(
            "the server refused what was too much, and said when to come again",
            by_key > 0 and refused > by_key,
            f"{refused:,} refused, {by_key:,} of them by a key's own limit (429)",
        ),
        Check(
            "an idle server holds no block and no request",
            len(watch.rests) > 0 and not any(tally.blamed[what] for what in LEFT_OVER),
            f"looked at {len(watch.rests)} times, "
            f"something was left {sum(tally.blamed[what] for what in LEFT_OVER)} times",
        ),
        _memory_check("memory is flat after the overload", _settled_slope(tally, rests, _rss)),
        _memory_check(
            "memory in use, without what the allocators keep free, is flat after the overload",
            _settled_slope(tally, rests, in_use),
        ),
        *_kept_check(watch.kept),
        _leftover_check("files", [r.files for r in rests], _SPARE_FILES),
        _leftover_check("threads", [r.threads for r in rests], _SPARE_THREADS),
    ]


def in_use(rest: Rest) -> int:
    """Bytes that C's allocator and Python's have given out."""
    c, python = rest.census["malloc"], rest.census["python"]
    return c["uordblks"] + c["hblkhd"] + python["bytes_in_blocks"]


def _rss(rest: Rest) -> int:
    return rest.rss


def _settled_slope(tally: Tally, rests: list[Rest], size: Callable[[Rest], int]) -> Slope | None:
    """After the overload, whose peak the allocator keeps: a step there is no slope."""
    peak = max((at for at, event in tally.events if event == OVERLOAD_ENDS), default=0.0)
    settled = [rest for rest in rests if rest.at > peak]
    return memory_slope([rest.at for rest in settled], [size(rest) for rest in settled])


def _memory_check(claim: str, slope: Slope | None) -> Check:
    if slope is None:
        return Check(claim, holds=True, found="too short a run to tell")
    found = (
        f"{slope.level / _MIB:.0f} MiB and {slope.per_hour / _MIB:+.2f} MiB an hour "
        f"(95 %: {slope.low / _MIB:+.2f} to {slope.high / _MIB:+.2f}) "
        f"over {slope.num_points} looks in {slope.hours * 60:.0f} minutes"
    )
    return Check(claim, slope.is_flat, found)


def _kept_check(kept: Kept) -> list[Check]:
    if kept.folder is None:
        return []
    found = f"{kept.most / _MIB:.1f} of {kept.limit / _MIB:.1f} MiB at most"
    checks = [Check("the cache's folder keeps to its size", 0 < kept.most <= kept.limit, found)]
    if counts := kept.disk_counts():
        found = f"{counts['disk_hits']:,} tokens in {counts['disk_loads']:,} loads"
        checks.append(Check("blocks come back from the disk", counts["disk_hits"] > 0, found))
    return checks


def _leftover_check(what: str, counts: list[int], spare: int) -> Check:
    """Of an idle server, the last look against the first ones."""
    early = max(counts[: max(len(counts) // 4, 2)])
    return Check(
        f"no {what} are left open",
        counts[-1] <= early + spare,
        f"{early} at first, {counts[-1]} at last",
    )
