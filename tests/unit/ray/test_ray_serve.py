"""Jobs and commands of `serve-ray`, over replicas that are played here."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from prefixcache.cli.main import app
from prefixcache.core import BlockHashes, PrefixCache
from prefixcache.events.reader import Update
from prefixcache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, SnapshotHeader
from prefixcache.exceptions import (
    EngineDeadError,
    FieldError,
    InvalidRequestError,
    PrefixCacheError,
    RequestTimeoutError,
    SlowReaderError,
)
from prefixcache.ray_serve.ray_options import RayOptions
from prefixcache.ray_serve.replicas.replica_state import (
    UPDATE_WEIGHTS,
    Command,
    Done,
    Refused,
    ReplicaState,
    Served,
)
from prefixcache.routing import PrefixRouting
from prefixcache.server.admin.model_dirs import ModelDirs
from prefixcache.server.http.access import AccessRules
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.options.limits import ServerLimits
from prefixcache.types.request import Ending, Request, RequestOutput
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import as_token_ids
from support.serving import client_of, wait_until

pytest.importorskip("ray")

import ray
from ray import serve
from ray.exceptions import RayActorError

from prefixcache.ray_serve import known_caches
from prefixcache.ray_serve.answer import RoutedAnswer
from prefixcache.ray_serve.app import create_ingress_app
from prefixcache.ray_serve.job import Accepted, Chunk, Failed, Outputs, RoutedJob, Stale
from prefixcache.ray_serve.known_caches import KnownCaches
from prefixcache.ray_serve.replicas.commands import CommandClient, Commands
from prefixcache.ray_serve.replicas.replica_set import merged_metrics

ROOT = PrefixCache(4, 4, model="m").root_hash()
STATE = ReplicaState(number=3, common="a", roots={"float32": ROOT.hex()})

Play = Callable[[RoutedJob], AsyncIterator[Chunk]]


class Handle:
    """Plays the replicas that a job is sent to, one after the other."""

    def __init__(self, *plays: Play) -> None:
        self._plays = list(plays)
        self.jobs: list[RoutedJob] = []
        self.num_open = 0

    def remote(self, job: RoutedJob) -> Call:
        self.jobs.append(job)
        self.num_open += 1
        return Call(self, self._plays.pop(0)(job))


class Call:
    def __init__(self, handle: Handle, parts: AsyncIterator[Chunk]) -> None:
        self._handle = handle
        self._parts = parts
        self._is_open = True

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._parts

    def cancel(self) -> None:
        self._handle.num_open -= self._is_open
        self._is_open = False


def _output(text: str, *, ends: bool = False) -> RequestOutput:
    return RequestOutput(request_id="a", text=text, ending=Ending("stop" if ends else None))


async def _answers(job: RoutedJob) -> AsyncGenerator[Chunk, None]:
    yield Accepted("a", STATE)
    for index in range(len(job.requests)):
        yield Outputs([(index, _output(f"{index}", ends=True))], time.monotonic())


async def _dies_at_once(_: RoutedJob) -> AsyncGenerator[Chunk, None]:
    raise RayActorError
    yield


async def _dies_in_the_middle(job: RoutedJob) -> AsyncGenerator[Chunk, None]:
    yield Accepted("b", STATE)
    yield Outputs([(0, _output("x", ends=True))], time.monotonic())
    yield Outputs([(index, _output("y")) for index in range(1, len(job.requests))], 0)
    raise RayActorError


async def _is_stale(_: RoutedJob) -> AsyncGenerator[Chunk, None]:
    yield Stale("c", 4)


async def _refuses(_: RoutedJob) -> AsyncGenerator[Chunk, None]:
    yield Failed(InvalidRequestError("no", param="prompt"))


async def _sends_for_ever(_: RoutedJob) -> AsyncGenerator[Chunk, None]:
    yield Accepted("d", STATE)
    while True:
        yield Outputs([(0, _output("z"))], 0)
        await asyncio.sleep(0)


async def _sends_nothing(_: RoutedJob) -> AsyncGenerator[Chunk, None]:
    yield Accepted("e", STATE)
    await asyncio.sleep(60)


def _requests(count: int = 1) -> list[Request]:
    return [
        Request(
            request_id=f"{index}", prompt_token_ids=as_token_ids(range(9)), params=SamplingParams()
        )
        for index in range(count)
    ]


def _client() -> CommandClient:
    nobody: Any = None
    return CommandClient(nobody, dataclasses.replace(STATE, number=0))


def _answer(handle: Any, requests: Sequence[Request] | None = None, **options: Any) -> RoutedAnswer:
    given = {"deadline": None, "max_unread": None, "block_size": 4, **options}
    given.setdefault("commands", _client())
    return RoutedAnswer(handle, requests or _requests(), **given)


async def _all(answer: RoutedAnswer) -> list[tuple[int, RequestOutput]]:
    await answer.begin()
    async with aclosing(answer.batches()) as batches:
        return [one async for batch in batches for one in batch]


async def test_outputs_come_as_the_replica_sends_them() -> None:
    handle = Handle(_answers)
    found = await _all(_answer(handle, _requests(2)))
    assert [(index, one.text) for index, one in found] == [(0, "0"), (1, "1")]
    assert handle.num_open == 0


async def test_a_job_carries_the_hashes_of_its_prompts() -> None:
    handle = Handle(_answers)
    await _all(_answer(handle))
    expected = PrefixCache(4, 4, model="m").compute_block_hashes(range(9))
    assert handle.jobs[0].short_hashes()["float32"].tolist() == expected.short().tolist()
    last = [int.from_bytes(expected.to_bytes(index)[-8:], "big") for index in range(2)]
    assert expected.short().tolist() == last


async def test_a_replica_that_died_is_followed_by_another() -> None:
    handle = Handle(_dies_at_once, _dies_in_the_middle, _answers)
    found = await _all(_answer(handle, _requests(3)))
    assert [len(job.requests) for job in handle.jobs] == [3, 3, 2]
    texts = ["", "", ""]
    for index, one in found:
        texts[index] = ("" if one.restarted else texts[index]) + one.text
    assert texts == ["x", "0", "1"]


async def test_a_stale_replica_is_reported_to_the_router() -> None:
    handle = Handle(_is_stale, _answers)
    await _all(_answer(handle))
    assert [dict(job.actual_hits) for job in handle.jobs] == [{}, {"c": 4}]
    handle = Handle(_is_stale, _is_stale, _is_stale, _answers)
    await _all(_answer(handle))
    assert [job.takes_stale for job in handle.jobs] == [False, False, False, True]


async def test_what_replicas_say_they_have_done_is_asked_of_the_next() -> None:
    handle, commands = Handle(_answers, _answers), _client()
    await _all(_answer(handle, commands=commands))
    assert commands.state == STATE
    await _all(_answer(handle, commands=commands))
    assert [job.command_number for job in handle.jobs] == [0, 3]


@pytest.mark.parametrize(
    ("plays", "options", "error"),
    [
        ([_refuses], {}, InvalidRequestError),
        ([_dies_at_once] * 4, {}, EngineDeadError),
        ([_sends_nothing], {"deadline": 0.0}, RequestTimeoutError),
        ([_sends_for_ever], {"max_unread": 3}, SlowReaderError),
    ],
    ids=["refused", "all-dead", "too-late", "unread"],
)
async def test_errors_end_the_job(
    plays: list[Play], options: dict[str, Any], error: type[PrefixCacheError]
) -> None:
    handle = Handle(*plays)
    answer = _answer(handle, **options)
    with pytest.raises(error):
        await _read_late(answer)
    assert handle.num_open == 0


async def _read_late(answer: RoutedAnswer) -> None:
    await answer.begin()
    for _ in range(100):  # turns of the loop, in which others send
        await asyncio.sleep(0)
    async with aclosing(answer.batches()) as batches:
        async for _ in batches:
            pass


async def test_who_stops_reading_ends_the_work() -> None:
    handle = Handle(_sends_for_ever)
    answer = _answer(handle)
    await answer.begin()
    async with aclosing(answer.batches()) as batches:
        await anext(batches)
    assert handle.num_open == 0


class Replica:
    """Does commands as `EngineReplica` does, and remembers what was asked of it."""

    def __init__(self, root: str = "a") -> None:
        self.state = ReplicaState(common=root)
        self.root = root
        self.asked: list[str] = []
        self.refuses: tuple[str, ...] = ()
        self.is_outdated = False

    async def replica_state(self) -> ReplicaState:
        return self.state

    async def check_weights(self, command: Command) -> Refused | None:
        return Refused(InvalidRequestError("no")) if "check" in self.refuses else None

    async def do(self, command: Command) -> Done | Refused:
        self.asked.append(command.name)
        if command.name in self.refuses:
            return Refused(InvalidRequestError("no"))
        if command.name == UPDATE_WEIGHTS:
            self.root = command.options["path"]
        return Done(len(self.asked), Served(self.root, "float32", self.root))

    async def obey(self, command: Command, after: ReplicaState) -> Done | Refused:
        answer = await self.do(command)
        if isinstance(answer, Done):
            self.state = after.served_by([answer.served])
        return answer

    async def agree(self, state: ReplicaState) -> None:
        self.is_outdated = self.state.number != state.number or self.root != state.common


def _update(path: str) -> Command:
    return Command(UPDATE_WEIGHTS, options={"path": path})


def _commands(*replicas: Replica) -> Commands:
    commands = Commands(timeout=240)

    async def ask(method: str, *args: Any) -> list[Any]:
        return [await getattr(one, method)(*args) for one in replicas]

    commands._ask = ask  # pyright: ignore[reportPrivateUsage]
    return commands


async def test_commands_reach_all_replicas_and_those_that_start_later() -> None:
    replicas = [Replica(), Replica()]
    commands = _commands(*replicas)
    assert (await commands.state()).common == "a"
    state, _ = await commands.run(Command("sleep", options={"level": 1}))
    assert [one.name for one in state.commands()] == ["sleep"]
    state, _ = await commands.run(Command("wake_up"))
    update = _update("b")
    state, done = await commands.run(update)
    assert done == Done(5, Served("b", "float32", "b"))
    assert replicas[0].asked[1:] == ["sleep", "wake_up", "pause", update.name, "resume"]
    assert state.number == 3
    assert (state.common, state.roots) == ("b", {"float32": "b"})
    assert state.commands() == [update]
    state, _ = await commands.run(Command("pause"))
    assert [one.name for one in state.commands()] == [update.name, "pause"]
    # A pause that the operator asked for outlasts an update.
    await commands.run(update)
    assert replicas[0].asked[-2:] == ["pause", update.name]


async def test_a_command_that_all_refuse_changes_nothing() -> None:
    replicas = [Replica(), Replica()]
    commands = _commands(*replicas)
    before = await commands.state()
    for one in replicas:
        one.refuses = ("pause", "check")
    for command in (Command("pause"), _update("b")):
        state, answer = await commands.run(command)
        assert state == before
        assert isinstance(answer, Refused)
    assert replicas[0].root == "a"
    with pytest.raises(EngineDeadError):
        await _commands().run(Command("pause"))


async def test_a_replica_that_fails_alone_is_replaced() -> None:
    replicas = [Replica(), Replica()]
    replicas[1].refuses = (UPDATE_WEIGHTS,)
    await _commands(*replicas).run(_update("b"))
    assert [one.is_outdated for one in replicas] == [False, True]


async def test_who_gives_commands_may_start_again() -> None:
    replicas = [Replica(), Replica()]
    await _commands(*replicas).run(_update("b"))
    # Cut off before the second one did it, and before anybody computes again.
    await replicas[0].obey(_update("c"), ReplicaState(number=2))
    commands = _commands(*replicas)
    assert (await commands.state()).common == "c"
    assert [one.is_outdated for one in replicas] == [False, True]
    assert replicas[0].asked[-1] == "resume"


async def test_commands_are_those_of_a_control() -> None:
    given = list[Command]()

    class Deployment:
        @property
        def run(self) -> Deployment:
            return self

        async def remote(self, command: Command) -> tuple[ReplicaState, Done | Refused]:
            given.append(command)
            refused = command.name == "resize"
            done = Done(7, Served("b", "float32", "b"))
            answer = Refused(InvalidRequestError("no")) if refused else done
            return ReplicaState(number=1, common="b"), answer

    deployment: Any = Deployment()
    commands = CommandClient(deployment, ReplicaState())
    assert await commands.give("sleep", level=1, mode="abort") == 7
    assert given == [Command("sleep", {"level": 1, "mode": "abort"})]
    assert commands.state.common == "b"
    with pytest.raises(InvalidRequestError):
        await commands.give("resize", num_blocks=3)


def test_hashes_made_elsewhere_are_those_of_the_cache() -> None:
    for salt in (None, "salt"):
        for size in (0, 3, 4, 35, 263, 2060):
            cache, tokens = PrefixCache(4, 4, model="m"), np.arange(size)
            made = BlockHashes.compute(tokens, ROOT, 4, cache_salt=salt)
            sent = BlockHashes.from_state(made.state())
            known = cache.new_sequence(tokens, cache_salt=salt, hashes=sent)
            plain = cache.new_sequence(tokens, cache_salt=salt)
            for one in (known, plain):
                one.extend(range(300))
            assert known.block_hashes() == plain.block_hashes()


def test_hashes_under_other_weights_are_not_taken() -> None:
    cache, tokens = PrefixCache(4, 4, model="m"), np.arange(35)
    others = BlockHashes.compute(tokens, bytes(32), 4)
    shorter = BlockHashes.compute(tokens[:9], ROOT, 4)
    expected = cache.new_sequence(tokens).block_hashes()
    for wrong in (others, shorter):
        assert cache.new_sequence(tokens, hashes=wrong).block_hashes() == expected
    state = shorter.state()
    for broken in (b"", state[:-1], state + b"\1", state[:8] + b"\xff" * 8 + state[16:]):
        with pytest.raises(ValueError, match="state"):
            BlockHashes.from_state(broken)


def test_metrics_of_replicas_are_one_page() -> None:
    page = "# HELP a_total Some.\n# TYPE a_total counter\n"
    pages = [page + f'a_total{{replica="{name}"}} {name}.0\n' for name in ("1", "2")]
    assert merged_metrics(pages).count("# TYPE") == 1
    assert [line[-3:] for line in merged_metrics(pages).splitlines()[2:]] == ["1.0", "2.0"]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"min_replicas": 2}, "min_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"num_replicas": 0}, "num_replicas"),
    ],
    ids=["no-most", "too-few", "none"],
)
def test_wrong_numbers_of_replicas_are_rejected(flags: dict[str, Any], name: str) -> None:
    with pytest.raises(FieldError) as error:
        RayOptions(**flags)
    assert error.value.field == name


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        # As Ray 2.60 ends a wait for its proxies and its replicas.
        ("start", TimeoutError("HTTP proxies not available after 60s."), "less busy"),
        ("start", RayActorError(), "less busy"),
        ("run", TimeoutError("Proxies not available after 60s."), "The replicas did not start"),
    ],
)
def test_what_ray_does_not_start_is_one_sentence(
    call: str,
    error: Exception,
    text: str,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module, name in ((ray, "init"), (ray, "shutdown"), (serve, "start"), (serve, "run")):
        monkeypatch.setattr(module, name, mock.Mock(side_effect=error if name == call else None))
    arguments = ["serve-ray", str(tiny_checkpoint("llama")), "--port", "0"]
    with mock.patch.dict("os.environ"), pytest.raises(SystemExit) as ended:
        app(arguments)
    assert ended.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert str(error) in line
    assert text in line


def test_events_tell_what_a_replica_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the reader is no end: another one begins where it has a snapshot."""
    hashes = BlockHashes.compute(range(35), ROOT, 4).short()
    header = SnapshotHeader(1, 5, "", "tiny", 4, [])
    updates: queue.SimpleQueue[Update | None] = queue.SimpleQueue()

    class Reader:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __iter__(self) -> Iterator[Update]:
            return iter(updates.get, None)

        def close(self) -> None:
            updates.put(None)

    monkeypatch.setattr(known_caches, "EventReader", Reader)
    monkeypatch.setattr(known_caches, "_AGAIN_SECONDS", 0.0)
    routing = PrefixRouting(block_size=4)
    for name in ("a", "b"):
        routing.add(name)
    caches = KnownCaches(routing)
    caches.read("a", {"endpoint": "", "replay_endpoint": ""}, list)

    def hits() -> int:
        choices = routing.choose(hashes, 35, {"a": 0, "b": 0})
        return next(one.hit_tokens for one in choices if one.replica == "a")

    def stored(count: int, group: int | None = None, medium: str | None = None) -> BlockStored:
        given = hashes[:count].tolist()
        return BlockStored(given, None, [], 4, None, medium, None, group_idx=group)

    def follows(update: Update, expected: int, *, known: bool = True) -> None:
        updates.put(update)
        wait_until(lambda: hits() == expected and caches.knows("a") == known)

    follows(Update(4, [stored(1)]), 4, known=False)
    follows(Update(5, restarted=True, snapshot=header), 0)
    follows(Update(5, [stored(3), stored(8, group=1)]), 12)
    on_disk = [stored(8, medium="DISK"), BlockRemoved(hashes[:1].tolist(), "DISK")]
    follows(Update(6, [BlockRemoved(hashes[2:3].tolist(), None), *on_disk]), 8)
    follows(Update(7, [AllBlocksCleared()]), 0)
    follows(Update(-1, [stored(2)], restarted=True), 8, known=False)
    broken: Any = "no update"
    updates.put(broken)
    follows(Update(5, [stored(3)], restarted=True, snapshot=header), 12)
    caches.forget("a")
    assert not caches.knows("a")


class AllReplicas:
    """What a `ReplicaSet` tells, of two replicas."""

    def __init__(self) -> None:
        self.is_paused = False

    async def statuses(self) -> list[dict[str, Any]]:
        known: dict[str, Any] = {
            "running": 1,
            "waiting": 2,
            "is_paused": self.is_paused,
            "is_sleeping": False,
            "halted": "paused" if self.is_paused else None,
        }
        more: dict[str, Any] = {"prefix_cache": {"hits": 1}, "resize": {}}
        return [{"replica": name, **known, **more} for name in ("a", "b")]

    async def about(self) -> list[dict[str, Any]]:
        names = (
            "batch_invariant",
            "dtype",
            "kv_dtype",
            "activations",
            "max_model_len",
            "weights",
            "prefix_hash",
            "replica",
        )
        return [dict.fromkeys(names, "x")] * 2

    async def metrics(self) -> str:
        return "# metrics\n"


async def test_the_ingress_tells_of_all_replicas() -> None:
    replicas: Any = AllReplicas()
    engine: Any = mock.Mock(max_model_len=64)
    commands = mock.Mock(give=mock.AsyncMock(return_value=None))
    served = ServedModel(names=("tiny",), tokenizer=mock.Mock(chat_template=None))
    app = create_ingress_app(
        engine,
        replicas,
        commands,
        served,
        rules=AccessRules(admin_api_keys=("admin",)),
        model_dirs=ModelDirs(),
        limits=ServerLimits(),
        flags={"model": "tiny"},
    )
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/load")).json()["server_load"] == 6
        assert (await client.get("/version")).json()["dtype"] == "x"
        assert (await client.post("/sleep?level=2")).status_code == 401
        client.headers["Authorization"] = "Bearer admin"
        for path in ("/server_info", "/prefix_cache/stats", "/prefix_cache/resize"):
            assert len((await client.get(path)).json()["replicas"]) == 2
        assert (await client.get("/metrics")).text == "# metrics\n"
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        replicas.is_paused = True
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "engine_paused")
        for method, path in (
            ("POST", "/prefix_cache/explain"),
            ("GET", "/prefix_cache/misses"),
            ("GET", "/prefix_cache/snapshot"),
            ("GET", "/chat"),
            ("GET", "/dashboard"),
            *(("POST", f"/weights/{call}") for call in ("begin", "chunk", "end", "abort")),
            ("GET", "/weights/status"),
        ):
            refused = await client.request(method, path)
            assert refused.status_code == 501, path
            assert path in refused.json()["error"]["message"]
        assert (await client.post("/sleep?level=2")).status_code == 200
        assert commands.give.await_args == mock.call("sleep", level=2)
        assert (await client.get("/openapi.json")).status_code == 200
