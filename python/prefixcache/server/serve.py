"""Runs the server in this process: port, model, application, signals."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import shlex
import signal
import socket
import time
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.applications import Starlette

from prefixcache.config.flags import shown_values
from prefixcache.config.logs import json_line
from prefixcache.config.vllm_flags import KEY_VARIABLE, unused_variables
from prefixcache.diagnostics.room import CacheDiagnostics
from prefixcache.events.start import event_sockets, publishing
from prefixcache.exceptions import FieldError
from prefixcache.models.hub import names_of
from prefixcache.server.admin.model_dirs import ModelDirs
from prefixcache.server.allocator import bound_arenas
from prefixcache.server.http.access import AccessRules, is_host_name, is_loopback
from prefixcache.server.http.connections import Connection, ConnectionLimits
from prefixcache.server.http.listener import EVERY_ADDRESS, cannot_listen, listening, shown_address
from prefixcache.server.http.tls import Certificates, TlsListener
from prefixcache.server.http.tracing import tracing_to
from prefixcache.server.jobs.context import Lifecycle
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.options.header_lines import HeaderLines
from prefixcache.server.options.limits import ServerLimits
from prefixcache.server.options.pooling import chosen_pooling
from prefixcache.server.options.serve_options import ServeOptions
from prefixcache.server.systemd import Notifier

if TYPE_CHECKING:
    from prefixcache.config.engine_config import EngineConfig
    from prefixcache.config.model_config import ModelConfig
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.engine.build import BuiltEngine
    from prefixcache.server.dashboard.samples import Samples
    from prefixcache.text.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_INFINITE = resource.RLIM_INFINITY
# Model files, pipes and libraries, in addition to the connections.
_OWN_FILES = 256
# For clients to read the last of what they were sent.
_CLOSE_SECONDS = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(config: EngineConfig, options: ServeOptions) -> None:
    """Serves until SIGINT or SIGTERM; a second one ends it at once.

    The port or socket is taken, and certificates are read, before anything is loaded. Raises
    `ConfigError` where that fails, and whatever `engine.build` raises.
    """
    begun = time.perf_counter()
    bound_arenas()
    warn_of_unused_variables(options)
    rules, model_dirs = access_rules(options), ModelDirs(options.allowed_model_dirs)
    _allow_open_files(options.limit_concurrency)
    certificates = None if options.tls.ssl_certfile is None else Certificates(options.tls)
    with ExitStack() as stack:
        tracing, endpoint = None, options.otlp_traces_endpoint
        if endpoint is not None:
            tracing = stack.enter_context(closing(tracing_to(endpoint)))
        listener = stack.enter_context(listening(options))
        sockets = stack.enter_context(event_sockets(options.kv_events_config))
        _warn_if_open(options, listener)
        from prefixcache.engine.async_engine import AsyncEngine
        from prefixcache.engine.build import build
        from prefixcache.server.app import create_app
        from prefixcache.server.dashboard.samples import Samples

        built = build(config)
        events = stack.enter_context(
            publishing(built.engine, sockets, options.kv_events_config, model=config.model)
        )
        served = served_model(
            config,
            options,
            built.tokenizer,
            built.model,
            built.folder,
            batch_invariant=built.batch_invariant,
            dtype=built.dtype,
            kv_dtype=built.kv_dtype,
            activations=built.activations,
        )
        engine = AsyncEngine(
            built.engine,
            max_queue=options.max_queue or None,
            max_waiting_per_client=options.max_waiting_per_key,
        )
        lifecycle, samples = Lifecycle(), Samples(engine)
        try:
            app = create_app(
                engine,
                served,
                rules=rules,
                model_dirs=model_dirs,
                lifecycle=lifecycle,
                limits=server_limits(options),
                flags=shown_values(config.on(built.device)) | shown_values(options),
                tracing=tracing,
                diagnostics=_diagnostics(built, options),
                events=events,
                samples=samples,
            )
            _collect_what_is_new_alone()
            scheme = "http" if certificates is None else "https"
            address = f"{scheme}://{shown_address(options, listener)}"
            ready = partial(_announce, address, served, options, begun)
            notifier = Notifier(engine.loop_passes)
            server = Server(app, options, lifecycle, ready, certificates, notifier, samples)
            _run(server, listener, options)
        finally:
            gc.unfreeze()
            _close(engine, lifecycle)


def _diagnostics(built: BuiltEngine, options: ServeOptions) -> CacheDiagnostics | None:
    if not options.diagnostics_memory:
        return None
    return built.engine.diagnose(options.diagnostics_memory, keeps_text=options.prompt_text)


def access_rules(options: ServeOptions) -> AccessRules:
    """Who may do what. Raises `FieldError`."""
    return AccessRules(
        api_keys=options.api_key,
        admin_api_keys=options.admin_api_key,
        allowed_hosts=_known_hosts(options),
        cross_origin=options.cross_origin,
        public_metrics=options.public_metrics,
        client_warming=options.client_warming,
    )


def server_limits(options: ServeOptions) -> ServerLimits:
    """What requests may take together."""
    return ServerLimits(
        request_seconds=options.request_timeout, body_bytes=options.max_total_body_bytes
    )


def _known_hosts(options: ServeOptions) -> tuple[str, ...]:
    """Names of this server: given ones, the one it listens on, and the machine's."""
    own = (options.host, socket.gethostname())
    return (*options.allowed_hosts, *(name for name in own if is_host_name(name)))


def _allow_open_files(connections: int) -> None:
    """Raises the soft limit of open files, which is often 1,024, to what is needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OWN_FILES
    if soft == _INFINITE or soft >= needed:
        return
    if hard != _INFINITE and hard < needed:
        raise FieldError(
            "limit_concurrency",
            f"{connections} needs {needed} open files, but `ulimit -Hn` is {hard}. Raise that, or "
            f"take --limit-concurrency {max(hard - _OWN_FILES, 1)}.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _collect_what_is_new_alone() -> None:
    """Garbage collections pass over all that the start made, which lives as long as the server.

    A full one would hold every thread up for half a second, whenever requests make many objects.
    Of the start itself there is next to no garbage, and none is looked for.
    """
    gc.freeze()
    gc.enable()


def warn_of_unused_variables(options: ServeOptions) -> None:
    """Who moves a unit or a container from vLLM should know what of it is lost."""
    if names := unused_variables(options.api_key):
        logger.warning("These variables of vLLM have no effect here: %s.", ", ".join(names))


def _warn_if_open(options: ServeOptions, listener: socket.socket) -> None:
    """Who listens to the network without a key should know it."""
    if options.api_key or options.uds is not None or is_loopback(listener.getsockname()[0]):
        return
    logger.warning(
        "WITHOUT A KEY, EVERYBODY WHO REACHES %s MAY USE THIS SERVER: set --api-key (or "
        "PREFIXCACHE_API_KEY), or leave --host out to listen on this machine alone. "
        "It answers to addresses and these names, others need --allowed-hosts: %s.",
        "THIS MACHINE" if options.host in EVERY_ADDRESS else options.host,
        ", ".join(("localhost", *_known_hosts(options))),
    )


def served_model(
    config: EngineConfig,
    options: ServeOptions,
    tokenizer: Tokenizer,
    model: ModelConfig,
    folder: Path,
    **facts: Any,
) -> ServedModel:
    """The model as the flags show it to clients; `facts` are fields that an engine tells.

    Raises `FieldError` for a `pooling` that the model cannot do.
    """
    return ServedModel(
        pooling=chosen_pooling(options.pooling, folder, tokenizer),
        names=tuple(name for name in options.served_model_name if name != "*")
        or names_of(config.model),
        any_name="*" in options.served_model_name,
        strict=options.strict,
        num_logged_characters=options.max_log_len if options.log_prompts else 0,
        records_roles=config.cache.record_trace is not None,
        clamps_max_tokens=options.clamp_max_tokens and not options.strict_max_tokens,
        header_lines=HeaderLines(options.strip_header_pattern),
        tokenizer=tokenizer,
        root=config.model,
        generation=model.generation,
        hidden_size=model.hidden_size,
        created=int(time.time()),
        metrics_prefix=options.metrics_prefix,
        priorities=config.scheduler.scheduling_policy == "priority",
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        template_variables=options.default_chat_template_kwargs or {},
        **facts,
    )


def _run(server: Server, listener: socket.socket, options: ServeOptions) -> None:
    try:
        server.run(sockets=[listener])
    except OSError as error:  # another process listened first
        raise cannot_listen(options, error) from error


def _close(engine: AsyncEngine, lifecycle: Lifecycle) -> None:
    """Waits for a disk tier unless a signal has ended, or ends, all at once."""
    before = [signal.signal(number, signal.default_int_handler) for number in _SIGNALS]
    with suppress(KeyboardInterrupt):
        engine.close(waits=not lifecycle.at_once)
    for number, handler in zip(_SIGNALS, before, strict=True):
        signal.signal(number, handler)


def server_config(
    app: Starlette, options: ServeOptions, limits: ConnectionLimits
) -> uvicorn.Config:
    """The settings of uvicorn: its fast parser and event loop, our limits of a connection."""
    return uvicorn.Config(
        app,
        http=cast("type[Connection]", partial(Connection, limits=limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # any client can cause the warnings
        access_log=False,
        proxy_headers=False,  # `access` wants to know who connects, whatever a client claims
        server_header=False,
        timeout_keep_alive=options.timeout_keep_alive,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


class Server(uvicorn.Server):
    """Tells when it is ready; ends without the traceback or exit status of a signal.

    While open answers end it still listens, so that health checks and clients hear 503 rather than
    find nobody.
    """

    def __init__(
        self,
        app: Starlette,
        options: ServeOptions,
        lifecycle: Lifecycle,
        ready: Callable[[], None] = lambda: None,
        certificates: Certificates | None = None,
        notifier: Notifier | None = None,
        samples: Samples | None = None,
    ) -> None:
        self._limits = ConnectionLimits(
            most=options.limit_concurrency,
            read_seconds=options.timeout_read,
            write_seconds=options.timeout_write,
        )
        super().__init__(server_config(app, options, self._limits))
        self._certificates = certificates
        self._samples = samples
        self._watching: list[asyncio.Task[None]] = []
        self._drain_seconds = options.drain_seconds
        self._lifecycle = lifecycle
        self._ready = ready
        self._notifier = notifier
        self._cut: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen; with certificates it speaks HTTPS alone."""
        asyncio.get_running_loop().set_exception_handler(_log_loop_error)
        if self._certificates is None:
            await super().startup(sockets)
        else:
            self._speak_tls(self._certificates, sockets or [])
        if self._samples is not None:
            self._watching.append(asyncio.create_task(self._samples.keep()))
        self._ready()
        if self._notifier is not None:
            self._notifier.ready("requests are answered")

    def _speak_tls(self, certificates: Certificates, sockets: list[socket.socket]) -> None:
        loop, state = asyncio.get_running_loop(), self.server_state

        connect = partial(Connection, self.config, state, {}, limits=self._limits, _loop=loop)
        self._watching.append(loop.create_task(certificates.watch()))
        self.servers: list[Any] = [
            TlsListener(sock, connect, certificates, self._limits, state.connections)
            for sock in sockets
        ]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """SIGINT and SIGTERM stop the server while this is open."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers end, cuts those that take too long, and only then closes the listener."""
        await self._drain()
        for task in self._watching:
            task.cancel()
        await self._cut_answers()
        await self._close_connections()
        await super().shutdown(sockets)

    def stop(self) -> None:
        """Lets open answers end and takes nothing more; the second call cuts them at once."""
        if not self.should_exit:
            logger.info("Finishing open answers; a second signal (Ctrl-C) stops at once.")
            if self._notifier is not None:
                self._notifier.stopping()
            self._lifecycle.stopping = True
            self.should_exit = True
            return
        self.force_exit = self._lifecycle.at_once = True
        self._cancel_answers()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_seconds
        while self.server_state.tasks and not self.force_exit and loop.time() < deadline:
            await asyncio.wait(set(self.server_state.tasks), timeout=deadline - loop.time())

    async def _cut_answers(self) -> None:
        """Each tells its client; who does not read that is not waited for."""
        self._cancel_answers()
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=_CLOSE_SECONDS)

    def _cancel_answers(self) -> None:
        """Cancels each open answer once: a second time would interrupt what tells its client so."""
        answers = set(self.server_state.tasks)
        for task in answers - self._cut:
            task.cancel()
        self._cut = answers

    async def _close_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.shutdown()
        deadline = time.monotonic() + _CLOSE_SECONDS
        # uvicorn's set of connections tells nobody when one is gone.
        while self.server_state.connections and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Asyncio's own handler shows the exception in its message, and with it what that quotes."""
    logger.error("In the event loop: %s", context["message"], exc_info=context.get("exception"))


def _announce(address: str, served: ServedModel, options: ServeOptions, begun: float) -> None:
    seconds = time.perf_counter() - begun
    place = address if options.uds is None else f"{options.uds} ({address})"
    announce_ready(served.names[0], place, seconds, options)
    if options.log_format == "json":
        return
    if options.uds is None:
        pages = f"Chat {address}/chat, dashboard {address}/dashboard"
        print(f"{pages}, API {address}/v1, its description {address}/docs", flush=True)  # noqa: T201
    if options.uds is not None:
        address = f"--unix-socket {shlex.quote(str(options.uds))} {address}"
    example = _example(address, served, _key_variable(options.api_key))
    print(f"Try it:\n\n  {example}\n", flush=True)  # noqa: T201


def announce_ready(model: str, address: str, seconds: float, options: ServeOptions) -> None:
    """Prints that `model` is served at `address`, in the form of the log: readers of it may join
    stdout to stderr.
    """
    # The key that was meant for vLLM is needed here too.
    is_of_vllm = _key_variable(options.api_key) == KEY_VARIABLE
    note = f" for clients with the key of {KEY_VARIABLE}" if is_of_vllm else ""
    line = f"{model} is ready after {seconds:.1f} s at {address}{note}"
    if options.log_format == "json":
        fields = {"event": "ready", "model": model, "address": address, "seconds": seconds}
        print(json_line(__name__, line, **fields), flush=True)  # noqa: T201
    else:
        print(f"\n{line}", flush=True)  # noqa: T201


def _key_variable(api_keys: Collection[str]) -> str | None:
    """The variable that holds a key of clients; None where they need none."""
    if not api_keys:
        return None
    return KEY_VARIABLE if os.environ.get(KEY_VARIABLE) in api_keys else "PREFIXCACHE_API_KEY"


def _example(address: str, served: ServedModel, key_variable: str | None) -> str:
    """A command that gets a short answer. The key is named, not shown: output is kept in logs."""
    body: dict[str, object] = {"model": served.names[0], "max_tokens": 32, "temperature": 0}
    question = "What is the capital of Japan?"
    if served.tokenizer.chat_template is None:
        path, body["prompt"] = "completions", "The capital of Japan is"
    else:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": question}]
    data = shlex.quote(json.dumps(body))
    key = f' -H "Authorization: Bearer ${key_variable}"' if key_variable else ""
    return f"curl {address}/v1/{path} -H 'Content-Type: application/json'{key} -d {data}"
