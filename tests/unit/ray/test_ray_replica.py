"""The replica of `serve-ray`, over a tiny model in this process, and an ingress over it."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import math
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from prefixcache._core import Cpu
from prefixcache.config.engine_config import EngineConfig
from prefixcache.core import BlockHashes
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.engine.build import build
from prefixcache.events.wire import BlockStored, SnapshotEnd, SnapshotHeader, decode_snapshot
from prefixcache.exceptions import (
    ConfigError,
    EngineDeadError,
    EngineHaltedError,
    InvalidRequestError,
    PrefixCacheError,
    QueueFullError,
    RequestTimeoutError,
)
from prefixcache.models.conversion import quantize_folder
from prefixcache.ray_serve.ray_options import RayOptions
from prefixcache.ray_serve.replicas.replica_state import (
    UPDATE_WEIGHTS,
    Command,
    Done,
    Refused,
    ReplicaState,
    Served,
)
from prefixcache.runner.cpu.cpu_runner import KERNEL_REVISION
from prefixcache.server.options.serve_options import ServeOptions
from prefixcache.types.request import Request
from support.serving import client_of, metric, served_folder, until

pytest.importorskip("ray")

import ray.util
from ray import serve
from ray.serve.exceptions import RayServeException

from fakes.ray_in_process import (
    BLOCK,
    FakeCommands,
    Handle,
    config_of,
    enter_replica,
    job_of,
    replica_of,
    request_of,
)
from prefixcache.ray_serve import ray_run
from prefixcache.ray_serve.application import build_application
from prefixcache.ray_serve.ingress import Ingress
from prefixcache.ray_serve.job import Accepted, Chunk, Failed, Outputs, Stale
from prefixcache.ray_serve.replica import EngineReplica, _events_config, _received
from prefixcache.ray_serve.replicas import replica_set
from prefixcache.ray_serve.replicas.commands import COMMANDS, REPLICAS, CommandClient, Commands
from prefixcache.ray_serve.replicas.replica_set import ReplicaSet
from prefixcache.ray_serve.router import PrefixRequestRouter

PROMPT = [3 + place * 7 % 370 for place in range(70)]
EXACT = {"cpu_activations": "exact"}
OTHER = [5 + place * 11 % 370 for place in range(70)]
# So long that it is in flight whenever a test looks.
LONG = 1900

Checkpoint = Callable[..., Path]


@pytest.fixture
def folder(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint(max_position_embeddings=2048)


@pytest.fixture
def other_weights(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint(max_position_embeddings=2048, seed=1)


@pytest.fixture
async def replica(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> AsyncGenerator[EngineReplica, None]:
    async with replica_of(monkeypatch, folder) as one:
        yield one


async def root_of(replica: EngineReplica) -> str:
    return (await replica.about())["prefix_hash"]["root_hash"]


async def parts_of(replica: EngineReplica, *requests: Request, **fields: Any) -> list[Chunk]:
    """All that a replica says of a job; `fields` are those of `RoutedJob`."""
    job = job_of(*requests, root=await root_of(replica), **fields)
    async with aclosing(replica.generate(job)) as parts:
        return [one async for one in parts]


def tokens_of(parts: Sequence[Chunk], index: int = 0) -> list[int]:
    outputs = [one for part in parts if isinstance(part, Outputs) for one in part.outputs]
    return [token for at, one in outputs if at == index for token in one.token_ids]


async def lone_answers(folder: Path, *prompts: Sequence[int]) -> list[list[int]]:
    """The tokens that an engine without a router answers each prompt with."""
    engine = AsyncEngine(build(config_of(folder)).engine)
    try:
        found = list[list[int]]()
        for prompt in prompts:
            stream = engine.generate(request_of(prompt))
            found.append([token async for output in stream for token in output.token_ids])
        return found
    finally:
        await engine.shutdown()


def update_to(folder: Path) -> Command:
    options = {"path": str(folder), "mode": "recompute", "revision": None, "tag": None}
    return Command(UPDATE_WEIGHTS, options=options)


# Jobs.


async def test_an_answer_is_that_of_a_lone_engine(replica: EngineReplica, folder: Path) -> None:
    parts = await parts_of(replica, request_of(PROMPT, "p"), request_of(OTHER, "o"))
    assert parts[0] == Accepted("a", await replica.replica_state())
    assert all(isinstance(one, Outputs) for one in parts[1:])
    assert [tokens_of(parts, 0), tokens_of(parts, 1)] == await lone_answers(folder, PROMPT, OTHER)


async def test_requests_count_from_when_they_came_here(replica: EngineReplica) -> None:
    """The clock of the ingress is that of another machine, and says nothing here."""
    parts = await parts_of(replica, request_of(PROMPT, arrival_time=1e12))
    assert len(tokens_of(parts)) == 6
    waited = metric(await replica.metrics(), "request_queue_time_seconds_sum")
    assert 0 <= waited < 1e6


async def test_hashes_of_the_ingress_are_taken(replica, monkeypatch):
    given = list[Request]()
    generate = replica._engine.generate_batches

    async def noted(requests: Sequence[Request], **options: Any) -> Any:
        given.extend(requests)
        return await generate(requests, **options)

    monkeypatch.setattr(replica._engine, "generate_batches", noted)
    await parts_of(replica, request_of(PROMPT, "1"), request_of(PROMPT, "2"))
    # Choices of one prompt share its hashes, so that they are read once.
    assert given[0].hashes is not None
    assert given[0].hashes is given[1].hashes
    root = bytes.fromhex(await root_of(replica))
    expected = BlockHashes.compute(PROMPT, root, BLOCK)
    assert given[0].hashes.short().tolist() == expected.short().tolist()


@pytest.mark.parametrize(
    ("expected_hits", "cached", "takes_stale", "is_stale"),
    [
        ({"a": 64}, False, False, True),
        ({"a": 64}, True, False, False),
        ({"a": 128}, True, False, False),
        ({"a": 129}, True, False, True),
        ({"a": 64}, False, True, False),
        ({"b": 64}, False, False, False),
    ],
    ids=["gone", "there", "half-there", "less-than-half", "last-try", "of-another"],
)
async def test_a_job_comes_back_where_its_prefix_is_gone(
    replica, expected_hits, cached, takes_stale, is_stale
):
    if cached:
        await parts_of(replica, request_of(PROMPT))
    before = (await replica.status())["prefix_cache"]["queries"]
    parts = await parts_of(
        replica, request_of(PROMPT), expected_hits=expected_hits, takes_stale=takes_stale
    )
    if is_stale:
        assert parts == [Stale("a", 64 if cached else 0)]
        # It says so instead of computing.
        assert (await replica.status())["prefix_cache"]["queries"] == before
    else:
        assert isinstance(parts[0], Accepted)
        assert len(tokens_of(parts)) == 6


async def test_what_is_refused_fails_before_it_is_taken(replica: EngineReplica) -> None:
    [failed] = await parts_of(replica, request_of(range(3, 300), max_tokens=LONG))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidRequestError)


async def test_a_full_queue_refuses(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    one_at_a_time = {"max_num_seqs": 1}
    async with replica_of(monkeypatch, folder, flags=one_at_a_time, max_queue=1) as replica:
        await replica.do(Command("pause", options={"mode": "keep"}))
        root = await root_of(replica)
        first = replica.generate(job_of(request_of(PROMPT, "1"), root=root))
        async with aclosing(first):
            assert isinstance(await anext(first), Accepted)
            waiting = asyncio.ensure_future(anext(first))
            await asyncio.sleep(0)
            await replica._engine.loop_passes()
            job = job_of(request_of(OTHER, "2"), root=root)
            job.requests = [dataclasses.replace(job.requests[0], job_id="other")]
            [failed] = [one async for one in replica.generate(job)]
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, QueueFullError)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_a_job_ends_at_its_deadline(replica: EngineReplica) -> None:
    parts = await parts_of(replica, request_of(PROMPT, max_tokens=LONG), seconds_left=0.0)
    assert isinstance(parts[0], Accepted)
    assert isinstance(parts[-1], Failed)
    assert isinstance(parts[-1].error, RequestTimeoutError)


async def test_closing_the_stream_ends_the_work(replica: EngineReplica) -> None:
    job = job_of(request_of(PROMPT, max_tokens=LONG), root=await root_of(replica))
    parts = replica.generate(job)
    async with aclosing(parts):
        assert isinstance(await anext(parts), Accepted)
        assert isinstance(await anext(parts), Outputs)
        cache = replica._engine.control.prefix_cache_stats
        assert cache().blocks_in_use
    await until(lambda: not cache().blocks_in_use)
    assert (await replica.status())["running"] == 0
    assert metric(await replica.metrics(), "generation_tokens_total") < LONG
    # The engine is free for others.
    assert len(tokens_of(await parts_of(replica, request_of(OTHER)))) == 6


async def test_a_probe_computes_nothing(replica: EngineReplica) -> None:
    assert await replica.probe_all([request_of(PROMPT)]) == [0]
    await parts_of(replica, request_of(PROMPT))
    before = await replica.status()
    asked = [request_of(PROMPT), request_of(PROMPT[:40]), request_of(PROMPT, salt="other")]
    assert await replica.probe_all(asked) == [64, 32, 0]
    refused = await replica.probe_all([*asked, request_of(range(3, 300), max_tokens=LONG)])
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidRequestError)
    assert await replica.status() == before


# What it tells.


async def test_a_replica_tells_what_it_is(replica: EngineReplica) -> None:
    about = await replica.about()
    assert about["replica"] == "a"
    assert about["dtype"] == "float32"
    assert about["batch_invariant"] is True
    assert about["max_model_len"] == 2048
    assert about["num_blocks"] == 140
    assert about["prefix_hash"]["block_size"] == BLOCK
    assert about["weights"]["bytes"] > 0
    assert about["kv_events"] == (await replica.record_replica_metadata())["kv_events"]
    await replica.check_health()


async def test_a_replica_tells_how_it_is(replica: EngineReplica) -> None:
    await replica.do(Command("pause", options={"mode": "keep"}))
    parts = replica.generate(job_of(request_of(PROMPT), root=await root_of(replica)))
    async with aclosing(parts):
        assert isinstance(await anext(parts), Accepted)
        first = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0)
        await replica._engine.loop_passes()
        status = await replica.status()
        assert (status["running"], status["waiting"]) == (0, 1)
        assert (status["is_paused"], status["is_sleeping"]) == (True, False)
        await replica.do(Command("resume"))
        assert isinstance(await first, Outputs)
    status = await replica.status()
    assert status["is_paused"] is False
    assert status["prefix_cache"]["queries"] == 1
    assert status["resize"]["is_done"] is True


async def test_a_snapshot_holds_what_is_cached(replica: EngineReplica) -> None:
    await parts_of(replica, request_of(PROMPT))
    header, *events, end = decode_snapshot(await replica.kv_snapshot())
    root = await root_of(replica)
    assert isinstance(header, SnapshotHeader)
    assert header.root_hash == root
    assert isinstance(end, SnapshotEnd)
    stored = [
        one for event in events if isinstance(event, BlockStored) for one in event.block_hashes
    ]
    expected = BlockHashes.compute(PROMPT, bytes.fromhex(root), BLOCK).short()
    assert sorted(stored) == sorted(expected.tolist())
    endpoints = (await replica.record_replica_metadata())["kv_events"]
    assert endpoints["endpoint"].startswith("tcp://127.0.0.1:")


def test_events_are_sent_to_other_nodes_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.1.2.3")
    assert _events_config(ServeOptions(kv_events_public=True)).endpoint == "tcp://10.1.2.3:*"
    assert _events_config(ServeOptions()).endpoint == "tcp://127.0.0.1:*"


async def test_ray_serve_ends_the_engine_of_a_replica_and_the_garbage_collector_does_not(replica):
    engine = replica._engine
    assert engine.dead is None
    # What Ray Serve does, but for waiting; Python would call a destructor of the class.
    assert hasattr(replica, "__del__")
    assert not hasattr(EngineReplica, "__del__")
    replica.__del__()
    assert engine.dead is not None
    replica.__del__()


# Commands.


async def test_a_command_that_is_obeyed_is_remembered(replica: EngineReplica) -> None:
    before = await replica.replica_state()
    pause = Command("pause", options={"mode": "keep"})
    done = await replica.obey(pause, before.after(pause))
    assert isinstance(done, Done)
    assert (done.result, done.served.root_hash) == (None, await root_of(replica))
    assert (await replica.status())["is_paused"] is True
    after = await replica.replica_state()
    assert after == before.after(pause).served_by([done.served])
    assert after.number == 1
    wrong = Command("resize", {"num_blocks": 1})
    refused = await replica.obey(wrong, after.after(wrong))
    assert isinstance(refused, Refused)
    assert await replica.replica_state() == after


async def test_other_weights_give_other_answers(replica, folder, other_weights):
    missing = await replica.check_weights(update_to(other_weights / "missing"))
    assert isinstance(missing, Refused)
    update = update_to(other_weights)
    assert await replica.check_weights(update) is None
    root = await root_of(replica)
    done = await replica.obey(update, ReplicaState(number=1, weights=update))
    assert isinstance(done, Done)
    assert done.served.root_hash == await root_of(replica) != root
    assert [*(await replica.replica_state()).roots.values()] == [done.served.root_hash]
    [old] = await lone_answers(folder, PROMPT)
    [new] = await lone_answers(other_weights, PROMPT)
    assert tokens_of(await parts_of(replica, request_of(PROMPT))) == new != old


async def test_a_replica_starts_as_all_others_are(monkeypatch, folder, other_weights):
    async with replica_of(monkeypatch, folder) as first:
        update = update_to(other_weights)
        await first.obey(update, ReplicaState(number=3, weights=update, pause=Command("pause")))
        state = await first.replica_state()
    async with replica_of(monkeypatch, folder, "b", commands=FakeCommands(state)) as second:
        assert await second.replica_state() == state
        assert [*state.roots.values()] == [await root_of(second)]
        assert (await second.status())["is_paused"] is True


async def test_a_replica_of_other_weights_does_not_start(monkeypatch, folder, other_weights):
    enter_replica(monkeypatch, "c")
    commands = Commands(timeout=240)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: Handle())
    async with replica_of(monkeypatch, folder, commands=commands) as first:
        names = [(await first.about())["prefix_hash"]["weights_name"]]
        async with replica_of(monkeypatch, other_weights, "b") as alone:
            names.append((await alone.about())["prefix_hash"]["weights_name"])
        with pytest.raises(ConfigError, match="something else than the others") as refused:
            async with replica_of(monkeypatch, other_weights, "b", commands=commands):
                pass
        assert all(name in str(refused.value) for name in names)
        assert names[0] != names[1]


@pytest.mark.parametrize(
    ("flags", "arithmetic"),
    [
        ({"cpu_instructions": "portable", **EXACT}, f"float32/portable/r{KERNEL_REVISION}"),
        ({}, f"float32/{Cpu.available_instructions()[-1]}/r{KERNEL_REVISION}, int8"),
    ],
)
async def test_a_replica_that_computes_in_another_way_has_hashes_of_its_own(
    monkeypatch, folder, tmp_path, flags, arithmetic
):
    """Its answers are found by them, and an ingress learns them from its first answer."""
    quantize_folder(folder, tmp_path, "Q8_0")
    folder, commands = tmp_path, FakeCommands()
    async with replica_of(monkeypatch, folder, commands=commands, flags=EXACT) as first:
        commands.current = await first.replica_state()
    async with replica_of(monkeypatch, folder, "b", commands=commands, flags=flags) as second:
        nobody: Any = None
        client = CommandClient(nobody, commands.current)
        [accepted, *_] = await parts_of(second, request_of(PROMPT))
        assert isinstance(accepted, Accepted)
        client.learn(accepted.state)
        assert (await second.record_replica_metadata())["arithmetic"] == arithmetic
        roots = {**commands.current.roots, arithmetic: await root_of(second)}
        assert client.state == dataclasses.replace(commands.current, roots=roots)
        assert len(set(roots.values())) == 2
        [received] = _received(job_of(request_of(PROMPT), root=roots), arithmetic)
        assert received.hashes is not None
        assert second._engine.probe(received) == 64


async def test_a_replica_that_cannot_do_the_commands_does_not_start(monkeypatch, folder):
    state = ReplicaState(number=1, common="00", size=Command("resize", {"num_blocks": 1}))
    with pytest.raises(PrefixCacheError, match="blocks"):
        async with replica_of(monkeypatch, folder, commands=FakeCommands(state)):
            pass


async def test_a_replica_catches_up_before_it_answers(monkeypatch, folder):
    commands = FakeCommands()
    async with replica_of(monkeypatch, folder, commands=commands) as replica:
        sleep = Command("sleep", options={"level": 1})
        commands.current = (await replica.replica_state()).after(sleep)
        assert commands.num_asked == 1
        await parts_of(replica, request_of(PROMPT), command_number=0)
        assert commands.num_asked == 1
        for _ in range(2):
            [failed] = await parts_of(replica, request_of(PROMPT), command_number=1)
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, EngineHaltedError)
        assert commands.num_asked == 2
        assert (await replica.status())["is_sleeping"] is True
        assert await replica.replica_state() == commands.current


async def test_a_replica_that_cannot_catch_up_is_replaced(monkeypatch, folder):
    commands = FakeCommands()
    async with replica_of(monkeypatch, folder, commands=commands) as replica:
        state = await replica.replica_state()
        commands.current = dataclasses.replace(state, number=1, common="another")
        for _ in range(2):
            [failed] = await parts_of(replica, request_of(PROMPT), command_number=1)
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, EngineDeadError)
        with pytest.raises(EngineDeadError, match="cannot catch up"):
            await replica.check_health()


async def test_a_replica_that_missed_a_command_is_replaced(replica: EngineReplica) -> None:
    state = dataclasses.replace(await replica.replica_state(), pause=Command("pause"))
    await replica.agree(state)
    assert await replica.replica_state() == state
    await replica.check_health()
    await replica.agree(dataclasses.replace(state, number=1))
    with pytest.raises(EngineDeadError, match="missed a command"):
        await replica.check_health()
    # An `EngineDeadError` sends the job to another replica.
    [failed] = await parts_of(replica, request_of(PROMPT))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineDeadError)


async def test_a_replica_that_hangs_holds_no_command_up(monkeypatch, folder, other_weights):
    enter_replica(monkeypatch, "c")
    commands, handle = Commands(timeout=240), Handle()
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: handle)
    async with (
        replica_of(monkeypatch, folder, "a", commands=commands) as first,
        replica_of(monkeypatch, folder, "b", commands=commands, command_timeout=0.5) as second,
    ):
        handle.targets += [first, second]
        old, hangs = await root_of(first), threading.Event()
        # The loop that computes steps waits for something that does not come.
        second._engine._thread.submit(hangs.wait)
        try:
            state, done = await commands.run(update_to(other_weights))
            assert isinstance(done, Done)
            assert [done.served.root_hash] == [*state.roots.values()] == [await root_of(first)]
            assert done.served.root_hash != old
            assert (await first.status())["is_paused"] is False
            with pytest.raises(EngineDeadError, match=r"replica b .* pause .*--command-timeout"):
                await second.check_health()
            state, done = await commands.run(Command("reset_prefix_cache"))
            assert (state.number, isinstance(done, Done)) == (2, True)
            handle.targets.remove(first)
            state, refused = await commands.run(Command("reset_prefix_cache"))
            assert isinstance(refused, Refused)
            assert "replica b" in str(refused.error)
            assert state.number == 2
        finally:
            hangs.set()


# The ingress over it.


@dataclasses.dataclass
class Deployed:
    """An ingress with the replicas and the commands behind it."""

    ingress: Ingress
    replicas: Handle
    commands: Commands

    @property
    def client(self) -> Any:
        return client_of(self.ingress.__serve_build_asgi_app__())


@pytest.fixture
async def deployed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> AsyncGenerator[Deployed, None]:
    commands = Commands(timeout=240)
    handle = Handle(commands)
    replicas = Handle()
    found = mock.Mock(side_effect=lambda *_: replicas)
    monkeypatch.setattr(serve, "get_deployment_handle", found)
    async with (
        replica_of(monkeypatch, folder, "a", commands=commands) as first,
        replica_of(monkeypatch, folder, "b", commands=commands) as second,
    ):
        replicas.targets += [first, second]
        ingress: Any = Ingress.__new__(Ingress)
        options = ServeOptions(served_model_name=("tiny",), admin_api_key=("admin",))
        await ingress.__init__(config_of(folder), options, RayOptions(), replicas, handle)
        yield Deployed(ingress, replicas, commands)
        ingress._engine.close()
    found.assert_called_with(REPLICAS, "app")


BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}


async def test_the_ingress_answers_as_one_server(deployed: Deployed, folder: Path) -> None:
    async with served_folder(folder) as (client, _):
        alone = await client.post("/v1/completions", json=BODY)
    async with deployed.client as client:
        found = await client.post("/v1/completions", json=BODY)
        assert found.status_code == 200, found.text
        assert found.json()["choices"] == alone.json()["choices"]
        version = (await client.get("/version")).json()
        assert version["dtype"] == "float32"
        client.headers["Authorization"] = "Bearer admin"
        info = (await client.get("/server_info")).json()
        assert [one["replica"] for one in info["replicas"]] == ["a", "b"]
        # Those of the engine, of the server and of Ray.
        assert {"num_blocks", "host", "replica_cpus"} <= info["flags"].keys()
        # What nobody said is shown as the device has it.
        assert info["flags"]["max_step_ms"] == 250
        page = (await client.get("/metrics")).text
        assert 'replica="a"' in page
        assert 'replica="b"' in page


async def test_commands_of_the_ingress_reach_all_replicas(deployed, other_weights, folder):
    [expected] = await lone_answers(other_weights, PROMPT)
    first, second = deployed.replicas.targets
    async with deployed.client as client:
        client.headers["Authorization"] = "Bearer admin"
        assert (await client.post("/pause?mode=keep")).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert [(await one.status())["is_paused"] for one in (first, second)] == [True, True]
        assert (await client.post("/resume")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
    engine: Any = deployed.ingress._engine
    await engine._commands.give(UPDATE_WEIGHTS, **update_to(other_weights).options)
    roots = {await root_of(one) for one in (first, second)}
    assert roots == {*engine._commands.state.roots.values()}
    assert (await first.status())["is_paused"] is False
    for one in (first, second):
        parts = await parts_of(one, request_of(PROMPT), command_number=3)
        assert tokens_of(parts) == expected
    assert engine._commands.state.number == 3


async def test_a_probe_of_the_replicas_is_that_of_its_best(deployed: Deployed) -> None:
    engine: Any = deployed.ingress._engine
    request = request_of(PROMPT)
    await parts_of(deployed.replicas.targets[1], request)
    other = request_of(PROMPT, salt="other")
    assert await engine.probe_all([request, other, request]) == [64, 0, 64]
    with pytest.raises(InvalidRequestError):
        await engine.probe_all([request_of(range(3, 300), max_tokens=LONG)])
    async with deployed.client as client:
        client.headers["Authorization"] = "Bearer admin"
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "cache_salt": "other"}
        answer = await client.post("/prefix_cache/probe", json=body)
    assert answer.json() == {"prompt_tokens": len(PROMPT), "cached_tokens": 0}
    deployed.replicas.targets.clear()
    assert await engine.probe_all([request, request]) == [0, 0]


async def test_replicas_without_an_answer_is_dead() -> None:
    class Gone:
        async def status(self) -> None:
            raise RayServeException("gone")

    class Here:
        async def status(self) -> dict[str, Any]:
            return {"replica": "b"}

    handle: Any = Handle(Gone(), Here())
    assert await ReplicaSet(handle).statuses() == [{"replica": "b"}]
    handle.targets.pop()
    with pytest.raises(EngineDeadError, match="No replica"):
        await ReplicaSet(handle).statuses()
    late = mock.Mock(side_effect=TimeoutError)
    handle = mock.Mock(broadcast=lambda *_: mock.Mock(results=late))
    with pytest.raises(EngineDeadError, match="No replica"):
        await ReplicaSet(handle).about()


async def test_replicas_that_answer_are_heard_next_to_one_that_hangs(monkeypatch):
    class Hangs:
        async def status(self) -> None:
            await asyncio.Event().wait()

    class Here:
        async def status(self) -> dict[str, Any]:
            return {"replica": "b"}

    monkeypatch.setattr(replica_set, "_ASK_SECONDS", 0.2)
    handle: Any = Handle(Hangs(), Here())
    assert await ReplicaSet(handle).statuses() == [{"replica": "b"}]


async def test_commands_go_on_without_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        async def replica_state(self) -> None:
            raise RayServeException("gone")

        agree = do = mock.AsyncMock(side_effect=RayServeException("gone"))

    class Here:
        async def replica_state(self) -> ReplicaState:
            return ReplicaState(number=2, common="aa")

        async def agree(self, state: ReplicaState) -> None:
            assert state.number == 2

        async def do(self, command: Command) -> Done:
            return Done(None, Served("aa", "float32", "00"))

    enter_replica(monkeypatch, "c")
    handle = Handle(Gone(), Here())
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: handle)
    assert (await Commands(timeout=240).state()).number == 2
    late = mock.Mock(side_effect=TimeoutError)
    handle = mock.Mock(broadcast=lambda *_: mock.Mock(results=late))
    # Nobody runs yet: the first replica to start says what all are to be.
    served = Served("weights tag:b", "float32/avx2/r1", "bb")
    expected = ReplicaState(common="weights tag:b", roots={"float32/avx2/r1": "bb"})
    assert await Commands(timeout=240).state(served) == expected


# The application.


def _bound(ray_options: RayOptions | None = None, **options: Any) -> dict[str, Any]:
    config = EngineConfig.from_flags(model="some/model", block_size=32)
    return _deployments(build_application(config, ServeOptions(**options), ray_options))


def _deployments(application: serve.Application) -> dict[str, Any]:
    """The deployments of an application by their names."""
    found, waiting = dict[str, Any](), [application]
    while waiting:
        deployment = waiting.pop()._bound_deployment
        found[deployment.name] = deployment
        waiting += [one for one in deployment.init_args if isinstance(one, serve.Application)]
    return found


def test_the_application_has_one_place_for_commands() -> None:
    found = _bound(RayOptions(num_replicas=3, replica_cpus=0.5, num_ingress=2))
    assert found.keys() == {"Ingress", REPLICAS, COMMANDS}
    ingress, replicas, commands = found["Ingress"], found[REPLICAS], found[COMMANDS]
    assert ingress.num_replicas == 2
    assert replicas.num_replicas == 3
    assert replicas.ray_actor_options["num_cpus"] == 0.5
    assert commands.num_replicas == 1
    # The ingress and the replicas hold the same one.
    assert ingress.init_args[-1]._bound_deployment is commands
    assert replicas.init_args[-2]._bound_deployment is commands
    assert ingress.init_args[-2]._bound_deployment is replicas


def test_ray_finds_the_router_and_bounds_no_queue() -> None:
    replicas = _bound(limit_concurrency=7)[REPLICAS]
    router = replicas._deployment_config.request_router_config
    # Ray's own way to load it would put copies of its methods into the class of this process.
    module, _, name = router.request_router_class.partition(":")
    assert getattr(importlib.import_module(module), name) is PrefixRequestRouter
    assert router.request_router_kwargs == {"block_size": 32}
    assert replicas.max_ongoing_requests > 10_000
    assert _bound(limit_concurrency=7)["Ingress"].max_ongoing_requests == 7


def test_the_router_counts_the_blocks_of_a_model_with_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = mock.Mock()
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(serve, "delete", mock.Mock())
    monkeypatch.setattr(ray_run, "_checked_model", mock.Mock())
    monkeypatch.setattr(ray_run, "_start_proxies", mock.Mock())
    for name in ("_cluster", "_stopped", "listening"):
        monkeypatch.setattr(ray_run, name, lambda *_: nullcontext(mock.Mock()))
    config = EngineConfig.from_flags(model="some/model")
    ray_run.serve_ray(config, ServeOptions(), RayOptions())
    replicas = _deployments(run.call_args.args[0])[REPLICAS]
    router = replicas._deployment_config.request_router_config
    assert router.request_router_kwargs == {"block_size": config.cache.state_block_size}


def test_a_node_that_takes_too_long_to_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    late = mock.Mock(side_effect=Exception("timed out during startup"))
    monkeypatch.setattr(ray_run.ray, "init", late)
    with pytest.raises(ConfigError, match=r"start a cluster.*timed out"):
        ray_run._cluster(RayOptions()).__enter__()


def test_replicas_may_follow_the_load() -> None:
    options = RayOptions(
        num_replicas=9, min_replicas=2, max_replicas=5, target_ongoing_requests=3.0
    )
    scaling = _bound(options)[REPLICAS]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 5, 5)
    assert math.isclose(scaling.target_ongoing_requests, 3.0)
