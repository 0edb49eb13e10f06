"""The deployment of engines: one in each replica's process, called with requests of the ingress."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray.util
from prometheus_client import generate_latest
from ray import serve
from ray.serve.handle import DeploymentHandle

from prefixcache.config.logs import set_up_logging
from prefixcache.core import BlockHashes
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.engine.build import BuiltEngine, build
from prefixcache.events.config import KVEventsConfig
from prefixcache.events.start import event_sockets, publishing
from prefixcache.exceptions import ConfigError, EngineDeadError, PrefixCacheError
from prefixcache.metrics import LabelledMetrics
from prefixcache.models.hub import names_of
from prefixcache.ray_serve.job import Accepted, Chunk, Failed, Outputs, RoutedJob, Stale
from prefixcache.ray_serve.replicas.replica_state import (
    UPDATE_WEIGHTS,
    Command,
    Done,
    Refused,
    ReplicaState,
    Served,
)
from prefixcache.server.admin.admin import update_weights
from prefixcache.server.admin.health import engine_state
from prefixcache.server.allocator import bound_arenas
from prefixcache.server.options.limits import MAX_UNREAD_OUTPUTS
from prefixcache.types.request import Request

if TYPE_CHECKING:
    from prefixcache.config.engine_config import EngineConfig
    from prefixcache.engine.control import Control
    from prefixcache.server.options.serve_options import ServeOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A replica that has less than this share of what it was chosen for says so instead of computing.
_LEAST_OF_EXPECTED = 0.5


class EngineReplica:
    """One engine. Ray Serve makes it, calls its methods, and replaces it when it dies."""

    async def __init__(
        self,
        config: EngineConfig,
        options: ServeOptions,
        commands: DeploymentHandle[Any],
        command_timeout: float,
    ) -> None:
        bound_arenas()
        set_up_logging(options.log_level, options.log_format, shows_prompts=options.log_prompts)
        self._id = serve.get_replica_context().replica_id.unique_id
        self._commands = commands
        self._command_timeout = command_timeout
        self._state = ReplicaState()
        self._outdated: EngineDeadError | None = None
        self._following = asyncio.Lock()
        self._resources = ExitStack()
        # Ray Serve calls the destructor that it finds at the instance. Python looks for one at the
        # class alone: an engine is not closed, which waits for threads, while garbage is collected.
        self.__del__ = self._resources.close
        self._built = built = await asyncio.to_thread(self._build, config, options)
        self._engine = AsyncEngine(
            built.engine,
            max_queue=options.max_queue or None,
            max_waiting_per_client=options.max_waiting_per_key,
        )
        self._resources.callback(self._engine.close)
        self._metrics = LabelledMetrics(
            self._engine.metrics,
            prefix=options.metrics_prefix,
            model_name=(options.served_model_name or names_of(config.model))[0],
            replica=self._id,
        )
        self._arithmetic = self._served.arithmetic
        await self._follow(cast("ReplicaState", await commands.state.remote(self._served)))

    def _build(self, config: EngineConfig, options: ServeOptions) -> BuiltEngine:
        """The engine, which publishes what its cache stores and loses."""
        built, events = build(config), _events_config(options)
        sockets = self._resources.enter_context(event_sockets(events))
        self._events = self._resources.enter_context(
            publishing(built.engine, sockets, events, model=config.model)
        )
        return built

    # Requests.

    async def generate(self, job: RoutedJob) -> AsyncGenerator[Chunk, None]:
        """The answers of a job in chunks: `Accepted`, then `Outputs`; or `Stale`, or `Failed`.

        Nothing of a job is computed before it is accepted. Closing the stream aborts it.
        """
        try:
            await self._check_current(job.command_number)
            requests = _received(job, self._arithmetic)
            stale = self._stale(job, requests[0])
            if stale is not None:
                yield stale
                return
            outputs = await self._engine.generate_batches(
                requests, deadline=_deadline(job), max_unread=MAX_UNREAD_OUTPUTS
            )
            async with aclosing(outputs):
                yield Accepted(self._id, self._state)
                async for batch in outputs:
                    self._raise_if_outdated()  # it may have missed other weights meanwhile
                    yield Outputs(batch, time.monotonic())
        except PrefixCacheError as error:
            yield Failed(error)

    def _stale(self, job: RoutedJob, first: Request) -> Stale | None:
        """Whether the job was sent here for a prefix most of which is gone."""
        expected = job.expected_hits.get(self._id, 0)
        if job.takes_stale or not expected:
            return None
        hit_tokens = self._engine.probe(first)
        if hit_tokens >= expected * _LEAST_OF_EXPECTED:
            return None
        return Stale(self._id, hit_tokens)

    async def probe_all(self, requests: Sequence[Request]) -> list[int] | Refused:
        """Tokens of each prompt that are cached now."""
        try:
            return await self._engine.probe_all(requests)
        except PrefixCacheError as error:
            return Refused(error)

    # The router.

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Where the router reads events, and how it hashes prompts; Ray Serve asks once."""
        events = None if self._events is None else self._events.endpoints
        return {"kv_events": events, "arithmetic": self._arithmetic}

    async def kv_snapshot(self) -> list[bytes]:
        """What is cached, as `GET /prefix_cache/snapshot` of one server tells it."""
        return await asyncio.to_thread(self._snapshot)

    def _snapshot(self) -> list[bytes]:
        assert self._events is not None
        return [*iter(self._events.snapshot().next_part, b"")]

    # Commands.

    async def replica_state(self) -> ReplicaState:
        """What this replica is like, as commands."""
        return self._state

    async def check_weights(self, command: Command) -> Refused | None:
        """Whether the weights of an update cannot be taken."""
        path, revision = command.options["path"], command.options["revision"]
        try:
            await self._in_time(
                "check_weights", lambda control: control.weights.check_path(path, revision)
            )
        except PrefixCacheError as error:
            return Refused(error)
        return None

    async def obey(self, command: Command, after: ReplicaState) -> Done | Refused:
        """Does a command; the replica is then as `after` says."""
        answer = await self.do(command)
        if isinstance(answer, Done):
            self._state = after.served_by([answer.served])
        return answer

    async def agree(self, state: ReplicaState) -> None:
        """Ends the replica where it is not what all are to be: Ray Serve makes a new one."""
        if self._outdated is not None:
            return
        if self._state.number != state.number or self._served.common != state.common:
            self._outdated = EngineDeadError("This replica missed a command, and is replaced.")
        else:
            self._state = self._with_own_root(state)

    async def do(self, command: Command) -> Done | Refused:
        """Does a command of `engine.control.Control`."""
        try:
            result = await self._in_time(command.name, partial(_done, command))
        except PrefixCacheError as error:
            return Refused(error)
        return Done(result, self._served)

    async def _in_time(self, name: str, operation: Callable[[Control], T]) -> T:
        """What an operation of the engine returns. An engine that hangs is replaced.

        Raises what the operation raises, and `EngineDeadError`.
        """
        self._raise_if_outdated()
        try:
            return await asyncio.wait_for(self._engine.run(operation), self._command_timeout)
        except asyncio.TimeoutError:
            self._outdated = error = EngineDeadError(
                f"The replica {self._id} did not end the command {name} within "
                f"--command-timeout ({self._command_timeout:g} s), and is replaced."
            )
            logger.error(error)
            raise error from None

    async def _check_current(self, number: int) -> None:
        """Catches up with command `number` where it came before this replica was known.

        Raises `EngineDeadError` where that cannot be.
        """
        async with self._following:
            if self._outdated is None and self._state.number < number:
                await self._catch_up()
        self._raise_if_outdated()

    def _raise_if_outdated(self) -> None:
        if self._outdated is not None:
            raise self._outdated

    async def _catch_up(self) -> None:
        """Becomes what the others are now, or has Ray Serve replace it."""
        try:
            await self._follow(cast("ReplicaState", await self._commands.state.remote()))
        except PrefixCacheError as error:
            self._outdated = EngineDeadError(f"This replica cannot catch up: {error}")

    async def _follow(self, state: ReplicaState) -> None:
        """Becomes what all replicas are. Raises `ConfigError` where that is something else."""
        for command in state.commands():
            answer = await self.do(command)
            if isinstance(answer, Refused):
                raise answer.error
        mine = self._served
        if mine.common != state.common:
            raise ConfigError(
                f"The replica {self._id} would serve something else than the others: "
                f"{mine.common}; they serve {state.common}. Every node needs the same model and "
                "weights; give --dtype where processors differ."
            )
        self._state = self._with_own_root(state)

    def _with_own_root(self, state: ReplicaState) -> ReplicaState:
        """The state, which need not know of a replica that started after the last command."""
        return state.with_roots({self._arithmetic: self._served.root_hash})

    @property
    def _served(self) -> Served:
        hashes, about = self._engine.control.prefix_hash_info(), self._built.arithmetic
        names = ("architecture", "dtype", "kv_dtype")
        common = ", ".join(f"{name} {about[name]}" for name in names)
        return Served(
            f"weights {hashes.weights_name}, {common}, blocks of {hashes.block_size} tokens",
            hashes.arithmetic,
            hashes.root_hash,
        )

    # What is known of it.

    async def about(self) -> dict[str, Any]:
        """What the ingress tells of the engines."""
        control, built = self._engine.control, self._built
        weights = control.weights_info()
        return {
            "replica": self._id,
            "pid": os.getpid(),
            "batch_invariant": built.batch_invariant,
            "dtype": built.dtype,
            "kv_dtype": built.kv_dtype,
            "activations": built.activations,
            "device": built.device,
            "max_model_len": built.max_model_len,
            "weights": None if weights is None else dataclasses.asdict(weights),
            "prefix_hash": dataclasses.asdict(control.prefix_hash_info()),
            "groups": control.groups,
            "num_blocks": control.num_blocks,
            "kv_events": None if self._events is None else self._events.endpoints,
        }

    async def status(self) -> dict[str, Any]:
        """How busy the engine is, whether it computes, and its cache in numbers."""
        control = self._engine.control
        return {
            "replica": self._id,
            **engine_state(self._engine),
            "prefix_cache": dataclasses.asdict(control.prefix_cache_stats()),
            "resize": dataclasses.asdict(control.resize_status),
        }

    async def metrics(self) -> str:
        """The metrics as Prometheus reads them, with the label `replica`."""
        return generate_latest(self._metrics).decode()

    async def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        dead = self._engine.dead or self._outdated
        if dead is not None:
            raise dead


def _events_config(options: ServeOptions) -> KVEventsConfig:
    """Free ports, of this machine alone or of the address that other nodes know."""
    host = "127.0.0.1"
    if options.kv_events_public:
        host = cast("str", ray.util.get_node_ip_address())  # pyright: ignore[reportUnknownMemberType]
    endpoint = f"tcp://{host}:*"
    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint,
        replay_endpoint=endpoint,
    )


def _done(command: Command, control: Control) -> Any:
    if command.name == UPDATE_WEIGHTS:
        return update_weights(control, **command.options)
    return getattr(control, command.name)(**command.options)


def _deadline(job: RoutedJob) -> float | None:
    return None if job.seconds_left is None else time.monotonic() + job.seconds_left


def _received(job: RoutedJob, arithmetic: str) -> list[Request]:
    """The requests with their hashes, as if they came now: the ingress may be another machine."""
    states = job.hashes.get(arithmetic, ())
    now = time.monotonic()
    hashes_of = {state: BlockHashes.from_state(state) for state in set(states)}
    return [
        dataclasses.replace(request, arrival_time=now, hashes=hashes_of.get(state))
        for request, state in zip_longest(job.requests, states)
    ]
