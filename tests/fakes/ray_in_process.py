"""Deployments of `serve-ray` in this process: engines, and handles that call them without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ray import serve

from prefixcache._core import Cpu
from prefixcache.config.engine_config import EngineConfig
from prefixcache.core import BlockHashes
from prefixcache.ray_serve.job import Chunk, RoutedJob
from prefixcache.ray_serve.replica import EngineReplica
from prefixcache.ray_serve.replicas.replica_state import ReplicaState, Served
from prefixcache.runner.cpu.cpu_runner import KERNEL_REVISION
from prefixcache.server.options.serve_options import ServeOptions
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams

BLOCK = 16
ARITHMETIC = f"float32/{Cpu.available_instructions()[-1]}/r{KERNEL_REVISION}"
FLAGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 140}


def config_of(folder: Path, **flags: Any) -> EngineConfig:
    return EngineConfig.from_flags(model=str(folder), **FLAGS | flags)


class Handle:
    """Plays a `DeploymentHandle`: each target is the object of one replica.

    A call goes to the first of them; a broadcast to all, whose errors are answers too.
    """

    def __init__(self, *targets: Any) -> None:
        self.targets = list(targets)

    def __getattr__(self, name: str) -> Any:
        return mock.Mock(remote=getattr(self.targets[0], name))

    def options(self, *, method_name: str, stream: bool) -> Any:
        assert stream
        return mock.Mock(remote=lambda *args: _Stream(getattr(self.targets[0], method_name)(*args)))

    def broadcast(self, method: str, *args: Any) -> Any:
        async def in_time(answer: Awaitable[Any], seconds: float) -> Any:
            return await asyncio.wait_for(answer, seconds)

        async def ask_all(seconds: float) -> list[Any]:
            asked = [in_time(getattr(one, method)(*args), seconds) for one in self.targets]
            return await asyncio.gather(*asked, return_exceptions=True)

        def results(*, timeout_s: float, return_exceptions: bool) -> list[Any]:
            assert return_exceptions
            return asyncio.run_coroutine_threadsafe(ask_all(timeout_s), loop).result()

        loop = asyncio.get_running_loop()
        return mock.Mock(results=results)


class _Stream:
    """Plays Ray's generator of a streaming call."""

    def __init__(self, parts: AsyncIterator[Chunk]) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._parts

    def cancel(self) -> None: ...


class FakeCommands:
    """Plays the deployment `Commands`: all replicas are as `state` says, or as the first one is."""

    def __init__(self, state: ReplicaState | None = None) -> None:
        self.current = state
        self.num_asked = 0

    async def state(self, served: Served | None = None) -> ReplicaState:
        self.num_asked += 1
        if self.current is None:
            assert served is not None
            return ReplicaState().served_by([served])
        return self.current


def enter_replica(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lets Ray Serve say that this process is the replica `name`."""
    context = mock.Mock(app_name="app")
    context.replica_id.unique_id = name
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)


@asynccontextmanager
async def replica_of(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    name: str = "a",
    *,
    commands: Any = None,
    flags: dict[str, Any] | None = None,
    command_timeout: float = 60.0,
    **options: Any,
) -> AsyncGenerator[EngineReplica, None]:
    """A replica as Ray Serve makes it, which ends as it does when Ray drops it."""
    enter_replica(monkeypatch, name)
    replica = EngineReplica.__new__(EngineReplica)
    config = config_of(folder, **(flags or {}))
    try:
        handle: Any = Handle(commands or FakeCommands())
        given = ServeOptions(**options)
        await replica.__init__(config, given, handle, command_timeout)  # pyright: ignore[reportGeneralTypeIssues]
        yield replica
    finally:
        replica.__del__()


def request_of(prompt: Sequence[int], name: str = "r", **options: Any) -> Request:
    """A greedy request; `max_tokens` and `salt` apart, `options` are those of `Request`."""
    params = SamplingParams(
        temperature=0, max_tokens=options.pop("max_tokens", 6), ignore_eos=True, min_tokens=0
    )
    cache = CacheOptions(salt=options.pop("salt", None), read=options.pop("read", True))
    return Request(
        request_id=name, prompt_token_ids=list(prompt), params=params, cache=cache, **options
    )


def job_of(
    *requests: Request, root: str | dict[str, str], block_size: int = BLOCK, **fields: Any
) -> RoutedJob:
    """The job of an ingress, with the hashes of the prompts under a root, or one an arithmetic."""
    roots = {ARITHMETIC: root} if isinstance(root, str) else root
    hashes = {
        arithmetic: [
            BlockHashes.compute(
                one.prompt_token_ids, bytes.fromhex(root), block_size, cache_salt=one.cache.salt
            ).state()
            for one in requests
        ]
        for arithmetic, root in roots.items()
    }
    requests = tuple(dataclasses.replace(one, job_id="job") for one in requests)
    return RoutedJob(requests=requests, hashes=hashes, **fields)
