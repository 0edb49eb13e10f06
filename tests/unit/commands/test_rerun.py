"""Recorded requests give the same tokens and log probabilities again, or it is said why not."""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import thread
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from fakes.fake_engine import make_engine
from prefixcache import LLM, SamplingParams
from prefixcache.cli.main import app
from prefixcache.kv.recordings import record_writer
from prefixcache.kv.recordings.request_records import RequestRecords, read_records
from prefixcache.models.conversion import quantize_folder
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.structured_output import StructuredOutput
from support.serving import served_folder, wait_until

Checkpoint = Callable[..., Path]
DRAWN = SamplingParams(
    n=2,
    seed=5,
    max_tokens=6,
    logprobs=2,
    temperature=0.8,
    top_k=40,
    min_tokens=3,
    logit_bias={7: 1.5},
    presence_penalty=0.3,
    stop=("no such text",),
    bad_words=("the",),
)
PROMPTS = [[*range(20, 60)], [*range(20, 50), 9, 9]]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["rerun", *map(str, arguments), "--num-blocks", "65"])


def outcomes(result: Result) -> dict[str, str]:
    lines = result.stdout.splitlines()[:-1]
    return dict(line.split(": ", 1) for line in lines)


@pytest.fixture(scope="module")
def folders(tiny_checkpoint: Checkpoint) -> tuple[Path, Path]:
    return tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=4)


@pytest.fixture(scope="module")
def record(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two choices of two prompts, and one each with a grammar, without a seed, scored, warmed."""
    path = tmp_path_factory.mktemp("record") / "day.jsonl"
    llm = LLM(str(folders[0]), dtype="float32", num_blocks=65, record_requests=path)
    llm.generate(PROMPTS, DRAWN, use_tqdm=False)
    grammar = StructuredOutput("regex", "[a-c]{4}")
    unseeded = replace(DRAWN, n=1, seed=None)
    params = [
        replace(unseeded, structured_output=grammar),
        unseeded,
        SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=30),
        SamplingParams(max_tokens=0),  # as /prefix_cache/warm
    ]
    llm.generate([PROMPTS[0]] * 4, params, use_tqdm=False)
    llm._engine.close()
    return path


def test_all_are_the_same_again(record: Path) -> None:
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    result = run(record)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "8 of 8 are the same."
    assert outcomes(result)["0-1"] == "same, 6 tokens, 6 log probabilities"
    (scored,) = [one for one in read_records(record)[1] if one["id"] == "4-0"]
    assert len(scored["prompt_logprobs"]) == 40


@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_quantized_weights_are_multiplied_as_then(
    folders: tuple[Path, Path], tmp_path: Path, activations: str
) -> None:
    """A record that says nothing of activations is of a time when all were exact."""
    (tmp_path / "blocks").mkdir()
    quantize_folder(folders[0], tmp_path / "blocks", "Q8_0")
    path, flags = tmp_path / "day.jsonl", {"dtype": "float32", "cpu_activations": activations}
    llm = LLM(str(tmp_path / "blocks"), num_blocks=65, record_requests=path, **flags)
    llm.generate(PROMPTS, DRAWN, use_tqdm=False)
    llm._engine.close()
    if activations == "exact":
        about, rest = path.read_text().split("\n", 1)
        named = json.loads(about)
        assert named.pop("activations") == "exact"
        path.write_text(f"{json.dumps(named)}\n{rest}")
    assert run(path).stdout.splitlines()[-1] == "4 of 4 are the same."


def test_an_id_chooses(record: Path) -> None:
    assert [*outcomes(run(record, "1"))] == ["1-0", "1-1"]
    assert [*outcomes(run(record, "2-0", "0-1"))] == ["0-1", "2-0"]
    unknown = run(record, "0-7")
    assert (unknown.exit_code, unknown.stderr) == (2, "error: ID '0-7' is not in the record.\n")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "seed": (lambda one: one["params"].update(seed=6), "differs: token 0 is"),
    "score": (lambda one: one["logprobs"].__setitem__(2, -1), "differs: log probability 2 is"),
    "short": (lambda one: one["tokens"].pop(), "differs: 5 logprobs, and there were 6"),
    "end": (lambda one: one.update(finish="stop"), "differs: it ended by length, and had by stop"),
    "mixed": (lambda one: one.update(mixed=True), "cannot be rerun: its weights were replaced"),
    "stale": (lambda one: one.update(staleness=1), "cannot be rerun: it hit what older weights"),
    "none": (lambda one: one.update(tokens=[]), "cannot be rerun: it ended before its first token"),
    "tag": (lambda one: one.update(weights="tag:a"), "cannot be rerun: only 'tag:a' names"),
    "other": (lambda one: one.update(weights="blake3:0"), "cannot be rerun: its weights were"),
    "ids": (lambda one: one.update(prompt=[10**6]), "cannot be rerun: The prompt holds"),
    "cut off": (lambda one: one.update(finish="abort"), "same, 6 tokens"),
}


def test_what_differs_and_what_cannot_be_compared_is_said(record: Path, tmp_path: Path) -> None:
    about, records = read_records(record)
    (good,) = [one for one in records if one["id"] == "0-0"]
    changed = []
    for name, (change, _) in CHANGES.items():
        changed.append(copy.deepcopy(good) | {"id": name})
        change(changed[-1])
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [about, *changed]))
    result = run(path)
    found = outcomes(result)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == f"1 of {len(CHANGES)} are the same."
    for name, (_, expected) in CHANGES.items():
        assert found[name].startswith(expected), name


def test_other_weights_and_another_arithmetic_are_named(
    record: Path, folders: tuple[Path, Path]
) -> None:
    weights = outcomes(run(record, "0", "--model", folders[1]))
    assert all("its weights were blake3:" in one for one in weights.values())
    dtype = outcomes(run(record, "0", "--dtype", "bfloat16"))
    assert dtype["0-0"] == "cannot be rerun: its dtype was float32, and is bfloat16 here"


def test_weights_that_were_pushed_are_found_by_their_digest(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The folder that holds them is another one than the record names."""
    path = tmp_path / "day.jsonl"
    llm = LLM(str(folders[0]), dtype="float32", num_blocks=65, record_requests=path)
    llm.receive_weights([load_file(folders[1] / "model.safetensors")])
    llm.generate(PROMPTS, DRAWN, use_tqdm=False)
    llm._engine.close()
    assert run(path).exit_code == 1
    assert run(path, "--model", folders[1]).exit_code == 0


async def test_a_servers_choices_are_found_by_the_id_of_their_response(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "day.jsonl"
    async with served_folder(folders[0], dtype="float32", record_requests=path) as (client, _):
        body = {"prompt": "One day", "n": 2, "max_tokens": 5, "logprobs": 0, "cache_salt": "salt"}
        asked = [(await client.post("/v1/completions", json=body)).json() for _ in range(2)]
    assert "salt" not in path.read_text()
    found = outcomes(await asyncio.to_thread(run, path, asked[1]["id"]))
    assert [*found.values()] == ["same, 5 tokens, 5 log probabilities"] * 2
    assert all(name.startswith(asked[1]["id"]) for name in found)


@pytest.mark.parametrize("text", ["", "{}\n", "no JSON\n", '{"prefixcache_requests": 9}\n'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    refused = run(tmp_path / "x")
    assert (refused.exit_code, refused.stderr[:14]) == (2, "error: RECORD ")


def test_a_cut_line_is_left_out(record: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_text(record.read_text()[:-20])
    assert len(read_records(cut)[1]) == len(read_records(record)[1]) - 1


class Recorded:
    """A fake engine with records."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.records = RequestRecords(path, {})
        self.engine, _, self.cache = make_engine(records=self.records, **options)

    def add(self, name: str, max_tokens: int = 8, **cache: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(
            Request(
                request_id=name,
                prompt_token_ids=[1 + ord(name[0]) % 40] * 9,
                params=params,
                cache=CacheOptions(**cache),
            )
        )

    def run(self, steps: int = 10**6) -> None:
        while self.engine.has_work() and steps:
            self.engine.step()
            steps -= 1

    def end(self) -> dict[str, dict[str, Any]]:
        self.engine.close()
        return {one["id"]: one for one in read_records(self.records.path)[1]}


def test_what_spans_an_update_is_marked(tmp_path: Path) -> None:
    """Those that begin again or afterwards are of one version, and so are those before."""
    recorded = Recorded(tmp_path / "day.jsonl")
    recorded.add("before", 1)
    recorded.run()
    for mode in ("keep", "recompute", "abort"):
        recorded.add(mode, on_weight_update=mode)
    recorded.run(3)
    recorded.cache.versions.begin("tag:new")
    recorded.engine.requests.change_weights("recompute")
    recorded.add("after")
    recorded.run()
    found = recorded.end()
    assert {name for name, one in found.items() if one["mixed"]} == {"keep"}
    assert {name for name, one in found.items() if one["weights"] == "tag:new"} == {
        "recompute",
        "after",
    }
    assert found["abort"]["finish"] == "abort"
    assert [len(found[name]["tokens"]) for name in ("before", "keep", "recompute")] == [1, 8, 8]


def test_garbage_may_be_collected_while_a_thread_is_started(tmp_path: Path) -> None:
    """An engine that nobody closed closes its records then, under a lock of all executors."""
    records = RequestRecords(tmp_path / "day.jsonl", {})
    closing = threading.Thread(target=records.close, daemon=True)
    with thread._global_shutdown_lock:
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    assert read_records(records.path) == ({"prefixcache_requests": 1, "part": 0}, [])


@pytest.mark.parametrize("failure", ["full disk", "deleted", "too slow"])
def test_a_record_that_cannot_go_on_stops_alone(
    tmp_path: Path, failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = Recorded(tmp_path / "day.jsonl")
    recorded.add("a")
    recorded.run()
    wait_until(lambda: '"a"' in recorded.records.path.read_text())
    if failure == "full disk":
        room, write = [20], os.write

        def full(file: int, data: Any) -> int:
            if not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, data[: room.pop()])

        monkeypatch.setattr(record_writer.os, "write", full)
    elif failure == "deleted":
        recorded.records.path.unlink()
    else:
        monkeypatch.setattr(record_writer, "MAX_TOKENS", 0)
    recorded.add("b")
    recorded.run()
    wait_until(lambda: "has stopped" in caplog.text)
    recorded.add("c")
    recorded.run()
    assert recorded.engine.metrics.finished["length"] == 3
    if failure != "deleted":
        assert [*recorded.end()] == ["a"]
