"""The bench's clients and its run, against a fake target, a tiny engine, and a tiny server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prefixcache.cli.main import app
from prefixcache.config.engine_parts.speculation_config import SpeculationConfig
from prefixcache.exceptions import ConfigError
from prefixcache.tools.bench.arrivals import LoadConfig
from prefixcache.tools.bench.bench_options import BenchOptions
from prefixcache.tools.bench.load import drive
from prefixcache.tools.bench.prompts import Message, Prompt, TokenForm
from prefixcache.tools.bench.records import BenchmarkError, RequestFailedError, RequestRecord, Run
from prefixcache.tools.bench.reports.report import Report
from prefixcache.tools.bench.run import Work, run_bench, settings
from prefixcache.tools.bench.servers import run_server, serve_arguments
from prefixcache.tools.bench.sessions import Session, Text, Turn
from prefixcache.tools.bench.targets import CACHE_OFF, EngineTarget, connect
from prefixcache.tools.bench.workloads import WorkloadConfig
from prefixcache.types.token_ids import as_token_ids
from support.serving import served_folder

WORKLOAD = WorkloadConfig(num_requests=4, prefix_len=64, suffix_len=16, output_len=3)
FLAGS = {"dtype": "float32", "device": "cpu"}


class SlowTarget:
    """Answers each prompt with its number, and remembers prompts and how many ran at once.

    Requests with the number `failing` fail, at the number `ending` the server is gone.
    """

    remarks = ()
    max_model_len: int | None = None

    def __init__(self, *, failing: int | None = None, ending: int | None = None) -> None:
        self.form = TokenForm([5, 6, 7])
        self.failing, self.ending = failing, ending
        self.running = self.most = self.cancelled = 0
        self.sent: list[Prompt] = []

    async def send(self, prompt: Prompt) -> RequestRecord:
        number = len(self.sent)
        self.sent.append(prompt)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(10):  # turns of the loop: no clock decides which answer comes first
                await asyncio.sleep(0)
            if number == self.failing:
                raise RequestFailedError("failed on purpose")
            if number == self.ending:
                raise BenchmarkError("gone on purpose")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return RequestRecord(
            sent=float(number),
            arrivals=(number + 1.0,),
            prompt_tokens=1,
            cached_tokens=0,
            output_tokens=1,
            output=(1000 + number,),
        )

    async def reset_cache(self) -> bool:
        return True


def singles(count: int) -> list[Session]:
    turn = Turn(adds=(Text("own", 1),), output_len=1)
    return [Session(name=str(number), turns=(turn,)) for number in range(count)]


async def driven(target: SlowTarget, sessions: list[Session], **more: Any) -> Run:
    run = Run()
    await drive(target, sessions, more.pop("load", LoadConfig()), run, **more)
    return run


async def test_no_more_run_at_once_than_asked() -> None:
    target, done = SlowTarget(), list[int]()
    run = await driven(target, singles(7), limit=3, on_done=done.append)
    assert target.most == 3
    assert sorted(record.session for record in run.records) == [str(n) for n in range(7)]
    assert sum(done) == 7


async def test_sessions_wait_for_their_arrival() -> None:
    load = LoadConfig(request_rate=100.0)
    begun = asyncio.get_running_loop().time()
    await driven(SlowTarget(), singles(5), load=load)
    last = [due for due, _ in load.schedule(singles(5))][-1]
    assert asyncio.get_running_loop().time() - begun >= last


def said(prompt: Prompt) -> list[int]:
    """The answers that a prompt repeats."""
    tokens = [int(token) for one in prompt.messages for token in one.content]
    return [token for token in tokens if token >= 1000]


async def test_turns_repeat_the_real_answers_and_wait_for_sub_sessions() -> None:
    subs = tuple(
        Session(name=f"0.{number}", turns=(Turn(adds=(Text("s", 2),), output_len=1),) * 2)
        for number in range(2)
    )
    turns = (
        Turn(adds=(Text("a", 3),), output_len=1),
        Turn(adds=(Text("b", 2),), output_len=1, sub_sessions=subs),
    )
    target = SlowTarget()
    session = Session(name="0", opening=(Text("o", 4),), turns=turns)
    run = await driven(target, [session])
    assert target.most == 2
    assert [said(prompt) for prompt in target.sent[:3]] == [[], [], []]
    # The first turn's answer, then the last ones of both sub-sessions.
    assert said(target.sent[-1]) == [1000, 1003, 1004]
    roles = [message.role for message in target.sent[-1].messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert [len(message.content) for message in target.sent[-1].messages] == [4, 3, 1, 2 + 2]
    assert {(record.session, record.turn) for record in run.records} == {
        ("0", 0), ("0", 1), ("0.0", 0), ("0.0", 1), ("0.1", 0), ("0.1", 1)
    }  # fmt: skip


async def test_a_failure_ends_its_session_alone() -> None:
    turns = (Turn(adds=(Text("a", 3),), output_len=1),) * 3
    sessions = [Session(name=str(number), turns=turns) for number in range(3)]
    target, done = SlowTarget(failing=1), list[int]()
    run = await driven(target, sessions, on_done=done.append)
    assert (len(run.records), run.failures) == (6, ["failed on purpose"])
    assert (run.error, sum(done)) == (None, 9)


async def test_a_server_that_is_gone_ends_the_run_which_keeps_what_came() -> None:
    target = SlowTarget(ending=5)
    run = await driven(target, singles(50), limit=3)
    assert (len(run.records), run.error) == (5, "gone on purpose")
    assert target.running == 0
    assert len(target.sent) < 10


async def test_a_server_that_is_gone_ends_sub_sessions_too() -> None:
    subs = tuple(
        Session(name=str(n), turns=(Turn(adds=(Text("s", 1),), output_len=1, pause=pause),))
        for n, pause in enumerate((0.0, 3600.0))
    )
    turn = Turn(adds=(Text("a", 1),), output_len=1, sub_sessions=subs)
    target = SlowTarget(ending=0)
    run = await driven(target, [Session(name="0", turns=(turn,))])
    assert (run.error, len(target.sent)) == ("gone on purpose", 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "one waits for its time to send"


async def test_what_is_too_long_is_not_sent() -> None:
    target = SlowTarget()
    target.max_model_len = 6
    turns = (Turn(adds=(Text("a", 3),), output_len=1),) * 4
    done = list[int]()
    run = await driven(target, [Session(name="0", turns=turns)], on_done=done.append)
    assert (len(run.records), run.too_long, sum(done)) == (1, 1, 4)


def prompt_of(token_ids: Sequence[int], output_len: int) -> Prompt:
    return Prompt((Message("user", as_token_ids(token_ids)),), output_len)


async def test_an_engine_and_its_server_give_the_same_numbers(tiny_checkpoint):
    async with served_folder(tiny_checkpoint(), global_cache_hit_threshold=0.9) as (client, engine):
        over_http = await connect(client)
        assert isinstance(over_http.form, TokenForm)
        in_process = EngineTarget(engine, over_http.form)
        assert (over_http.model, over_http.is_ours) == ("tiny", True)
        assert over_http.max_model_len == in_process.max_model_len
        token_ids = over_http.form.pool[:40].tolist()
        prompt = replace(prompt_of(token_ids, 5), continues=True)
        for target in (in_process, over_http):
            assert await target.reset_cache()
            cold, warm = await target.send(prompt), await target.send(prompt)
            assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
            assert cold.output == warm.output
            assert (warm.prompt_tokens, warm.output_tokens) == (40, 5)
            assert 0 < warm.ttft <= warm.latency
        without = await over_http.with_fields(CACHE_OFF).send(prompt)
        assert (without.cached_tokens, without.output) == (0, warm.output)


async def benched(options: BenchOptions, *more: Callable[[str, int], None]) -> Report:
    return await run_bench(options, Work.of(options.asked), "prefixcache bench", *more)


async def test_a_run_finds_what_the_cache_saves(tiny_checkpoint: Callable[..., Path]) -> None:
    options = BenchOptions(
        model=str(tiny_checkpoint()),
        asked=WORKLOAD,
        load=LoadConfig(concurrency=1),
        repeats=2,
        flags=FLAGS,
    )
    done: list[str] = []
    report = await benched(options, lambda name, _count: done.append(name))
    off, on = report.variants
    assert done.count(off.name) == done.count(on.name) == 8
    assert (off.median.computed_tokens, off.median.cached_tokens) == (320, 0)
    assert (on.median.computed_tokens, on.median.cached_tokens) == (128, 192)
    assert [summary.same_outputs for summary in off.summaries + on.summaries] == [4] * 4
    assert report.settings["through"] == "the engine in process"


@pytest.mark.slow
async def test_a_running_server_is_measured_with_and_without_its_cache(tiny_checkpoint):
    flags = {"model": str(tiny_checkpoint()), "num_blocks": 64, **FLAGS}
    dialogues = WorkloadConfig(
        workload="multi-turn", num_sessions=2, turns=3, prefix_len=32, suffix_len=16, output_len=3
    )
    async with run_server(flags) as base_url:
        options = BenchOptions(
            asked=dialogues, load=LoadConfig(concurrency=1), repeats=1, base_url=f"{base_url}/v1"
        )
        off, served = (await benched(options)).variants
        (alone,) = (await benched(replace(options, baseline=False))).variants
    assert (off.name, off.median.cached_tokens, off.median.prompt_tokens) == ("cache off", 0, 402)
    # Of each dialogue's later turns the full blocks of the turn before, of the other's first the
    # two that all share.
    assert (served.name, served.median.cached_tokens) == ("as served", 2 * (48 + 64) + 32)
    assert served.median.same_outputs == 6
    assert (alone.name, alone.median.cached_tokens) == ("as served", 256)


async def test_a_workload_that_does_not_fit_says_what_would(tiny_checkpoint):
    options = BenchOptions(
        asked=WorkloadConfig(workload="agents"), flags={"model": str(tiny_checkpoint()), **FLAGS}
    )
    with pytest.raises(ConfigError, match=r"scale_lengths must be less.* would do") as error:
        await benched(options)
    scale = float(str(error.value).split()[-3])
    longest = Work.of(replace(options.asked, scale_lengths=scale)).longest
    limit = int(str(error.value).split("takes ")[1].split(".")[0].replace(",", ""))
    assert longest is not None
    assert 0.5 * limit < longest <= limit


async def test_engines_have_the_memory_that_was_asked_for(tiny_checkpoint):
    flags = {**FLAGS, "model": str(tiny_checkpoint()), "kv_cache_memory": 4 << 20}
    report = await benched(BenchOptions(asked=WORKLOAD, repeats=1, flags=flags))
    assert [one.median.requests for one in report.variants] == [4, 4]


async def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="did not start"):
        async with run_server({"model": str(tmp_path)}):
            pytest.fail("a folder without a model was served")


def test_flags_become_arguments() -> None:
    flags = {"dtype": "float32", "num_blocks": 9, "seed": None, "enable_prefix_caching": False}
    expected = ["--dtype", "float32", "--num-blocks", "9", "--no-enable-prefix-caching"]
    assert serve_arguments(flags) == expected
    assert serve_arguments({"batch_invariant": True}) == ["--batch-invariant"]


def test_a_server_makes_the_guesses_that_were_asked_for() -> None:
    given = {"method": "suffix", "num_speculative_tokens": 3}
    read = SpeculationConfig(speculative_config=given).speculative_config
    arguments = serve_arguments({"speculative_config": read})
    assert arguments == ["--speculate", "cache", "--speculate-tokens", "3"]
    read = SpeculationConfig(speculative_config={"method": "ngram"}).speculative_config
    assert serve_arguments({"speculative_config": read}) == ["--speculate", "prompt"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repeats": 0}, "repeats"),
        ({"http": True, "base_url": "http://x"}, "not both"),
        ({"base_url": "localhost:8000"}, "base_url must begin with http"),
        ({"goodput": ("ttft:fast",)}, "goodput must tell milliseconds"),
    ],
)
def test_wrong_options_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchOptions(**fields)


def test_settings_leave_out_what_was_not_asked() -> None:
    found = settings(BenchOptions(http=True, flags={"dtype": "auto", "num_blocks": None}))
    assert found["through"] == "HTTP on loopback"
    assert found["dtype"] == "auto"
    assert {"num_blocks", "num_sessions", "trace", "time_scale"} & found.keys() == set()


def test_the_command_prints_writes_and_draws(tiny_checkpoint, tmp_path):
    arguments = ["bench", "--model", str(tiny_checkpoint()), "--repeats", "1", "--dtype", "float32"]
    sizes = ["--num-requests", "3", "--prefix-len", "32", "--suffix-len", "8", "--output-len", "2"]
    files = ["--output", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png")]
    files += ["--html", str(tmp_path / "p.html"), "--goodput", "ttft:5000", "itl:500"]
    result = CliRunner().invoke(app, [*arguments, *sizes, *files, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "3 requests, 32 shared + 8 own prompt tokens" in result.stdout
    assert json.loads((tmp_path / "r.json").read_text())["settings"]["prefix_len"] == 32
    assert (tmp_path / "p.png").stat().st_size > 0
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    again = CliRunner().invoke(app, ["bench", "compare", *[str(tmp_path / "r.json")] * 2])
    assert again.exit_code == 0, again.output
    assert "A: cache on" in again.stdout


@pytest.mark.parametrize("option", [["--plot", "x.png"], ["--html", "x.html"]])
def test_a_picture_needs_the_extra(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixcache.tools.pictures.find_spec", lambda _name: None)
    result = CliRunner().invoke(app, ["bench", *option, "--model", "./nowhere"])
    assert result.exit_code == 2
    assert f"{option[0]} needs matplotlib: run pip install '.[plot]'" in result.stderr


def test_the_command_says_what_is_wrong() -> None:
    result = CliRunner().invoke(app, ["bench", "--prefix-len", "-5"])
    assert result.exit_code == 2
    assert "--prefix-len must be greater than or equal to 0, got '-5'" in result.stderr


@pytest.mark.parametrize(
    "option", [["--plot", "x.bmp"], ["--plot", "/"], ["--output", "/"], ["--html", "/"]]
)
def test_what_cannot_be_written_is_reported_before_anything_is_measured(option):
    result = CliRunner().invoke(app, ["bench", *option, "--model", "./nowhere"])
    assert result.exit_code == 2
    assert option[0] in result.stderr
    assert "nowhere" not in result.stderr
