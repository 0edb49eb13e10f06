"""`PrefixRouting` by names; its order and its knowledge are tested in Rust."""

import numpy as np
import pytest

from prefixcache.routing import Choice, PrefixRouting, RoutingWeights

BLOCK = 16


def hashes(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.uint64)


def routing(*replicas: str) -> PrefixRouting:
    made = PrefixRouting(block_size=BLOCK)
    for replica in replicas:
        made.add(replica)
    return made


def test_the_longest_prefix_wins_unless_its_replica_is_behind() -> None:
    one = routing("a", "b")
    one.stored("a", hashes(1, 2))
    one.stored("b", hashes(1))
    prompt = hashes(1, 2, 3)
    idle = {"a": 0, "b": 0}
    assert one.choose(prompt, 50, idle) == [Choice("a", 32), Choice("b", 16)]
    assert one.choose(prompt, 50, {"a": 47, "b": 0})[0].replica == "a"
    assert one.choose(prompt, 50, {"a": 49, "b": 0})[0].replica == "b"
    assert one.choose(prompt, 50, {"b": 0}) == [Choice("b", 16)]
    assert one.choose(hashes(1, 2), 32, idle)[0] == Choice("a", 31)
    one.removed("a", hashes(2))
    one.clear("b")
    assert one.choose(prompt, 50, idle) == [Choice("a", 16), Choice("b", 0)]


def test_what_a_replica_says_itself_counts() -> None:
    one = routing("a")
    one.stored("a", hashes(1))
    found = one.choose(hashes(1), 50, {"a": 0, "new": 0}, hit_tokens={"a": 0, "new": 16, "x": 9})
    assert found == [Choice("new", 16), Choice("a", 0)]
    assert one.replicas == ("a", "new")


def test_a_prompt_counts_as_cached_where_it_was_sent_until_it_is_settled() -> None:
    one = routing("a", "b", "c")
    prompt, loads = hashes(1, 2), dict.fromkeys("abc", 0)
    first = one.choose(prompt, 40, loads)[0]
    routed = one.route(first, prompt, 40)
    # 40 tokens wait there and 32 would hit: another one is no better for this prompt.
    other = one.choose(prompt, 40, loads)
    assert {c.replica: c.hit_tokens for c in other}[first.replica] == 32
    assert one.choose(hashes(8), 40, loads)[-1].replica == first.replica
    one.settle(routed)
    one.settle(routed)
    assert all(choice.hit_tokens == 0 for choice in one.choose(prompt, 40, loads))


def test_a_removed_replica_is_forgotten_and_its_number_serves_another() -> None:
    one = routing("a", "b")
    one.stored("a", hashes(1))
    routed = one.route(Choice("a", 16), hashes(1, 2), 40)
    one.remove("a")
    one.remove("a")
    one.add("c")
    one.settle(routed)
    assert one.choose(hashes(1), 20, {"b": 0, "c": 0, "a": 0}, most=2)[0].hit_tokens == 0
    with pytest.raises(KeyError):
        one.stored("x", hashes(1))


def test_loads_are_of_who_has_the_name_now() -> None:
    one, loads = routing("a", "b"), {"a": 0, "b": 900}
    assert one.choose(hashes(1), 20, loads)[0].replica == "a"
    for replica in "ab":
        one.remove(replica)
    for replica in "ba":
        one.add(replica)
    assert one.choose(hashes(1), 20, loads)[0].replica == "a"
    assert one.choose(hashes(1), 20, {}) == []


def test_requests_with_a_key_go_together_at_every_router() -> None:
    names = [f"replica-{i}" for i in range(8)]
    loads = dict.fromkeys(names, 0)

    def replicas(one: PrefixRouting, key: str | None) -> set[str]:
        chosen = set[str]()
        for prompt in map(hashes, range(4)):
            best = one.choose(prompt, 900, loads, key=key)[0]
            one.settle(one.route(best, prompt, 900))
            chosen.add(best.replica)
        return chosen

    assert len(replicas(routing(*names), None)) == 4
    first = routing(*names).choose(hashes(1), 900, loads, key="k")[0].replica
    assert routing(*reversed(names)).choose(hashes(1), 900, loads, key="k")[0].replica == first
    assert first in replicas(routing(*names), "k")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="affinity must be from 0 to 1, not 2"):
        PrefixRouting(block_size=BLOCK, weights=RoutingWeights(affinity=2))
    one = routing("a")
    with pytest.raises(ValueError, match="loads must be numbers from 0, not -1"):
        one.choose(hashes(1), 9, {"a": -1})
    with pytest.raises(TypeError, match="hashes must be a numpy array of uint64"):
        one.stored("a", np.array([1]))  # pyright: ignore[reportArgumentType]
