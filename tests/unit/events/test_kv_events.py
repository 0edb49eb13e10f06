"""KV events from the cache to consumers: over real sockets, through a real cache."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import pytest
import zmq

from prefixcache.core import PrefixCache
from prefixcache.events import wire
from prefixcache.events.config import KVEventsConfig, parse_kv_events
from prefixcache.events.form import WireForm
from prefixcache.events.publisher import EventPublisher
from prefixcache.events.sockets import EventSockets
from prefixcache.events.start import event_sockets
from prefixcache.exceptions import FieldError
from prefixcache.kv.events import CacheEvents
from prefixcache.server.options.serve_options import ServeOptions
from support.serving import wait_until

SIZE = 4
LOCAL = "tcp://127.0.0.1:*"


def config(**fields: Any) -> KVEventsConfig:
    given = {"enable_kv_cache_events": True, "endpoint": LOCAL, "replay_endpoint": LOCAL}
    return KVEventsConfig(**given | fields)


@contextmanager
def published(cache: PrefixCache, groups: Any = ("full",)) -> Generator[EventPublisher]:
    with closing(EventSockets(config())) as sockets:
        events = CacheEvents(cache, groups)
        with closing(EventPublisher(events, sockets, config(), model="tiny")) as publisher:
            publisher.start()
            yield publisher


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def subscribe(context: zmq.Context[Any]) -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Makes subscribers of an endpoint, which are closed at the end."""
    with ExitStack() as stack:

        def subscriber(endpoint: str, **options: int) -> zmq.Socket[bytes]:
            socket = stack.enter_context(context.socket(zmq.SUB))
            for name, value in options.items():
                setattr(socket, name, value)
            socket.subscribe(b"")
            socket.connect(endpoint)
            return socket

        yield subscriber


def replayed(context: zmq.Context[Any], endpoint: str, start: int) -> dict[int, bytes]:
    """The batches that a replay brings, by their sequences, which must come in order."""
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart([b"", wire.encode_sequence(start)])
        batches: dict[int, bytes] = {}
        while socket.poll(240_000):
            _, sequence, payload = socket.recv_multipart()
            if sequence == wire.END_OF_REPLAY:
                assert payload == b""
                assert list(batches) == sorted(batches)
                return batches
            batches[wire.decode_sequence(sequence)] = payload
    raise TimeoutError


class Known:
    """What a consumer knows, by the plainest rules."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int | None, int]] = set()

    def apply(self, *events: wire.Event) -> None:
        for event in events:
            if isinstance(event, wire.AllBlocksCleared):
                self.blocks.clear()
                continue
            names = {(event.group_idx, one) for one in event.block_hashes}
            if isinstance(event, wire.BlockStored):
                assert len(event.token_ids) == SIZE * len(names)
                self.blocks |= names
            else:
                self.blocks -= names


def read_snapshot(publisher: EventPublisher) -> tuple[wire.SnapshotHeader, Known]:
    snapshot = publisher.snapshot()
    header, *events, end = wire.decode_snapshot(iter(snapshot.next_part, b""))
    assert isinstance(header, wire.SnapshotHeader)
    assert isinstance(end, wire.SnapshotEnd)
    known = Known()
    known.apply(*events)
    assert len(known.blocks) == end.num_blocks
    return header, known


def serve(cache: PrefixCache, prompt: list[int], salt: str | None = None) -> None:
    sequence = cache.new_sequence(prompt, cache_salt=salt)
    hits = cache.count_prefix_hits(sequence)
    if cache.commit_prefix_plan(sequence, hits, len(prompt) - hits + 1) is None:
        return
    cache.mark_blocks_filled([sequence], [len(prompt)])
    cache.release([sequence])


def short(hashes: list[bytes]) -> list[int]:
    return [int.from_bytes(one[-8:], "big") for one in hashes]


GROUPS = [("full",), ("full", ("sliding_window", 2 * SIZE))]


def batches_of(
    context: zmq.Context[Any], socket: zmq.Socket[bytes], publisher: EventPublisher, last: int
) -> list[wire.EventBatch]:
    """All batches up to a sequence: those that came, and by a replay those before."""
    came: dict[int, bytes] = {}
    while last not in came and socket.poll(240_000):
        _, frame, payload = socket.recv_multipart()
        came[wire.decode_sequence(frame)] = payload
    assert list(came) == list(range(min(came), last + 1)), "a batch was lost or came late"
    endpoint = publisher.endpoints["replay_endpoint"]
    assert endpoint is not None
    again = replayed(context, endpoint, 0)
    assert list(again) == list(range(last + 1))
    assert again.items() >= came.items()
    return [wire.decode_batch(payload) for payload in again.values()]


def check_hits(cache: PrefixCache, prompts: list[list[int]], known: Known) -> None:
    """In a cache of one group, what is known says how much of each prompt hits."""
    for prompt in prompts:
        names = short(cache.new_sequence(prompt).block_hashes())
        missing = (at for at, name in enumerate(names) if (None, name) not in known.blocks)
        hits = cache.probe(cache.compute_block_hashes(prompt))
        assert hits == SIZE * next(missing, len(names))


@pytest.mark.parametrize("groups", GROUPS, ids=["one group", "two groups"])
def test_all_consumers_know_what_is_cached(context, subscribe, groups, seed):
    """One reads from the beginning, one from a snapshot on."""
    choose = random.Random(seed)
    cache = PrefixCache(40, SIZE, groups=groups, model="m")
    prompts = [[choose.randrange(2) for _ in range(choose.randrange(60))] for _ in range(12)]
    with published(cache, groups) as publisher:
        socket = subscribe(publisher.endpoints["endpoint"])
        numbers = count(2)

        def is_heard() -> bool:
            serve(cache, [next(numbers)] * SIZE)
            return bool(socket.poll(20))

        wait_until(is_heard)
        early, late, joined = Known(), Known(), -1
        for step in range(60):
            if step == 30:
                header, late = read_snapshot(publisher)
                joined = header.sequence
            if choose.random() < 0.1:
                choose.choice([cache.clear_cache_index, cache.new_weight_version])()
            serve(cache, choose.choice(prompts), choose.choice([None, None, "salt"]))
        header, now = read_snapshot(publisher)
        batches = batches_of(context, socket, publisher, header.sequence)
        for sequence, batch in enumerate(batches):
            early.apply(*batch.events)
            if sequence > joined:
                late.apply(*batch.events)
    assert header.root_hash == cache.root_hash().hex()
    assert now.blocks == early.blocks == late.blocks
    if groups == ("full",):
        check_hits(cache, prompts, now)


def test_events_that_nobody_takes_are_bounded_and_sent_again() -> None:
    cache = PrefixCache(1000, 1, model="m")
    cache.keep_events()
    for first in range(0, 90_000, 900):
        serve(cache, list(range(first, first + 900)))
    num_sent = 0
    kinds, hashes = [], set[int]()
    while events := cache.take_events(10_000):
        for kind, _, _, names, _ in events:
            num_sent += len(names)
            kinds.append(kind)
            hashes = hashes | set(names) if kind == "stored" else hashes - set(names)
    assert kinds[0] == "cleared"
    assert num_sent < 3 * 65536
    snapshot = cache.snapshot_events()
    assert snapshot is not None
    assert snapshot.num_blocks == len(hashes) == cache.stats()["cached_blocks"]


def test_events_begin_with_an_empty_cache_of_one_writer() -> None:
    cache = PrefixCache(40, SIZE, model="m")
    with pytest.raises(RuntimeError, match="keep_events"):
        cache.take_events(1)
    serve(cache, [1] * SIZE)
    with pytest.raises(RuntimeError, match="cached already"):
        cache.keep_events()
    cache.clear_cache_index()
    cache.keep_events()
    with pytest.raises(RuntimeError, match="already"):
        cache.keep_events()
    with pytest.raises(ValueError, match=r"^threads must be \"single_writer\""):
        PrefixCache(40, SIZE, threads="shared", model="m").keep_events()


def test_a_snapshot_comes_parents_first_and_in_chains() -> None:
    cache = PrefixCache(40, SIZE, model="m")
    cache.keep_events()
    for tail in (1, 2, 3):
        serve(cache, [0] * 3 * SIZE + [tail] * 2 * SIZE)
    while cache.take_events(1):
        pass
    snapshot = cache.snapshot_events()
    assert snapshot is not None
    seen: set[int | None] = {None}
    runs = snapshot.take(1000)
    for kind, _, parent, hashes, tokens in runs:
        assert (kind, len(tokens)) == ("stored", SIZE * len(hashes))
        assert parent in seen
        seen |= set(hashes)
    assert [len(run[3]) for run in runs] == [5, 2, 2]
    assert snapshot.take(1000) == []


def test_replays_are_of_what_is_kept_and_for_whoever_asks_rightly(context):
    cache = PrefixCache(400, SIZE, model="m")
    fields = config(buffer_steps=3)
    with closing(EventSockets(fields)) as sockets:
        publisher = EventPublisher(CacheEvents(cache, ("full",)), sockets, fields, model="tiny")
        with closing(publisher):
            publisher.start()
            for number in range(5):
                serve(cache, [number] * SIZE)
                publisher.snapshot()  # sends what there is
            endpoint = sockets.replay_endpoint
            assert endpoint is not None
            with context.socket(zmq.DEALER) as rude:
                rude.connect(endpoint)
                rude.send_multipart([b"", b"abc"])
                rude.send_multipart([b"what"])
                rude.send_multipart([b"", wire.encode_sequence(0)])
            assert list(replayed(context, endpoint, 0)) == [2, 3, 4]
            assert list(replayed(context, endpoint, 4)) == [4]
            assert replayed(context, endpoint, 9) == {}
            assert replayed(context, endpoint, 2**63 - 1) == {}
            samples = [one for family in publisher.families() for one in family.samples]
            values = {(one.name.split(":")[1], *one.labels.values()): one.value for one in samples}
            assert values["kv_event_batches_total",] == 5
            assert values["kv_event_blocks_total", "stored"] == 5
            assert values["kv_events_publishing",] == 1


def test_publishing_goes_on_after_a_failure_and_readers_begin_again(context, caplog):
    def is_publishing() -> bool:
        (gauge,) = next(iter(publisher.families())).samples
        return bool(gauge.value)

    cache = PrefixCache(40, SIZE, model="m")
    with published(cache) as publisher:
        with mock.patch.object(EventSockets, "replay_requests", side_effect=OSError("no")) as asked:
            wait_until(lambda: asked.call_count > 3)
            assert not is_publishing()
        wait_until(is_publishing)
        assert caplog.text.count("could not be published") == 1
        serve(cache, [1] * SIZE)
        publisher.snapshot()
        with mock.patch.object(WireForm, "event", side_effect=KeyError("lost")):
            serve(cache, [2] * SIZE)
            wait_until(lambda: caplog.text.count("could not be published") == 2)
        serve(cache, [3] * SIZE)
        header, known = read_snapshot(publisher)
        assert (header.sequence, len(known.blocks)) == (2, 3)
        assert list(replayed(context, publisher.endpoints["replay_endpoint"], 0)) == [2]


def test_a_peer_that_asks_without_end_leaves_time_to_publish(context):
    with closing(EventSockets(config())) as sockets, context.socket(zmq.DEALER) as rude:
        rude.connect(sockets.replay_endpoint)
        asked = 200
        for sequence in range(asked):
            rude.send_multipart([b"", wire.encode_sequence(sequence)])
        found: list[int] = []
        while len(found) < asked:
            at_once = [start for _, start in sockets.replay_requests()]
            assert len(at_once) <= 64
            found += at_once
    assert found == [*range(asked)]


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_a_peer_that_sends_a_long_frame_is_disconnected(context, which):
    kind = zmq.XSUB if which == "endpoint" else zmq.DEALER
    with (
        closing(EventSockets(config())) as sockets,
        context.socket(kind) as rude,
        rude.get_monitor_socket(zmq.Event.DISCONNECTED) as monitor,
    ):
        rude.connect(getattr(sockets, which))
        rude.send(b"\1" + bytes(2000))
        assert monitor.poll(240_000), "it is still connected"


def sequence_of(reader: zmq.Socket[bytes]) -> int:
    assert reader.poll(240_000), "nothing comes any more"
    return wire.decode_sequence(reader.recv_multipart()[1])


def test_a_consumer_that_never_reads_costs_others_nothing(subscribe):
    """40 batches of a MiB are more than its queue and the system's buffers hold."""
    with closing(EventSockets(config(hwm=5))) as sockets:
        reads = subscribe(sockets.endpoint)
        stuck = subscribe(sockets.endpoint, rcvhwm=1, rcvbuf=4096)
        numbers = count()

        def is_heard(socket: zmq.Socket[bytes]) -> bool:
            sockets.send(next(numbers), b"")
            return bool(socket.poll(10))

        wait_until(lambda: is_heard(reads))
        wait_until(lambda: is_heard(stuck))
        for number in range(1000, 1040):
            sockets.send(number, bytes(2**20))
            while (received := sequence_of(reads)) < 1000:
                pass  # of before
            assert received == number, "a batch is missing"
        assert sockets.num_overflows > 0


WRONG = {
    "no json": ("{", "must be a JSON object"),
    "no object": ("[1]", "must be a JSON object"),
    "unknown key": ('{"endpiont": "tcp://127.0.0.1:1"}', "'endpiont'; did you mean endpoint?"),
    "wrong type": ('{"enable_kv_cache_events": "yes"}', "enable_kv_cache_events"),
    "no buffer": ('{"buffer_steps": 0}', "buffer_steps"),
    "publisher": ('{"publisher": "kafka"}', "publisher"),
    "scheme": ('{"endpoint": "inproc://cache"}', "endpoint must be tcp://"),
    "port": ('{"replay_endpoint": "tcp://127.0.0.1:99999"}', "replay_endpoint must have a port"),
    "all addresses": ('{"enable_kv_cache_events": true, "endpoint": "tcp://*:1"}', "events-public"),
    "a name": (
        '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://example.com:1"}',
        "replay_endpoint of tcp://example.com:1",
    ),
}


@pytest.mark.parametrize(("text", "problem"), WRONG.values(), ids=WRONG)
def test_a_wrong_configuration_names_the_key(text: str, problem: str) -> None:
    with pytest.raises(FieldError, match="kv_events_config") as caught:
        ServeOptions(kv_events_config=text)
    assert problem in str(caught.value).replace("--kv-", "")


def test_off_and_local_configurations_are_taken() -> None:
    everywhere = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
    assert ServeOptions(kv_events_config=everywhere, kv_events_public=True)
    for text in ('{"endpoint": "tcp://*:5557"}', '{"publisher": "null"}', "null"):
        options = ServeOptions(kv_events_config=text)
        with event_sockets(options.kv_events_config) as sockets:
            assert sockets is None
    for host in ("localhost", "[::1]", "127.0.0.2"):
        parsed = parse_kv_events({"endpoint": f"tcp://{host}:1"})
        assert parsed is not None
        parsed.check_reach()


def test_an_endpoint_in_use_is_named() -> None:
    with (
        closing(EventSockets(config())) as sockets,
        pytest.raises(FieldError, match=f"replay_endpoint {sockets.endpoint}: Address already"),
    ):
        EventSockets(config(replay_endpoint=sockets.endpoint))


def test_an_endpoint_of_another_machine_is_connected_to() -> None:
    """As where one consumer gathers the events of many servers."""
    with closing(EventSockets(config(endpoint="tcp://gatherer.invalid:5557"))) as sockets:
        assert sockets.endpoint == "tcp://gatherer.invalid:5557"


def test_what_is_not_installed_is_named() -> None:
    with (
        mock.patch.dict(sys.modules, {"zmq": None, "prefixcache.events.sockets": None}),
        pytest.raises(FieldError, match=r"pip install '\.\[events\]'"),
        event_sockets(config()),
    ):
        pass


def test_tokens_and_names_are_those_of_the_prompt() -> None:
    cache = PrefixCache(40, SIZE, model="m")
    cache.keep_events()
    prompt = list(range(3 * SIZE + 1))
    serve(cache, prompt)
    names = short(cache.new_sequence(prompt).block_hashes())
    assert cache.take_events(100) == [("stored", 0, None, names, prompt[: 3 * SIZE])]
