"""The bench's clients and its run, against a fake target, a tiny engine, and a tiny server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from prefixcache.bench.client import BenchmarkError, EngineTarget, HttpTarget, RequestRecord, drive
from prefixcache.bench.options import BenchOptions
from prefixcache.bench.run import run_bench, settings
from prefixcache.bench.targets import run_server, serve_arguments
from prefixcache.bench.workloads import LoadConfig, Prompt, WorkloadConfig
from prefixcache.cli import app
from prefixcache.exceptions import ConfigError
from prefixcache.token_ids import as_token_ids
from serving import served_folder

WORKLOAD = WorkloadConfig(num_requests=4, prefix_len=64, suffix_len=16, output_len=3)
FLAGS = {"dtype": "float32", "device": "cpu"}


class SlowTarget:
    """Answers after a while and remembers how many requests it had at once."""

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing
        self.running = self.most = self.cancelled = 0

    async def token_pool(self) -> list[int]:
        return [5, 6, 7]

    async def send(self, prompt: Prompt) -> RequestRecord:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if prompt.token_ids[0] == self.failing:
                raise BenchmarkError("failed on purpose")
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return RequestRecord(
            sent=0.0,
            arrivals=(1.0,),
            prompt_tokens=1,
            cached_tokens=0,
            output_tokens=1,
            output=prompt.token_ids,
        )

    async def reset_cache(self) -> None:
        """Holds nothing."""


def prompts(count: int) -> list[Prompt]:
    return [Prompt((number,), 1) for number in range(count)]


async def test_no_more_run_at_once_than_asked() -> None:
    target = SlowTarget()
    done: list[None] = []
    records = await drive(target, prompts(7), LoadConfig(concurrency=3), lambda: done.append(None))
    assert target.most == 3
    assert [record.output for record in records] == [(number,) for number in range(7)]
    assert len(done) == 7


async def test_without_a_limit_all_run_at_once() -> None:
    target = SlowTarget()
    await drive(target, prompts(7), LoadConfig(concurrency=0))
    assert target.most == 7


async def test_requests_wait_for_their_arrival() -> None:
    load = LoadConfig(request_rate=100.0)
    begun = asyncio.get_running_loop().time()
    await drive(SlowTarget(), prompts(5), load)
    assert asyncio.get_running_loop().time() - begun >= load.arrivals(5)[-1]


async def test_one_failure_ends_the_run() -> None:
    target = SlowTarget(failing=2)
    with pytest.raises(BenchmarkError, match="on purpose"):
        await drive(target, prompts(4), LoadConfig())
    assert target.cancelled == 3
    assert target.running == 0


async def test_an_engine_and_its_server_give_the_same_numbers(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    async with served_folder(tiny_checkpoint()) as (client, engine):
        over_http = await HttpTarget.connect(client)
        pool = await over_http.token_pool()
        in_process = EngineTarget(engine, lambda _text: as_token_ids(pool))
        assert await in_process.token_pool() == pool
        assert over_http.model == "tiny"
        prompt = Prompt(tuple(pool[:40]), 5)
        for target in (in_process, over_http):
            await target.reset_cache()
            cold, warm = await target.send(prompt), await target.send(prompt)
            foreign = await target.send(replace(prompt, cache_salt="somebody else"))
            assert (foreign.cached_tokens, foreign.output) == (0, cold.output)
            assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
            assert cold.output == warm.output
            assert (warm.prompt_tokens, warm.output_tokens) == (40, 5)
            assert 0 < warm.ttft <= warm.latency


@pytest.mark.parametrize("token_ids", [(10**6,), ()])
async def test_a_refused_request_is_an_error(
    tiny_checkpoint: Callable[..., Path], token_ids: tuple[int, ...]
) -> None:
    async with served_folder(tiny_checkpoint()) as (client, _):
        target = await HttpTarget.connect(client)
        with pytest.raises(BenchmarkError, match="400"):
            await target.send(Prompt(token_ids, 2))


def answering(events: list[dict[str, Any]]) -> httpx.AsyncClient:
    """A server that streams these events whatever is asked."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{"error": {"message": "the engine stopped"}}], "the engine stopped"),
        ([{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}], "Asked for 4"),
    ],
)
async def test_a_broken_stream_is_an_error(events: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        await HttpTarget(answering(events), "m").send(Prompt((1,), 4))


async def test_nobody_at_the_address_is_an_error() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://nobody")
    with pytest.raises(BenchmarkError, match="No server answers at http://nobody"):
        await HttpTarget.connect(client)


async def test_a_run_finds_what_the_cache_saves(tiny_checkpoint: Callable[..., Path]) -> None:
    options = BenchOptions(
        model=str(tiny_checkpoint()),
        workload=WORKLOAD,
        load=LoadConfig(concurrency=1),
        repeats=2,
        flags=FLAGS,
    )
    done: list[str] = []
    report = await run_bench(options, "prefixcache bench", done.append)
    off, on = report.variants
    assert done.count(off.name) == done.count(on.name) == 8
    assert (off.median.computed_tokens, off.median.cached_tokens) == (320, 0)
    assert (on.median.computed_tokens, on.median.cached_tokens) == (128, 192)
    assert [summary.same_outputs for summary in off.summaries + on.summaries] == [4] * 4
    assert report.settings["through"] == "the engine in process"


async def test_sharing_in_flight_is_measured_apart(tiny_checkpoint: Callable[..., Path]) -> None:
    options = BenchOptions(
        model=str(tiny_checkpoint()),
        workload=WORKLOAD,
        repeats=1,
        flags=FLAGS,
        sharing=True,
    )
    report = await run_bench(options, "prefixcache bench --sharing")
    off, alone, sharing = (variant.median for variant in report.variants)
    assert (off.cached_tokens, sharing.cached_tokens) == (0, 192)
    assert [off.same_outputs, alone.same_outputs, sharing.same_outputs] == [4] * 3


async def test_a_running_server_is_measured_as_it_is(tiny_checkpoint: Callable[..., Path]) -> None:
    flags = {"model": str(tiny_checkpoint()), "num_blocks": 64, **FLAGS}
    async with run_server(flags) as base_url:
        options = BenchOptions(
            workload=WORKLOAD, load=LoadConfig(concurrency=1), repeats=1, base_url=base_url
        )
        report = await run_bench(options, "prefixcache bench")
    (variant,) = report.variants
    assert (variant.name, variant.median.cached_tokens) == ("as served", 192)


async def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="did not start"):
        async with run_server({"model": str(tmp_path)}):
            pytest.fail("a folder without a model was served")


def test_flags_become_arguments() -> None:
    flags = {"dtype": "float32", "num_blocks": 9, "seed": None, "enable_prefix_caching": False}
    expected = ["--dtype", "float32", "--num-blocks", "9", "--no-enable-prefix-caching"]
    assert serve_arguments(flags) == expected
    assert serve_arguments({"batch_invariant": True}) == ["--batch-invariant"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"repeats": 0}, "repeats"), ({"http": True, "base_url": "http://x"}, "not both")],
)
def test_wrong_options_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchOptions(**fields)


def test_settings_leave_out_what_was_not_asked() -> None:
    found = settings(BenchOptions(http=True, flags={"dtype": "auto", "num_blocks": None}))
    assert found["through"] == "HTTP on loopback"
    assert found["dtype"] == "auto"
    assert "num_blocks" not in found


def test_the_command_prints_writes_and_draws(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = ["bench", "--model", str(tiny_checkpoint()), "--repeats", "1", "--dtype", "float32"]
    sizes = ["--num-requests", "3", "--prefix-len", "32", "--suffix-len", "8", "--output-len", "2"]
    files = ["--output", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png")]
    result = CliRunner().invoke(app, [*arguments, *sizes, *files, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "3 requests, 32 shared + 8 own prompt tokens" in result.stdout
    assert json.loads((tmp_path / "r.json").read_text())["settings"]["prefix_len"] == 32
    assert (tmp_path / "p.png").stat().st_size > 0


def test_the_command_says_what_is_wrong() -> None:
    result = CliRunner().invoke(app, ["bench", "--prefix-len", "-5"])
    assert result.exit_code == 2
    assert "--prefix-len must be greater than or equal to 0, got '-5'" in result.stderr


@pytest.mark.parametrize("option", [["--plot", "x.bmp"], ["--plot", "/"], ["--output", "/"]])
def test_what_cannot_be_written_is_told_before_anything_is_measured(option):
    result = CliRunner().invoke(app, ["bench", *option, "--model", "./nowhere"])
    assert result.exit_code == 2
    assert option[0] in result.stderr
    assert "nowhere" not in result.stderr
