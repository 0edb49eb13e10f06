"""Which replica `PrefixRequestRouter` chooses, among replicas that are played here."""

from __future__ import annotations

import asyncio
import importlib
import queue
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import prefixcache
from prefixcache.core import PrefixCache
from prefixcache.events.reader import Update
from prefixcache.events.sockets import EventSockets
from prefixcache.events.wire import (
    BlockRemoved,
    BlockStored,
    Event,
    SnapshotHeader,
    decode_snapshot,
)
from prefixcache.exceptions import ConfigError, InvalidRequestError
from prefixcache.ray_serve.replicas.replica_state import Refused
from support.serving import until

pytest.importorskip("ray")

import ray
from ray.exceptions import RayActorError
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from fakes.ray_in_process import ARITHMETIC, job_of, replica_of, request_of
from prefixcache.ray_serve import known_caches, ray_internals
from prefixcache.ray_serve import router as router_module
from prefixcache.ray_serve.job import RoutedJob
from prefixcache.ray_serve.replica import EngineReplica
from prefixcache.ray_serve.router import PrefixRequestRouter
from prefixcache.types.request import Request

DEPLOYMENT = DeploymentID("replicas", "app")
ROOT = PrefixCache(4, 4, model="m").root_hash().hex()
PROMPT = range(100, 141)
LOCAL = {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:2"}
PUBLIC = {"endpoint": "tcp://10.1.2.3:1", "replay_endpoint": "tcp://10.1.2.3:2"}

Probe = Callable[[Request], int | Refused]


class FakeReplica:
    """Plays a `RunningReplica`; `probe` answers probes, and `asked` names the methods called."""

    def __init__(
        self,
        name: str,
        probe: Probe | int = 0,
        *,
        events: dict[str, Any] | None = None,
        node: str = "here",
        arithmetic: str = ARITHMETIC,
    ) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.replica_metadata = {"kv_events": events, "arithmetic": arithmetic}
        self.node_id = node
        self.asked: list[str] = []
        self.queue_len = 0
        # Only what a replica has can be called.
        self.target: Any = mock.Mock(spec=EngineReplica)
        self.target.probe_all = mock.AsyncMock(side_effect=self._probe_all)
        self._answer = probe

    def _probe_all(self, requests: Sequence[Request]) -> list[int] | Refused:
        answers = [
            self._answer if isinstance(self._answer, int) else self._answer(request)
            for request in requests
        ]
        refused = [one for one in answers if isinstance(one, Refused)]
        return refused[0] if refused else answers

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len

    def try_send_request(self, call: PendingRequest, *, with_rejection: bool) -> Any:
        assert not with_rejection
        assert call.resolved
        method = call.metadata.call_method
        self.asked.append(method)
        return mock.Mock(get_async=lambda: getattr(self.target, method)(*call.args))


class Readers:
    """Readers of events, which read what a test tells of an endpoint."""

    def __init__(self) -> None:
        self.updates: dict[str, queue.SimpleQueue[Update | None]] = {}
        self.num_taken = Counter[str]()
        self.closed: list[str] = []

    def make(self, endpoint: str, _replay: str, **_: Any) -> Any:
        self.updates[endpoint] = updates = queue.SimpleQueue[Update | None]()

        class Reader:
            def __iter__(_self) -> Iterator[Update]:  # noqa: N805
                for update in iter(updates.get, None):
                    yield update
                    # Who asks for the next one has done with this one.
                    self.num_taken[endpoint] += 1

            def close(_self) -> None:  # noqa: N805
                self.closed.append(endpoint)
                updates.put(None)

        return Reader()


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Readers:
    readers = Readers()
    monkeypatch.setattr(known_caches, "EventReader", readers.make)
    return readers


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[PrefixRequestRouter, None]:
    context = mock.Mock()
    context.get_node_id.return_value = "here"
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    router = PrefixRequestRouter(
        DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(block_size=4, unknown="of a later version")
    yield router
    router.update_replicas([])
    # Ray asks new replicas for the lengths of their queues, in a task.
    await asyncio.sleep(0)


def job(prompt: Sequence[int] = PROMPT, **options: Any) -> RoutedJob:
    fields = {"root": ROOT}
    fields |= {name: options.pop(name) for name in ("actual_hits", "root") if name in options}
    return job_of(request_of(prompt, **options), block_size=4, **fields)


def pending(*args: Any, name: str = "1") -> PendingRequest:
    metadata = RequestMetadata(request_id=name, internal_request_id=name)
    return PendingRequest(args=[*args], kwargs={}, metadata=metadata)


def names_of(ranks: Sequence[Sequence[Any]]) -> list[list[str]]:
    return [[one.replica_id.unique_id for one in rank] for rank in ranks]


async def order(
    router: PrefixRequestRouter, replicas: Sequence[FakeReplica], of: RoutedJob
) -> list[str]:
    """The replicas' names from the best to the last."""
    given: Any = [*replicas]
    ranks = await router.choose_replicas(given, pending(of))
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0] for rank in names_of(ranks)]


def update(router: PrefixRequestRouter, *replicas: FakeReplica) -> list[FakeReplica]:
    given: Any = [*replicas]
    router.update_replicas(given)
    return [*replicas]


def stored(of: RoutedJob, count: int, arithmetic: str = ARITHMETIC) -> BlockStored:
    hashes = of.short_hashes()[arithmetic][:count].tolist()
    return BlockStored(hashes, None, [], 4, None, None, None)


async def tell(
    router: PrefixRequestRouter, readers: Readers, name: str, *events: Event, sequence: int = 0
) -> None:
    """Tells the router all that a replica has cached, and waits until it knows."""
    header = SnapshotHeader(1, sequence, "", "tiny", 4, [])
    endpoint = f"tcp://127.0.0.1:{name}"
    goal = readers.num_taken[endpoint] + 2
    readers.updates[endpoint].put(Update(sequence, restarted=True, snapshot=header))
    readers.updates[endpoint].put(Update(sequence, events))
    await until(lambda: readers.num_taken[endpoint] == goal)
    assert router._caches.knows(name)


def with_events(name: str, probe: Probe | int = 0, **about: Any) -> FakeReplica:
    """A replica whose events are read."""
    events = LOCAL | {"endpoint": f"tcp://127.0.0.1:{name}"}
    return FakeReplica(name, probe, events=events, **about)


async def test_the_longest_prefix_comes_first(router: PrefixRequestRouter) -> None:
    replicas = update(router, FakeReplica("a", 4), FakeReplica("b", 36), FakeReplica("c", 16))
    of = job()
    call: Any = pending(of)
    given: Any = replicas
    assert names_of(await router.choose_replicas(given, call)) == [["b"], ["c"], ["a"]]
    # The replica that gets it compares this with what it has.
    assert of.expected_hits == {"b": 36}
    # Without it Ray would ask again at once for as long as nobody takes the request.
    assert call.routing_context.should_backoff is True
    assert [one.asked for one in replicas] == [["probe_all"]] * 3


async def test_calls_that_are_no_jobs_go_to_any_replica(router: PrefixRequestRouter) -> None:
    replicas: Any = update(router, FakeReplica("a"), FakeReplica("b", 36))
    for call in (None, pending(), pending("status")):
        assert names_of(await router.choose_replicas(replicas, call)) == [["a", "b"]]
    assert [one.asked for one in replicas] == [[], []]
    router.on_request_routed(pending("status"), replicas[0].replica_id, None)
    assert not router._routed


def _dies(_: Request) -> int:
    raise RayActorError


def _refuses(_: Request) -> Refused:
    return Refused(InvalidRequestError("asleep"))


@pytest.mark.parametrize("fails", [_dies, _refuses], ids=["dead", "refuses"])
async def test_a_failed_probe_counts_as_nothing_known(router, fails):
    replicas = update(router, FakeReplica("a", fails), FakeReplica("b", 8))
    of = job()
    assert await order(router, replicas, of) == ["b", "a"]
    assert of.expected_hits == {"b": 8}
    alone = job()
    assert await order(router, replicas[:1], alone) == ["a"]
    assert alone.expected_hits == {"a": 0}
    # A call in flight would count as a request of this router for ever.
    assert not router._asked.total()


async def test_a_late_probe_counts_as_nothing_known(router, monkeypatch):
    monkeypatch.setattr(router_module, "_PROBE_SECONDS", 0.05)
    late, other = update(router, FakeReplica("a", 36), FakeReplica("b", 8))
    never = asyncio.Event()
    late.target.probe_all = lambda _: never.wait()
    of = job()
    assert await order(router, [late, other], of) == ["b", "a"]
    assert of.expected_hits == {"b": 8}
    assert not router._asked.total()


async def test_work_from_elsewhere_weighs_against_a_prefix(router: PrefixRequestRouter) -> None:
    replicas = update(router, FakeReplica("a", 32), FakeReplica("b"))
    assert await order(router, replicas, job()) == ["a", "b"]
    # Ray asks for it once when a replica is new, maybe later than this.
    for queue_len, best in ((1, "a"), (2, "b")):
        replicas[0].queue_len = queue_len
        router.on_new_queue_len_info(replicas[0].replica_id, queue_len)
        assert (await order(router, replicas, job()))[0] == best


def load(router: PrefixRequestRouter, replica: Any) -> float:
    (tokens,) = router._loads([replica]).values()
    return tokens


async def test_its_own_requests_count_once(router: PrefixRequestRouter) -> None:
    """They are in Ray's length of the queue, and in tokens in the routing."""
    replica: Any = FakeReplica("a", 32)
    update(router, replica)
    assert load(router, replica) == 0
    router.on_request_routed(pending(job()), replica.replica_id, None)
    router.on_new_queue_len_info(replica.replica_id, 1)
    assert load(router, replica) == 0
    router.on_new_queue_len_info(replica.replica_id, 3)
    assert load(router, replica) == 2 * router_module._REQUEST_TOKENS
    router.on_request_completed(replica.replica_id, "unknown")
    assert load(router, replica) == 2 * router_module._REQUEST_TOKENS
    router.on_request_completed(replica.replica_id, "1")
    assert load(router, replica) == 3 * router_module._REQUEST_TOKENS


async def test_questions_in_flight_are_no_load(router: PrefixRequestRouter) -> None:
    replica: Any = FakeReplica("a")
    replica.queue_len = 1
    update(router, replica)
    answer = asyncio.Event()
    replica.target.probe_all = lambda _: answer.wait()
    choosing = asyncio.ensure_future(order(router, [replica], job()))
    await until(lambda: replica.asked)
    await until(lambda: router.replica_queue_len_cache.get(replica.replica_id))
    assert load(router, replica) == 0
    answer.set()
    await choosing
    assert load(router, replica) == router_module._REQUEST_TOKENS


async def test_requests_of_one_key_go_to_one_replica(router: PrefixRequestRouter) -> None:
    replicas = update(router, *(FakeReplica(name) for name in "abc"))
    firsts = Counter[str]()
    for key in range(12):
        chosen = {
            (await order(router, replicas, job(range(at, at + 40), affinity=f"key {key}")))[0]
            for at in (0, 100, 200)
        }
        assert len(chosen) == 1
        firsts.update(chosen)
    # Not one replica for all keys.
    assert len(firsts) > 1


async def test_events_tell_without_a_probe(router: PrefixRequestRouter, readers: Readers) -> None:
    replicas = update(router, with_events("a", 40), with_events("b"), FakeReplica("c", 8))
    of = job()
    await tell(router, readers, "a")
    await tell(router, readers, "b", stored(of, 5))
    assert await order(router, replicas, of) == ["b", "c", "a"]
    assert of.expected_hits == {"b": 20}
    assert [one.asked for one in replicas] == [[], [], ["probe_all"]]
    readers.updates["tcp://127.0.0.1:b"].put(
        Update(1, [BlockRemoved(of.short_hashes()[ARITHMETIC][1:5].tolist(), None)])
    )
    await until(lambda: router._routing.num_blocks == 1)
    assert await order(router, replicas, of) == ["c", "b", "a"]


async def test_replicas_of_unlike_processors_are_found_by_hashes_of_their_own(router, readers):
    """Each names its blocks under its own root, and a new one may have a root of its own."""
    replicas = update(router, *(with_events(name, 8, arithmetic=name) for name in "abc"))
    roots = {
        name: PrefixCache(4, 4, arithmetic=name, model="m").root_hash().hex() for name in "abc"
    }
    of = job(root={name: roots[name] for name in "ab"})
    await tell(router, readers, "a", stored(of, 2, "a"))
    await tell(router, readers, "b", stored(of, 5, "b"))
    await tell(router, readers, "c", stored(job(root=roots), 9, "c"))
    assert await order(router, replicas, of) == ["b", "a", "c"]
    assert of.expected_hits == {"b": 20}
    assert [one.asked for one in replicas] == [[], [], ["probe_all"]]
    router.on_request_routed(pending(of), replicas[1].replica_id, None)
    # What is left of the prompt, under the replica's own root alone.
    assert router._routing.num_blocks == 2 + 5 + 9 + (len(PROMPT) // 4 - 5)
    knows_all = job(root=roots)
    assert (await order(router, replicas, knows_all))[0] == "c"
    assert knows_all.expected_hits == {"c": 36}


async def test_blocks_under_a_salt_are_asked_for(router, readers):
    replicas = update(router, with_events("a", 12), with_events("b"))
    of = job(salt="secret")
    await tell(router, readers, "a")
    await tell(router, readers, "b")
    assert await order(router, replicas, of) == ["a", "b"]
    assert of.expected_hits == {"a": 12}


async def test_a_request_that_reads_no_cache_hits_nothing(router, readers):
    replicas = update(router, with_events("a"), FakeReplica("b", 36))
    of = job(read=False)
    await tell(router, readers, "a", stored(of, 9))
    await order(router, replicas, of)
    assert [*of.expected_hits.values()] == [0]
    assert replicas[1].asked == []


async def test_what_a_replica_said_itself_outdoes_its_events(router, readers):
    replicas = update(router, with_events("a"), FakeReplica("b", 4), FakeReplica("c", 36))
    of = job(actual_hits={"a": 0, "c": 8})
    await tell(router, readers, "a", stored(of, 9))
    assert await order(router, replicas, of) == ["c", "b", "a"]
    assert [one.asked for one in replicas] == [[], ["probe_all"], []]


async def test_a_dead_replica_is_forgotten(router: PrefixRequestRouter, readers: Readers) -> None:
    gone, other = update(router, with_events("a"), with_events("b"))
    of = job()
    await tell(router, readers, "a", stored(of, 9))
    await tell(router, readers, "b", stored(of, 1))
    assert await order(router, [gone, other], of) == ["a", "b"]
    update(router, other)
    assert readers.closed == ["tcp://127.0.0.1:a"]
    assert not router._caches.knows("a")
    assert router._routing.replicas == ("b",)
    # Ray may have chosen it a moment ago.
    router.on_request_routed(pending(of), gone.replica_id, None)
    router.on_request_completed(gone.replica_id, "1")
    assert await order(router, [other], of) == ["b"]
    # One of the same name that comes back has nothing cached, and is read again.
    update(router, gone, other)
    await tell(router, readers, "a")
    assert await order(router, [gone, other], of) == ["b", "a"]


@pytest.mark.parametrize(
    ("events", "node", "is_read"),
    [
        (LOCAL, "here", True),
        (LOCAL, "there", False),
        (PUBLIC, "there", True),
        (None, "here", False),
    ],
    ids=["local-here", "local-there", "public-there", "none"],
)
async def test_events_are_read_where_they_can_be(router, readers, events, node, is_read):
    replica = FakeReplica("a", events=events, node=node)
    for _ in range(2):
        update(router, replica)
        await asyncio.sleep(0)
    assert len(readers.updates) == is_read


async def test_blocks_in_flight_count_until_they_are_computed(router, readers, monkeypatch):
    monkeypatch.setattr(router_module, "_EVENT_SECONDS", 0.0)
    replicas = update(router, with_events("a"), with_events("b"))
    for name in ("a", "b"):
        await tell(router, readers, name)
    first, call = job(), pending(job())
    given: Any = replicas
    [[chosen], _] = await router.choose_replicas(given, call)
    name = chosen.replica_id.unique_id
    router.on_request_routed(call, chosen.replica_id, None)
    # A second one of this prompt finds it there, though it has to wait for it.
    await order(router, [chosen], first)  # pyright: ignore[reportArgumentType]
    assert first.expected_hits == {name: 40}
    call.args[0].computed()
    await until(lambda: not router._routing.num_blocks)
    await order(router, [chosen], first)  # pyright: ignore[reportArgumentType]
    assert first.expected_hits == {name: 0}


async def test_blocks_of_a_failed_request_do_not_count(router, readers):
    [replica] = update(router, with_events("a"))
    await tell(router, readers, "a")
    of = job()
    router.on_request_routed(pending(of), replica.replica_id, None)
    assert router._routing.num_blocks == len(PROMPT) // 4
    router.on_request_completed(replica.replica_id, "1")
    assert not router._routing.num_blocks
    assert not router._routed


@pytest.fixture
def replica_with_events(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> Callable[..., AbstractAsyncContextManager[FakeReplica]]:
    """Makes replicas with engines of 16-token blocks, whose events come over sockets."""
    folder = tiny_checkpoint(max_position_embeddings=2048)

    @asynccontextmanager
    async def make(name: str, **flags: Any) -> AsyncGenerator[FakeReplica]:
        async with replica_of(monkeypatch, folder, name, flags=flags) as engine:
            events = (await engine.record_replica_metadata())["kv_events"]
            replica = FakeReplica(name, events=events)
            replica.target = engine
            yield replica

    return make


async def job_for(replica: FakeReplica, prompt: Sequence[int]) -> RoutedJob:
    root = (await replica.target.about())["prefix_hash"]["root_hash"]
    return job_of(request_of(prompt), root=root)


async def answer(replica: FakeReplica, of: RoutedJob) -> None:
    async for _ in replica.target.generate(of):
        pass


async def test_events_of_engines_reach_the_router(router, replica_with_events):
    """Over sockets: a snapshot of what was cached before, then what is stored."""
    router.initialize_state(block_size=16)
    async with replica_with_events("a") as first, replica_with_events("b") as second:
        before = await job_for(first, range(5, 75))
        later = await job_for(first, range(105, 175))
        await answer(second, before)
        replicas = update(router, first, second)
        await until(lambda: all(map(router._caches.knows, "ab")) and router._routing.num_blocks)
        assert await order(router, replicas, before) == ["b", "a"]
        assert before.expected_hits == {"b": 64}
        await answer(first, later)
        await until(lambda: router._routing.num_blocks == 8)
        assert await order(router, replicas, later) == ["a", "b"]
        assert [one.asked for one in replicas] == [["kv_snapshot"]] * 2
        update(router)
        await asyncio.sleep(0)


class LossyNetwork:
    """Loses two of three messages of a publisher's `sockets`, while it `is_lossy`."""

    def __init__(self, sockets: EventSockets) -> None:
        self._send = sockets.send
        self.num_sent = self.num_lost = 0
        self.is_lossy = True

    def send(self, sequence: int, payload: bytes) -> None:
        if self.is_lossy and sequence % 3 != 0:
            self.num_lost += 1
        else:
            self._send(sequence, payload)
        self.num_sent += 1


async def test_events_that_the_network_loses_are_replayed(router, monkeypatch, replica_with_events):
    """The router knows afterwards what the replica has, though blocks were stored and evicted."""
    router.initialize_state(block_size=16)
    prompts = [[3 + (n * 31 + at * 7) % 370 for at in range(40 + n * 5)] for n in range(24)]
    async with replica_with_events("a", num_blocks=60) as replica:
        engine = replica.target
        sockets = engine._events._sockets
        network = LossyNetwork(sockets)
        monkeypatch.setattr(sockets, "send", network.send)
        update(router, replica)
        await until(lambda: router._caches.knows("a"))
        jobs = [await job_for(replica, prompt) for prompt in prompts]
        for of in jobs[:-1]:
            before = network.num_sent
            await answer(replica, of)
            # So that no batch has the events of two prompts.
            await until(lambda count=before: network.num_sent > count)
        network.is_lossy = False
        await answer(replica, jobs[-1])
        _, *events, _ = decode_snapshot(await engine.kv_snapshot())
        cached = {name for one in events for name in getattr(one, "block_hashes", ())}
        await until(lambda: router._routing.num_blocks == len(cached))
        for of in jobs:
            await order(router, [replica], of)
            assert of.expected_hits == {"a": engine._engine.probe(of.requests[0])}
        assert network.num_lost > 5
        assert engine._engine.control.prefix_cache_stats().evictions
        # No probe reported it.
        assert replica.asked == ["kv_snapshot"]
        update(router)
        await asyncio.sleep(0)


def test_another_ray_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = Path(prefixcache.__file__).parent
    private = [file.name for file in package.rglob("*.py") if "serve._private" in file.read_text()]
    assert private == ["ray_internals.py"]
    ray_internals.tell_untried()
    assert caplog.messages == []  # the Ray of requirements/dev.txt
    monkeypatch.setattr(ray, "__version__", "2.99.1")
    ray_internals.tell_untried()
    assert "Ray 2.99.1 was not tried" in caplog.text
    monkeypatch.setitem(sys.modules, "ray.serve._private.common", None)
    with pytest.raises(ConfigError, match=r"Ray 2\.99\.1 .* install ray==2\."):
        importlib.reload(ray_internals)
