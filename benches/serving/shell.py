"""What the serving shell costs over the bare engine: between tokens, in a step, for a request.

    python benches/serving/shell.py --streams 256 --step-ms 50
    python benches/serving/shell.py --requests 500 --tokens 1 --step-ms 1

The runner computes nothing and takes `--step-ms` for each step without the interpreter's lock, as a
device does. First the engine's loop runs alone with that many requests; then a server streams them
over loopback to a client in a process of its own. Shown are the gaps between two tokens as
the client sees them, how much longer a step takes than alone, and what the event loop
computes for a token.

With `--requests` that many requests come one after another instead, each answered as a whole: by
the engine alone, and through HTTP over one connection. Shown are both times, and what HTTP adds.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from fakes.fake_engine import make_engine
from fakes.fake_runner import FakeRunner
from fakes.plain_runner import KnownStep
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.engine.engine import Engine
from prefixcache.server.app import create_app
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.tools.bench.machine import run_facts
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SequenceOutput, StepPlan, StepResult
from support.serving import running
from support.tiny_models import save_tokenizer

_BLOCK = 16
_PROMPT = 16


class TimedRunner(FakeRunner):
    """Takes the same time for each step, and notes when full ones begin."""

    def __init__(self, num_seqs: int, num_blocks: int, seconds: float, **sizes: int) -> None:
        super().__init__(num_blocks, _BLOCK, **sizes)
        self._num_seqs = num_seqs
        self._seconds = seconds
        self.begun: list[float] = []

    def submit(self, plan: StepPlan) -> KnownStep:
        if len(plan.sequences) == self._num_seqs == plan.num_tokens:
            self.begun.append(time.perf_counter())
        time.sleep(self._seconds)
        outputs = [SequenceOutput(token_id=7 if one.sampling else None) for one in plan.sequences]
        return KnownStep(StepResult(outputs))

    @property
    def step_seconds(self) -> float:
        """From one full step to the next, on average."""
        return statistics.mean(b - a for a, b in itertools.pairwise(self.begun))


def new_engine(streams: int, tokens: int, seconds: float) -> tuple[Engine, TimedRunner]:
    pages = -(-(_PROMPT + tokens) // _BLOCK)
    blocks = 1 + streams * pages
    budget = streams * (_PROMPT + 1)
    sizes = {"max_tokens": budget, "max_seqs": streams, "max_pages": pages}
    runner = TimedRunner(streams, blocks, seconds, **sizes)
    engine, _, _ = make_engine(
        num_blocks=blocks,
        block_size=_BLOCK,
        max_num_seqs=streams,
        max_num_batched_tokens=budget,
        max_model_len=pages * _BLOCK,
        runner=runner,
    )
    return engine, runner


def prompt_of(number: int) -> list[int]:
    return [5 + number // 80, 5 + number % 80, *[6] * (_PROMPT - 2)]


def bare_seconds(streams: int, tokens: int, seconds: float) -> float:
    """A step of the engine's loop with nobody else in the process."""
    engine, runner = new_engine(streams, tokens, seconds)
    params = SamplingParams(max_tokens=tokens)
    for number in range(streams):
        prompt = prompt_of(number)
        engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    while engine.has_unfinished():
        engine.step()
    return runner.step_seconds


def served(streams: int, tokens: int, seconds: float) -> dict[str, float]:
    """The same through HTTP, as the server and as the client see it."""
    engine, runner = new_engine(streams, tokens, seconds)
    with server_of(engine) as address:
        loop_seconds = _thread_seconds(len(threading.enumerate()))
        gaps = in_a_process(client_gaps, address, streams, tokens)
        spent = loop_seconds()
    return {
        "step_ms": runner.step_seconds * 1e3,
        "p50_ms": _share(gaps, 0.5) * 1e3,
        "p99_ms": _share(gaps, 0.99) * 1e3,
        "shell_us_a_token": spent / (streams * tokens) * 1e6,
    }


@contextmanager
def server_of(engine: Engine) -> Generator[str, None, None]:
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_folder(Path(folder))
    serving = AsyncEngine(engine)
    app = create_app(serving, ServedModel(names=("tiny",), tokenizer=tokenizer))
    try:
        with running(app, log_level="error") as address:
            yield address
    finally:
        serving.close()


def in_a_process(client: Callable[..., list[float]], *arguments: Any) -> list[float]:
    """What a client finds that does not share the server's interpreter."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(client, arguments)


def bare_times(requests: int, tokens: int, seconds: float) -> list[float]:
    """Seconds of each request in the engine alone."""
    engine, _ = new_engine(1, tokens, seconds)
    params = SamplingParams(max_tokens=tokens)
    times: list[float] = []
    for number in range(requests):
        begun = time.perf_counter()
        prompt = prompt_of(number)
        engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
        while engine.has_unfinished():
            engine.step()
        times.append(time.perf_counter() - begun)
    return times


def served_times(requests: int, tokens: int, seconds: float) -> list[float]:
    """Seconds of each request through HTTP."""
    engine, _ = new_engine(1, tokens, seconds)
    with server_of(engine) as address:
        return in_a_process(client_times, address, requests, tokens)


def client_times(address: str, requests: int, tokens: int) -> list[float]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    times: list[float] = []
    for number in range(requests):
        body = json.dumps({"prompt": prompt_of(number), "max_tokens": tokens})
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        times.append(time.perf_counter() - begun)
        if answer.status != 200:
            raise RuntimeError(content.decode())
    connection.close()
    return times


def _thread_seconds(_: int) -> Any:
    """CPU time of the process without the engine's own thread, from now on."""
    begun = time.process_time(), _engine_seconds()

    def spent() -> float:
        return (time.process_time() - begun[0]) - (_engine_seconds() - begun[1])

    return spent


def _engine_seconds() -> float:
    threads = [one for one in threading.enumerate() if one.name == "prefixcache-engine"]
    clock = time.pthread_getcpuclockid(threads[0].ident or 0)
    return time.clock_gettime(clock)


def _share(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def client_gaps(address: str, streams: int, tokens: int) -> list[float]:
    """Seconds between two pieces of one stream, while all streams were open."""
    times = asyncio.run(_read_all(address, streams, tokens))
    begun, ended = max(one[0] for one in times), min(one[-1] for one in times)
    return [b - a for one in times for a, b in itertools.pairwise(one) if begun <= a and b <= ended]


async def _read_all(address: str, streams: int, tokens: int) -> list[list[float]]:
    host, port = address.removeprefix("http://").split(":")
    asking = (_read(host, int(port), number, tokens) for number in range(streams))
    return await asyncio.gather(*asking)


async def _read(host: str, port: int, number: int, tokens: int) -> list[float]:
    body = json.dumps({"prompt": prompt_of(number), "max_tokens": tokens, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    times: list[float] = []
    while data := await reader.read(65536):
        times += [time.perf_counter()] * data.count(b'"text"')
    writer.close()
    if len(times) != tokens:
        raise RuntimeError(f"stream {number} had {len(times)} tokens")
    return times


def measure_requests(requests: int, tokens: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Medians of rounds of the engine alone and the server in turns."""
    pairs = [
        (bare_times(requests, tokens, seconds), served_times(requests, tokens, seconds))
        for _ in range(rounds)
    ]
    found: dict[str, float] = {}
    for share in (0.5, 0.99):
        bare, through = (
            statistics.median(_share(times, share) * 1e3 for times in side)
            for side in zip(*pairs, strict=True)
        )
        name = f"p{share * 100:.0f}_ms"
        found |= {f"engine_{name}": bare, f"http_{name}": through, f"added_{name}": through - bare}
    return {"requests": requests, **found}


def measure_streams(streams: int, tokens: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Medians of rounds of the bare engine and the server in turns."""
    alone: list[float] = []
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        alone.append(bare_seconds(streams, tokens, seconds) * 1e3)
        found.append(served(streams, tokens, seconds))
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    bare = statistics.median(alone)
    return {
        "streams": streams,
        "bare_step_ms": bare,
        **medians,
        "step_slowdown": medians["step_ms"] / bare - 1,
        "p99_over_p50": medians["p99_ms"] / max(medians["p50_ms"], 1e-3),
    }


def main(
    streams: Annotated[int, typer.Option(help="Requests at the same time.")] = 256,
    requests: Annotated[int, typer.Option(help="One after another, and no streams.")] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 60,
    step_ms: Annotated[float, typer.Option(help="What a step of the device takes.")] = 50.0,
    rounds: Annotated[int, typer.Option(help="Bare engine and server in turns; medians.")] = 3,
) -> None:
    """Prints one JSON record."""
    measure, count = (measure_requests, requests) if requests else (measure_streams, streams)
    found = measure(count, tokens, step_ms / 1e3, rounds)
    rounded = {name: round(value, 4) for name, value in found.items()}
    print(json.dumps(run_facts() | {"device_ms": step_ms, **rounded}, indent=1))


if __name__ == "__main__":
    typer.run(main)
