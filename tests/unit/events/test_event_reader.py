"""A reader of KV events knows what its publisher holds, whatever was lost in between."""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterable
from typing import Any

import pytest

from fakes.fake_publisher import FakePublisher, Follower, following, removed, stored
from prefixcache.events.reader import EventReader
from prefixcache.events.wire import AllBlocksCleared
from support.repeatable import bounded
from support.serving import wait_until


@pytest.fixture
def publisher() -> Generator[FakePublisher, None, None]:
    publisher = FakePublisher()
    yield publisher
    publisher.close()


def reader_of(publisher: FakePublisher, **options: Any) -> EventReader:
    options = {"replay_endpoint": publisher.replay_endpoint, "check_seconds": 0.05} | options
    return EventReader(publisher.endpoint, **options)


def wait_for(follower: Follower, publisher: FakePublisher) -> None:
    wait_until(lambda: follower.held.hashes == publisher.held.hashes or follower.error is not None)


def connected(follower: Follower) -> bool:
    return bool(follower.restarts)


def test_who_joins_late_reads_the_replay(publisher: FakePublisher) -> None:
    publisher.publish(stored(1, 2))
    publisher.publish(stored(3), removed(1))
    with following(reader_of(publisher)) as follower:
        wait_for(follower, publisher)
        publisher.publish(stored(4))
        wait_for(follower, publisher)
        assert follower.sequences == [-1, 0, 1, 2]
        publisher.publish(AllBlocksCleared())
        wait_for(follower, publisher)
    assert [update.snapshot for update in follower.restarts] == [None]


def test_who_joins_late_reads_a_snapshot(publisher: FakePublisher) -> None:
    publisher.publish(stored(1, 2))
    publisher.publish(removed(1), forgets=True)
    with following(reader_of(publisher, snapshot=publisher.snapshot)) as follower:
        wait_for(follower, publisher)
        publisher.publish(removed(2), stored(5))
        wait_for(follower, publisher)
    (start,) = follower.restarts
    assert start.snapshot is not None
    assert (start.sequence, start.snapshot.root_hash) == (1, "00")


def test_batches_lost_on_the_way_are_replayed(publisher: FakePublisher) -> None:
    with following(reader_of(publisher, check_seconds=30.0)) as follower:
        wait_until(lambda: connected(follower))
        publisher.publish(stored(1))
        publisher.publish(stored(2), lost=True)
        publisher.publish(removed(1), lost=True)
        publisher.publish(stored(3))
        wait_for(follower, publisher)
    assert follower.sequences == [-1, 0, 1, 2, 3]
    assert len(follower.restarts) == 1


def test_a_lost_batch_that_nothing_follows_is_found(publisher: FakePublisher) -> None:
    with following(reader_of(publisher)) as follower:
        wait_until(lambda: connected(follower))
        publisher.publish(stored(1), lost=True)
        wait_for(follower, publisher)
    assert len(follower.restarts) == 1


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_gap_that_no_replay_closes_is_a_new_start(publisher, has_replay):
    options = {} if has_replay else {"replay_endpoint": None}
    with following(reader_of(publisher, snapshot=publisher.snapshot, **options)) as follower:
        wait_until(lambda: connected(follower))
        while not follower.held.hashes:  # the first may be sent before it is subscribed to
            publisher.publish(stored(1, 2))
            time.sleep(0.02)
        with publisher.lock:
            publisher.publish(removed(1), lost=True)
            publisher.publish(stored(3), forgets=True)
        wait_for(follower, publisher)
    assert len(follower.restarts) > 1
    assert follower.restarts[-1].snapshot is not None


def test_without_a_snapshot_a_new_start_forgets_what_may_be_gone(publisher: FakePublisher) -> None:
    with following(reader_of(publisher)) as follower:
        wait_until(lambda: connected(follower))
        publisher.publish(stored(1, 2))
        wait_for(follower, publisher)
        with publisher.lock:
            publisher.publish(removed(1), lost=True)
            publisher.publish(stored(3), forgets=True)
        wait_until(lambda: follower.held.hashes == {3})
    assert len(follower.restarts) == 2


def test_another_process_at_the_endpoint_is_a_new_start(publisher: FakePublisher) -> None:
    """Its sequence goes on just where that of the one before ended."""
    with following(reader_of(publisher)) as follower:
        wait_until(lambda: connected(follower))
        publisher.publish(stored(1))
        wait_for(follower, publisher)
        publisher.start_again()
        publisher.publish(stored(7))
        publisher.publish(stored(8))
        wait_for(follower, publisher)
    assert follower.held.hashes == {7, 8}


def test_a_snapshot_that_fails_leaves_the_replay(publisher, caplog):
    def breaks_off() -> Iterable[bytes]:
        yield from publisher.snapshot()[:2]

    publisher.publish(stored(1, 2))
    with following(reader_of(publisher, snapshot=breaks_off)) as follower:
        wait_until(lambda: len(follower.restarts) == 2)
        wait_for(follower, publisher)
    assert [update.snapshot is None for update in follower.restarts] == [False, True]
    assert "No snapshot" in caplog.text


def test_a_snapshot_of_a_process_that_has_ended_since_is_forgotten(
    publisher: FakePublisher,
) -> None:
    """The next process has sent as many batches by then, so that one of them seems to follow."""
    publisher.publish(stored(1))

    def outlived() -> list[bytes]:
        parts = publisher.snapshot()
        if publisher.num_snapshots == 1:
            publisher.start_again()
            publisher.publish(stored(7))
            publisher.publish(stored(8))
        return parts

    with following(reader_of(publisher, snapshot=outlived)) as follower:
        wait_until(lambda: len(follower.restarts) > 1)
        wait_for(follower, publisher)


def test_a_batch_of_another_form_is_an_error(publisher: FakePublisher) -> None:
    with following(reader_of(publisher)) as follower:
        wait_until(lambda: connected(follower))
        publisher.publish(stored("bytes of a hash"))  # type: ignore[arg-type]
        wait_until(lambda: follower.error is not None)
        assert publisher.endpoint in str(follower.error)
        follower.error = None


def test_a_reader_of_nobody_can_be_closed() -> None:
    with following(EventReader("tcp://127.0.0.1:1", "tcp://127.0.0.1:1")) as follower:
        pass
    assert follower.restarts == []


def test_whatever_is_lost_both_agree_in_the_end(publisher: FakePublisher, seed: int) -> None:
    choose = random.Random(seed)
    with following(reader_of(publisher, snapshot=publisher.snapshot)) as follower:
        wait_until(lambda: connected(follower))
        for number in range(bounded(usual=300, long=5000)):
            what = choose.random()
            if what < 0.005:
                publisher.start_again()
            elif what < 0.015:
                publisher.publish(AllBlocksCleared())
            else:
                held = sorted(publisher.held.hashes)
                gone = removed(*choose.sample(held, min(len(held), choose.randrange(3))))
                options = {"lost": choose.random() < 0.2, "forgets": choose.random() < 0.05}
                publisher.publish(stored(number), gone, **options)
            if choose.random() < 0.05:
                wait_for(follower, publisher)
        wait_for(follower, publisher)
