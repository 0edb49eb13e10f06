"""`prefixcache replay`: its numbers against the obvious ones, and what it says of wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from prefixcache.cli.main import app
from prefixcache.tools.replay.sizes import parse_sizes
from prefixcache.tools.replay.ttft_model import read_model

BLOCK = 512
# Prompts by their blocks; of each, one more token is computed.
PROMPTS = ["ab", "cd", "ab", "ce", "abf", "cd", "gh", "ab"]
HEADER = "#PTT1 name=small block=4\n"
TAUBENCH = Path(__file__).parents[3] / "benches/traces/taubench.ptt.gz"


def write_trace(path: Path, prompts: list[str], gap_ms: int = 1000) -> Path:
    lines = [
        {
            "timestamp": number * gap_ms,
            "input_length": len(prompt) * BLOCK + 1,
            "output_length": 1,
            "hash_ids": [*map(ord, prompt), 0],
        }
        for number, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(*arguments: str | Path, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == status, done.output
    return done.output


def results(tmp_path: Path, *arguments: str | Path) -> dict[str, Any]:
    output = tmp_path / "results.json"
    replay(*arguments, "--output", output)
    return json.loads(output.read_text())


def lru_hits(prompts: list[str], capacity: int) -> int:
    line: list[str] = []
    hits = 0
    for prompt in prompts:
        blocks = [prompt[: end + 1] for end in range(len(prompt))]
        hits += next((i for i, block in enumerate(blocks) if block not in line), len(blocks))
        line = [block for block in line if block not in blocks]
        line = line[max(0, len(line) + len(blocks) - capacity) :] + blocks[::-1]
    return hits


def test_each_size_hits_what_a_plain_list_hits(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", PROMPTS)
    sizes = ",".join(map(str, range(3, 10)))
    passed = results(tmp_path, trace, "--sizes", sizes)["traces"][0]
    run = results(tmp_path, trace, "--sizes", sizes, "--no-bounds")["traces"][0]
    for one, other in zip(passed["rows"], run["rows"], strict=True):
        assert one["hit_tokens"] == lru_hits(PROMPTS, one["blocks"]) * BLOCK
        same = ("hit_tokens", "request_hit_rate", "evictions", "blocks")
        assert [one[name] for name in same] == [other[name] for name in same]
        assert one["hit_rate"] <= one["optimum"] <= passed["infinite"]
    assert passed["infinite"] == lru_hits(PROMPTS, 1000) * BLOCK / passed["input_tokens"]
    assert (passed["unique_blocks"], passed["block_references"]) == (8, 17)


def test_a_queue_is_waited_for_and_long_hits_go_first(tmp_path: Path) -> None:
    """All come at once: the second `a` hits, and with cache-aware it starts second, not third."""
    trace = write_trace(tmp_path / "trace.jsonl", ["a", "b", "a"], gap_ms=0)
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"ms_per_token": 1.0, "ms_per_request": 10.0}))
    flags = ("--sizes", "100", "--ttft-model", model, "--goodput", "ttft:600")
    hit, miss = 11.0, BLOCK + 11.0
    fcfs = results(tmp_path, trace, *flags)["traces"][0]["rows"][0]["latency"]
    aware = results(tmp_path, trace, *flags, "--scheduling-policy", "cache-aware")
    aware = aware["traces"][0]["rows"][0]["latency"]
    for found, times in ((fcfs, (2 * miss, 2 * miss + hit)), (aware, (miss + hit, 2 * miss + hit))):
        percentiles = found["ttft_ms"]["50"], found["ttft_ms"]["99"]
        np.testing.assert_allclose(percentiles, times, rtol=1e-3)
    assert fcfs["good_share"] == pytest.approx(1 / 3)
    assert aware["good_share"] == pytest.approx(2 / 3)
    impatient = (*flags, "--scheduling-policy", "cache-aware", "--max-queue-delay", "0")
    in_turn = results(tmp_path, trace, *impatient)["traces"][0]["rows"][0]["latency"]
    assert in_turn == fcfs


def test_hints_keep_what_they_raise(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", ["ab", "cd", "ef", "ab"])
    rates = [
        results(tmp_path, trace, "--sizes", "4", *flags)["traces"][0]["rows"][0]["hit_tokens"]
        for flags in ((), ("--hint", f"0:{BLOCK}=80"))
    ]
    # One block of each prompt is raised: of the four, those of the first two and of the newest.
    assert rates == [0, BLOCK]


def test_what_memory_evicts_hits_on_a_disk(tmp_path: Path) -> None:
    """The pool keeps the last prompt alone; a disk of three blocks not all of the other."""
    trace = write_trace(tmp_path / "trace.jsonl", ["ab", "cd", "ab", "cd", "cd", "ab"])

    def row(*flags: str) -> dict[str, Any]:
        return results(tmp_path, trace, "--sizes", "2", *flags)["traces"][0]["rows"][0]

    found = {
        (disk, uses): row("--disk-memory", disk, "--disk-cache-min-uses", uses)
        for disk in ("4", "75%", "100%")
        for uses in ("1", "2")
    }
    tokens = {key: one["disk_tokens"] // BLOCK for key, one in found.items()}
    assert {one["hit_tokens"] for one in found.values()} == {2 * BLOCK}
    # From the second use on: "ab" is written when it goes for the second time.
    assert (tokens["4", "1"], tokens["4", "2"]) == (6, 2)
    assert (found["4", "1"]["disk_writes"], found["4", "2"]["disk_writes"]) == (4, 4)
    assert tokens["100%", "1"] == tokens["4", "1"]
    assert 0 < tokens["75%", "1"] < 6
    assert row()["disk_tokens"] == 0
    shown = replay(trace, "--sizes", "2", "--compare", "--disk-memory 4")
    assert "switch to disk of 4 from use 1 on" in shown


def test_each_rule_of_snapshots_hits_where_it_keeps_them(tmp_path: Path) -> None:
    """Three prompts of 20 blocks that part after 12; steps have 8, and a snapshot takes 10."""
    trace = tmp_path / "parting.ptt"
    lines = ["0,1281,1,-1,0,-1,20,19,0", "9,1281,1,-1,0,11,8,27,0", "19,1281,1,-1,0,11,8,35,0"]
    trace.write_text("\n".join(["#PTT1 name=parting block=64", *lines, ""]))
    states = ("--token-bytes", "100", "--snapshot-bytes", "64kB")
    rules = ("--snapshots", "anchors,ends,every,marconi")
    rows = results(tmp_path, trace, "--sizes", 1000, *states, *rules)["traces"][0]["rows"]
    found = {row["snapshots"]: row["hit_tokens"] // 64 for row in rows}
    assert found == {"anchors": 8 + 12, "ends": 0, "every": 12 + 12, "marconi": 12}


def test_two_configurations_and_a_sentence(tmp_path: Path) -> None:
    plot = tmp_path / "curve.svg"
    shown = replay(
        TAUBENCH, "--sizes", "2%", "--compare", "--sizes 10% --eviction-policy reuse-queue",
        "--plot", plot,
    )  # fmt: skip
    sentence = shown[shown.index("taubench: buy 5 times the cache memory") :]
    assert "and switch to reuse-queue" in sentence
    assert "fewer prompt tokens" in sentence
    assert plot.read_text().startswith("<?xml")
    one, other = (
        results(tmp_path, TAUBENCH, "--sizes", "10%", "--compare", "--sizes 2%")["verdicts"] * 2
    )
    assert one == other
    assert one.startswith("taubench: do not sell cache memory down to 0.2 times")


def test_a_model_is_fitted_to_lone_requests(tmp_path: Path) -> None:
    computed = np.arange(1, 21) * 100
    ttft = (5 + 0.25 * computed) / 1e3
    sent = np.arange(20.0)
    # Two that wait for each other say nothing of a prompt alone.
    requests: dict[str, list[Any]] = {
        "sent": [*sent, 30.0, 30.0],
        "ttft": [*ttft, 9.0, 9.5],
        "prompt_tokens": [*(computed + 64).tolist(), 64, 64],
        "cached_tokens": [64] * 20 + [0, 0],
    }
    # A server that does not tell its hits.
    requests = {name: [*values, values[-1] + 50] for name, values in requests.items()}
    requests["cached_tokens"][-1] = None
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"variants": [{"runs": [{"requests": requests}]}]}))
    model = read_model(path)
    assert model.ms_per_token == pytest.approx(0.25)
    assert model.ms_per_request == pytest.approx(5)
    requests = {name: values[-3:-1] for name, values in requests.items()}
    path.write_text(json.dumps({"variants": [{"runs": [{"requests": requests}]}]}))
    with pytest.raises(ValueError, match="only 0 requests were computed alone"):
        read_model(path)
    path.write_text('{"variants": 5}')
    with pytest.raises(ValueError, match="is no file of"):
        read_model(path)


def test_sizes() -> None:
    assert [str(size) for size in parse_sizes(["1%..100%"])] == [
        "1%", "2%", "5%", "10%", "20%", "50%", "100%",
    ]  # fmt: skip
    assert [str(size) for size in parse_sizes(["300..1500", "7", "0.5%"])] == [
        "300", "500", "1000", "1500", "7", "0.5%",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--sizes", "0"), "--sizes must be blocks or percent"),
        (("--sizes", "20%..10%"), "--sizes must rise"),
        (("--sizes", "5%", "--no-bounds"), "--sizes must be blocks with --no-bounds"),
        (("--hint", "0-9=80"), "--hint must be START:END=PRIORITY"),
        (("--disk-memory", "x"), "--disk-memory must be blocks or percent"),
        (("--disk-memory", "5%", "--sizes", "9", "--no-bounds"), "--disk-memory must be blocks"),
        (("--disk-memory", "5", "--ttft-model", "m"), "--disk-memory excludes --ttft-model"),
        (("--disk-cache-min-uses", "2"), "--disk-cache-min-uses needs --disk-memory"),
        (("--snapshots", "ends"), "--snapshots needs --snapshot-bytes and --token-bytes"),
        (("--snapshot-bytes", "9MB"), "--snapshot-bytes and --token-bytes are given together"),
        (("--goodput", "ttft:500"), "--goodput is a prediction, which needs --ttft-model"),
        (("--scheduling-policy", "cache-aware"), "--scheduling-policy needs --ttft-model"),
        (("--compare", "--size 5"), "--compare takes some of replay's flags: No such option"),
        (
            ("--compare", "--sizes"),
            "--compare takes some of replay's flags: Option '--sizes' requires",
        ),
        (("--compare", ""), "--compare takes flags with their values"),
        (("--compare", "--sizes 4", "--sizes", "1,2"), "--compare sets two caches side by side"),
        (("--ttft-model", "none.json"), "--ttft-model cannot be used: none.json: No such file"),
        (("--plot", "curve.txt"), "--plot draws .png"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", ["a"])
    assert said in replay(trace, *flags, status=2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "line 1: header is missing"),
        ("#PTT2 name=x block=4\n", "line 1: header is of another version"),
        (HEADER + "9,4,0,-1,0,-1,1,0,0\n8,4,0,-1,0,0,0,0,0\n", "line 3: time must not be before"),
        (HEADER + "9,8,0,-1,0,-1,1,0,0\n", "line 2: n_new must make a prompt of 2 blocks"),
        (HEADER + "9,4,0,-1,0", "line 2: fork is missing"),
        ('{"prefixcache_trace": 2}\n', "line 1: prefixcache_trace must be 1, not 2"),
    ],
)
def test_a_wrong_trace_is_reported_and_nothing_is_written(
    tmp_path: Path, content: str, said: str
) -> None:
    trace, output = tmp_path / "trace", tmp_path / "results.json"
    trace.write_text(content)
    shown = replay(trace, "--output", output, status=1).replace("\n", " ")
    assert f"{trace}, {said}" in shown
    assert not output.exists()


def test_a_disk_that_is_full_at_the_end_is_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(HEADER + "9,4,0,-1,0,-1,1,0,0\n")
    shown = replay(trace, "--output", "/dev/full", status=1)
    assert "error: Cannot write /dev/full: No space left on device." in shown
