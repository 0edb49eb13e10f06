"""Opens what is to be measured: engines in this process, servers on loopback, or a running one."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import IO, Any

from prefixcache.tools.bench.prompts import SOURCE_TEXT, TokenForm
from prefixcache.tools.bench.records import BenchmarkError
from prefixcache.tools.bench.targets import EngineTarget, FormName, HttpTarget, connect
from prefixcache.tools.openai_api import open_client

Flags = Mapping[str, Any]

_START_SECONDS = 600.0
_STOP_SECONDS = 20.0


@asynccontextmanager
async def engine_target(flags: Flags) -> AsyncGenerator[EngineTarget, None]:
    """An engine in this process; `flags` as `LLM` takes them."""
    from prefixcache.config.engine_config import EngineConfig
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.engine.build import build
    from prefixcache.models.hub import resolve_model

    config = EngineConfig.from_flags(**flags)
    folder = resolve_model(config.model, config.revision)
    built = await asyncio.to_thread(build, config, folder)
    engine = AsyncEngine(built.engine)
    try:
        pool = built.tokenizer.encode(SOURCE_TEXT, add_special_tokens=False)
        yield EngineTarget(engine, TokenForm(pool.tolist()))
    finally:
        await engine.shutdown()


@asynccontextmanager
async def http_target(
    base_url: str,
    *,
    model: str | None = None,
    form: FormName | None = None,
    api_key: str | None = None,
) -> AsyncGenerator[HttpTarget, None]:
    """A server that runs already; its address may end in `/v1`, as OpenAI's clients take it."""
    async with open_client(base_url, api_key) as client:
        yield await connect(client, model, form)


@asynccontextmanager
async def server_target(flags: Flags) -> AsyncGenerator[HttpTarget, None]:
    """A server started for this on a free loopback port, and ended afterwards."""
    async with run_server(flags) as base_url, http_target(base_url) as target:
        yield target


@asynccontextmanager
async def run_server(flags: Flags) -> AsyncGenerator[str, None]:
    """Starts `prefixcache serve` with `flags`, waits until it is ready, and gives its address.

    Raises `BenchmarkError` with the end of the server's log when it does not come up.
    """
    command = ["serve", "--host", "127.0.0.1", "--port", "0", *serve_arguments(flags)]
    with tempfile.TemporaryFile("w+") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "prefixcache", *command, stdout=subprocess.PIPE, stderr=log
        )
        try:
            yield await _wait_until_ready(process, log)
        finally:
            await _stop(process)


def serve_arguments(flags: Flags) -> list[str]:
    """Flags by name as arguments of `prefixcache serve`; None is left out."""
    arguments = list[str]()
    if (guesses := flags.get("speculative_config")) is not None:  # It was read: JSON it is no more.
        source, most = guesses
        flags = {**flags, "speculative_config": None, "speculate": source, "speculate_tokens": most}
    for name, value in flags.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            arguments += [f"--{option}", str(value)]
    return arguments


async def _wait_until_ready(process: asyncio.subprocess.Process, log: IO[str]) -> str:
    with suppress(asyncio.TimeoutError):
        address = await asyncio.wait_for(_announced(process), _START_SECONDS)
        if address is not None:
            return address
    raise BenchmarkError(f"The server did not start:\n{_tail(log)}")


async def _announced(process: asyncio.subprocess.Process) -> str | None:
    """The address that the server tells when it is ready, or None when it ends before."""
    assert process.stdout is not None
    async for line in process.stdout:
        address = re.search(r"http://127\.0\.0\.1:\d+", line.decode())
        if address:
            return address[0]
    return None


def _tail(log: IO[str], lines: int = 20) -> str:
    log.seek(0)
    return "".join(log.readlines()[-lines:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except asyncio.TimeoutError:  # Another class than TimeoutError on Python 3.10.
        process.kill()
        await process.wait()
