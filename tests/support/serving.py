"""A served tiny model, over ASGI in this process or over a real port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.model_config import GenerationDefaults
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.engine.build import build
from prefixcache.engine.commands import EngineState
from prefixcache.engine.control import Control
from prefixcache.exceptions import EngineDeadError, InvalidRequestError
from prefixcache.metrics import Gauges, Metrics
from prefixcache.server.app import create_app
from prefixcache.server.http.access import AccessRules
from prefixcache.server.http.tls import Certificates
from prefixcache.server.http.tracing import Tracing
from prefixcache.server.jobs.context import Lifecycle
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.options.limits import ServerLimits
from prefixcache.server.serve import ServeOptions, Server
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import Ending, PromptUse, Request, RequestOutput

MODEL = "tiny"


def serve_folder(
    folder: Path,
    *,
    served: Mapping[str, Any] | None = None,
    access: Mapping[str, Any] | None = None,
    bounds: Mapping[str, int | None] | None = None,
    max_queue: int | None = None,
    diagnostics_memory: int = 0,
    keeps_text: bool = True,
    **flags: Any,
) -> tuple[Starlette, AsyncEngine]:
    """The application around a real engine; the caller shuts the engine down."""
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 200, "max_num_seqs": 16}
    built = build(EngineConfig.from_flags(model=str(folder), **options | flags))
    engine = AsyncEngine(built.engine, max_queue=max_queue, **(bounds or {}))
    facts = {"tokenizer": built.tokenizer, "hidden_size": built.model.hidden_size}
    model = {"names": (MODEL,), **facts, **(served or {})}
    diagnostics = None
    if diagnostics_memory:
        diagnostics = built.engine.diagnose(diagnostics_memory, keeps_text=keeps_text)
    app = create_app(engine, ServedModel(**model), diagnostics=diagnostics, **(access or {}))
    return app, engine


@asynccontextmanager
async def client_of(
    app: Starlette, address: str = "127.0.0.1"
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client that calls the application without a network, from `address`."""
    transport = httpx.ASGITransport(app, client=(address, 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@asynccontextmanager
async def served_folder(
    folder: Path, **options: Any
) -> AsyncGenerator[tuple[httpx.AsyncClient, AsyncEngine], None]:
    """A client of `serve_folder` with these options, and the engine, which is then shut down."""
    app, engine = serve_folder(folder, **options)
    try:
        async with client_of(app) as client:
            yield client, engine
    finally:
        await engine.shutdown()


@contextmanager
def running(app: Starlette, **options: Any) -> Generator[str, None, None]:
    """The application on a free loopback port, in a thread; gives its address."""
    with serving(app, Lifecycle(), **options) as (_, address):
        yield address


@contextmanager
def serving(
    app: Starlette, lifecycle: Lifecycle, certificates: Certificates | None = None, **options: Any
) -> Generator[tuple[Server, str], None, None]:
    """As `running`; gives the server too, whose address is that without `certificates`."""
    server = Server(app, ServeOptions(**options), lifecycle, certificates=certificates)
    server.capture_signals = nullcontext
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.stop()
        thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    """Raises `TimeoutError` when the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.001)


async def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    """As `wait_until`, while the event loop goes on."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.001)


def events(text: str) -> list[Any]:
    """The payloads of a stream, which must end with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def metric(text: str, name: str) -> float:
    """One value of a Prometheus page, by its name under our prefix."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"prefixcache:{name}":
                return sample.value
    raise KeyError(name)


class FakeEngine:
    """Plays back `script`, one list of outputs or an exception for every request."""

    def __init__(self, script: Callable[[Request], AsyncIterator[RequestOutput]]) -> None:
        self._script = script
        self.dead: EngineDeadError | None = None
        self.metrics = Metrics(Gauges)
        self.max_model_len = 512
        self.requests: list[Request] = []
        self.num_open = 0
        self.control = Control(*[mock.Mock() for _ in range(3)], EngineState(mock.Mock(), None))

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        if self.dead is not None:
            raise self.dead
        if not len(request.prompt_token_ids):
            raise InvalidRequestError("The prompt must hold at least one token.", param="prompt")
        self.requests.append(request)
        return self._outputs(request)

    async def generate_batches(
        self, requests: Sequence[Request], **_limits: object
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        return _batches(_merged([self.generate(request) for request in requests]))

    async def run(self, operation: Callable[[Control], Any]) -> Any:
        if self.dead is not None:
            raise self.dead
        return operation(self.control)

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self.num_open += 1
        try:
            async for output in self._script(request):
                yield output
        finally:
            self.num_open -= 1


async def _batches(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    async with aclosing(outputs):
        async for output in outputs:
            yield [output]


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs as they come; the first error ends them all."""
    arrived: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    arrived.put_nowait((index, output))
        except Exception as error:  # noqa: BLE001 - the reader gets it
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(*pair)) for pair in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item[1].finished
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def fake_app(
    engine: FakeEngine,
    tokenizer: Tokenizer,
    *,
    lifecycle: Lifecycle | None = None,
    rules: AccessRules | None = None,
    limits: ServerLimits | None = None,
    tracing: Tracing | None = None,
    **served: Any,
) -> Starlette:
    """The application around a scripted engine."""
    model = {"names": (MODEL,), "generation": GenerationDefaults(), **served}
    served_model = ServedModel(tokenizer=tokenizer, **model)
    return create_app(
        engine, served_model, lifecycle=lifecycle, rules=rules, limits=limits, tracing=tracing
    )


async def says(request: Request, *texts: str) -> AsyncIterator[RequestOutput]:
    """A script: one token a text, the last one ends the answer."""
    for number, text in enumerate(texts, 1):
        await asyncio.sleep(0)
        yield RequestOutput(
            request_id=request.request_id,
            token_ids=(3,),
            text=text,
            prompt=PromptUse(num_tokens=len(request.prompt_token_ids)),
            ending=Ending("stop" if number == len(texts) else None),
        )
