"""`prefixcache verify`: it finds out a server whose answers change, and passes one that is fine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from fakes.fake_openai import MODEL, FakeOpenAI
from prefixcache.cli.main import app
from prefixcache.tools.openai_api import RefusedStreamError, StreamError, open_client
from prefixcache.tools.verify.client import Asker
from prefixcache.tools.verify.comparison import ServerAnswer, TokenScore, compare
from prefixcache.tools.verify.verify_options import VerifyOptions
from prefixcache.tools.verify.verify_report import Report, to_json, verdict
from prefixcache.tools.verify.verify_run import verify_with
from support.serving import running

SMALL = {"num_questions": 3, "prompt_words": 16, "max_tokens": 5}
ALL = ["cold", "warm", "cold again", "concurrent", "concurrent, cold", "chunked", "next turn"]


async def report_on(server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Report:
    """What is found out about it, by its own clock."""
    clock = SimpleNamespace(perf_counter=server.clock)
    monkeypatch.setattr("prefixcache.tools.verify.client.time", clock)
    given = VerifyOptions(url="http://fake", **{**SMALL, **options})
    transport = httpx.ASGITransport(server.app())
    async with httpx.AsyncClient(transport=transport, base_url=given.url) as client:
        return await verify_with(Asker(client, given, lambda: None), given, 7, "verify")


def changed(report: Report) -> set[str]:
    return {name for name, one in report.comparisons() if one.change != "nothing"}


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("top_logprobs", [0, 2])
async def test_a_server_that_is_fine_passes(monkeypatch, api, top_logprobs):
    report = await report_on(FakeOpenAI(), monkeypatch, api=api, top_logprobs=top_logprobs)
    assert report.status == 0
    assert report.notes == ()
    assert [one.name for one in report.rounds] == ALL
    assert [one.num_hits for one in report.rounds] == [0, 3, 0, 3, 0, 3, 3]
    assert "Equal: 18 answers" in verdict(report)[0]


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize(("change", "kind"), [("answer", "answer"), ("logprob", "logprobs")])
async def test_a_change_with_a_hit_is_found_out(monkeypatch, change, kind, reports):
    report = await report_on(FakeOpenAI(change=change, reports=reports), monkeypatch)
    assert report.status == 1
    assert changed(report) == {"warm", "concurrent", "chunked", "next turn"}
    assert {one.change for _, one in report.comparisons()} == {"nothing", kind}
    assert {one.position for _, one in report.comparisons() if one.change == kind} == {4}
    assert "Without a hit nothing changed: it is the cache." in verdict(report)


async def test_a_change_with_a_hit_of_a_part_is_found_out(monkeypatch):
    report = await report_on(FakeOpenAI(change="answer", part_alone=True), monkeypatch)
    assert report.status == 1
    assert "warm" not in changed(report)
    assert "chunked" in changed(report)


async def test_a_tolerated_change_passes(monkeypatch):
    report = await report_on(FakeOpenAI(change="logprob"), monkeypatch, tolerance=1e-3)
    assert report.status == 0
    assert max(one.largest for _, one in report.comparisons()) == pytest.approx(1e-6)


async def test_the_cache_alone_is_not_blamed_for_what_changes_without_it(monkeypatch):
    report = await report_on(FakeOpenAI(change="ever"), monkeypatch)
    assert report.status == 1
    assert "Answers change without a hit too: it is not the cache alone." in verdict(report)


async def test_a_server_with_room_for_one_prompt_is_asked_another_between(monkeypatch):
    server = FakeOpenAI(reports=False, remembers="last", knows_salts=False)
    report = await report_on(server, monkeypatch)
    assert report.status == 0
    assert report.cooling == "another question before it"
    assert [one.name for one in report.rounds] == [n for n in ALL if n != "concurrent, cold"]
    assert [one.num_hits for one in report.rounds] == [0, 3, 0, None, 3, 3]
    assert "The server reports no cached_tokens: hits are inferred from TTFT." in verdict(report)


@pytest.mark.parametrize(("change", "status"), [("nothing", 0), ("answer", 1)])
async def test_without_a_way_to_ask_cold_twice_there_is_no_control(monkeypatch, change, status):
    server = FakeOpenAI(change=change, knows_salts=False, part_alone=True)
    report = await report_on(server, monkeypatch)
    assert report.status == status
    assert report.cooling is None
    assert [one.name for one in report.rounds] == ["cold", "warm", "concurrent", "chunked"]


@pytest.mark.parametrize("reports", [True, False])
async def test_equal_answers_without_a_hit_prove_nothing(monkeypatch, reports):
    report = await report_on(FakeOpenAI(remembers="nothing", reports=reports), monkeypatch)
    assert report.status == 2
    assert verdict(report)[0].startswith("Not known: ")


@pytest.mark.parametrize("refused", ["top_logprobs", "stream_options"])
async def test_what_a_server_refuses_is_left_out_and_reported(monkeypatch, refused):
    report = await report_on(FakeOpenAI(refuses=(refused,)), monkeypatch)
    assert report.status == 0
    assert any(f"{refused} is not known" in sentence for sentence in verdict(report))


async def test_a_server_that_refuses_salts_is_asked_without(monkeypatch):
    report = await report_on(FakeOpenAI(refuses=("cache_salt",)), monkeypatch)
    assert (report.status, report.cooling) == (0, None)


async def test_a_report_is_json(monkeypatch):
    report = await report_on(FakeOpenAI(change="answer"), monkeypatch)
    shown = json.loads(json.dumps(to_json(report)))
    assert (shown["status"], shown["model"], shown["seed"]) == (1, MODEL, 7)
    assert shown["rounds"][1]["comparisons"][0]["got"] == "' other'"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (['{"error": {"message": "out of memory"}}'], "out of memory"),
        (['{"choices": [{"text": "a"}]}'], "without a finish_reason"),
        (['{"choices": [{"finish_reason": "cache_threshold"}]}'], "ended an answer with cache_thr"),
        (["{"], "no JSON"),
        (['{"choices": [{"logprobs": {"content": [1]}}]}'], "unknown form"),
        (["[]"], "no JSON object"),
    ],
)
async def test_a_broken_stream_is_an_error(events, message):
    text = "".join(f"data: {event}\n\n" for event in events)
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, text=text))
    options = VerifyOptions(url="http://fake", model="m", **SMALL)
    async with httpx.AsyncClient(transport=transport, base_url=options.url) as client:
        with pytest.raises(StreamError, match=message):
            await verify_with(Asker(client, options, lambda: None), options, 0, "verify")


async def test_why_no_server_answers_is_said_where_the_error_has_no_text():
    def fail(_request):
        raise httpx.ReadTimeout("")

    options = VerifyOptions(url="http://fake", **SMALL)
    transport = httpx.MockTransport(fail)
    async with httpx.AsyncClient(transport=transport, base_url=options.url) as client:
        with pytest.raises(StreamError, match="No server answers at http://fake: ReadTimeout"):
            await verify_with(Asker(client, options, lambda: None), options, 0, "verify")


async def test_a_wrong_key_is_reported(monkeypatch):
    with pytest.raises(RefusedStreamError, match="401"):
        await report_on(FakeOpenAI(key="right"), monkeypatch)


SAID = ServerAnswer(
    text="ab", scores=(TokenScore("a", -1, (-1, -2)), TokenScore("b", -3, (-2, -3)))
)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (SAID, ("nothing", 0)),
        (ServerAnswer(text="ab", scores=(TokenScore("a", -1, (-1, -2)),)), ("answer", 1)),
        (ServerAnswer(text="ab"), ("logprobs", 0)),
        (ServerAnswer(text="ab", scores=SAID.scores, finish_reason="stop"), ("answer", 2)),
        (ServerAnswer(text="ac", scores=(SAID.scores[0], TokenScore("c", -3))), ("answer", 1)),
        (
            ServerAnswer(text="ab", scores=(SAID.scores[0], TokenScore("b", -3, (-2, -3.5)))),
            ("logprobs", 1),
        ),
    ],
    ids=["equal", "fewer tokens", "no scores", "other end", "other token", "other rank"],
)
def test_a_comparison_says_where(got, expected):
    found = compare(SAID, got)
    assert (found.change, found.position) == expected


def test_texts_alone_are_compared_by_characters():
    found = compare(ServerAnswer(text="to be or"), ServerAnswer(text="to bet on"))
    assert (found.change, found.position) == ("answer", 5)
    assert "' or'" in found.expected


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_an_address_may_end_in_v1(url):
    assert str(open_client(url).base_url).rstrip("/") == "http://a:1"


def run(*arguments: str) -> Result:
    sizes = [part for name, value in SMALL.items() for part in _option(name, value)]
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["verify", *sizes, *arguments])


def _option(name: str, value: int) -> list[str]:
    return [f"--{name.replace('_', '-')}", str(value)]


@pytest.mark.parametrize(("change", "status"), [("nothing", 0), ("answer", 1)])
def test_the_exit_status_says_what_was_found(change, status, tmp_path: Path):
    output = tmp_path / "report.json"
    with running(FakeOpenAI(change=change, key="secret-key").app()) as address:
        result = run(f"{address}/v1", "--api-key", "secret-key", "--output", str(output))
    assert result.exit_code == status, result.output
    assert "concurrent, cold" in result.stdout
    assert ("differs in" in result.stdout) == bool(status)
    assert json.loads(output.read_text())["status"] == status
    assert "secret-key" not in output.read_text().partition('"url"')[2]


def test_a_server_that_is_not_there_is_one():
    result = run("http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "error: No server answers at http://127.0.0.1:9" in result.stderr


def test_a_web_page_is_not_shown():
    async def page(scope, receive, send) -> None:
        headers = [(b"content-type", b"text/html; charset=utf-8")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": b"<html>lost</html>"})

    with running(page) as address:
        result = run(address)
    assert result.exit_code == 1
    assert "404 a web page: is this an OpenAI-compatible server?" in result.stderr
    assert "lost" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["127.0.0.1:9"], "URL must be an address"),
        (["http://a", "--output", "/"], "--output cannot write"),
        (["http://a", "--num-questions", "0"], "--num-questions must be"),
        (["http://a", "--tolerance", "-1"], "--tolerance must be"),
    ],
)
def test_wrong_usage_is_two(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
