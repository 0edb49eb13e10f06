"""Workloads, numbers, tables and pictures of the bench, on records made by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.image import imread
from rich.console import Console

from prefixcache.bench import machine
from prefixcache.bench.client import RequestRecord
from prefixcache.bench.plots import draw
from prefixcache.bench.report import (
    Report,
    Variant,
    heading,
    make_report,
    summarize,
    table,
    to_json,
    write_json,
)
from prefixcache.bench.workloads import LoadConfig, WorkloadConfig, make_prompts
from prefixcache.exceptions import ConfigError

POOL = list(range(100, 220))
SETTINGS = {
    "model": "tiny",
    "dtype": "float32",
    "num_requests": 2,
    "prefix_len": 64,
    "suffix_len": 16,
    "output_len": 3,
}


def record(sent: float, ttft: float, *, cached: int = 0, output: str = "abc") -> RequestRecord:
    first = sent + ttft
    return RequestRecord(
        sent=sent,
        arrivals=(first, first + 0.1, first + 0.4),
        prompt_tokens=80,
        cached_tokens=cached,
        output_tokens=3,
        output=output,
    )


def make(off_runs: int = 1) -> Report:
    off = [[record(0.0, 1.0), record(0.5, 1.6)] for _ in range(off_runs)]
    on = [[record(0.0, 1.0), record(0.5, 0.1, cached=64, output="abd")]]
    return make_report("prefixcache bench", SETTINGS, {"cache off": off, "cache on": on})


def test_prompts_share_exactly_the_prefix() -> None:
    config = WorkloadConfig(num_requests=5, prefix_len=48, suffix_len=16, output_len=7)
    prompts = make_prompts(config, POOL)
    assert {prompt.token_ids[:48] for prompt in prompts} == {prompts[0].token_ids[:48]}
    assert len({prompt.token_ids[48:] for prompt in prompts}) == 5
    assert all(len(p.token_ids) == 64 and p.output_len == 7 for p in prompts)
    assert {token for p in prompts for token in p.token_ids} <= set(POOL)


def test_prompts_depend_on_the_seed_alone() -> None:
    one, again, other = (
        make_prompts(WorkloadConfig(seed=seed, num_requests=2), POOL) for seed in (1, 1, 2)
    )
    assert one == again
    assert one[0].token_ids[:16] != other[0].token_ids[:16]


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_requests", 0), ("prefix_len", -1), ("suffix_len", -1), ("output_len", 0)],
)
def test_a_wrong_workload_names_the_field(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        WorkloadConfig(**{field: value})


def test_a_workload_needs_a_prompt() -> None:
    with pytest.raises(ConfigError, match="must not both be 0"):
        WorkloadConfig(prefix_len=0, suffix_len=0)


@pytest.mark.parametrize(
    "fields", [{"concurrency": -1}, {"request_rate": -1.0}, {"request_rate": float("inf")}]
)
def test_a_wrong_load_names_the_field(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        LoadConfig(**fields)


def test_arrivals_come_at_the_asked_rate() -> None:
    arrivals = LoadConfig(request_rate=20.0).arrivals(2000)
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert 2000 / arrivals[-1] == pytest.approx(20.0, rel=0.1)
    assert LoadConfig().arrivals(3) == [0.0, 0.0, 0.0]


def test_a_summary_counts_what_the_records_say() -> None:
    summary = summarize([record(0.0, 1.0), record(0.5, 0.1, cached=64)], ["abc", "xyz"])
    assert summary.duration == pytest.approx(1.4)
    assert summary.requests_per_second == pytest.approx(2 / 1.4)
    assert summary.output_tokens_per_second == pytest.approx(6 / 1.4)
    assert (summary.computed_tokens, summary.cached_tokens) == (96, 64)
    assert summary.ttft_p50 == pytest.approx(0.55)
    assert summary.ttft_p99 == pytest.approx(0.991)
    assert summary.inter_token_p50 == pytest.approx(0.2)
    assert summary.latency_p50 == pytest.approx(0.95)
    assert summary.same_outputs == 1


def test_one_token_has_no_inter_token_time() -> None:
    lone = RequestRecord(
        sent=0.0, arrivals=(0.5,), prompt_tokens=8, cached_tokens=0, output_tokens=1, output=(7,)
    )
    summary = summarize([lone], [(7,)])
    assert summary.inter_token_p50 is None
    assert Variant("one token", (), (summary, summary)).median.inter_token_p99 is None
    report = make_report("prefixcache bench", SETTINGS, {"cache off": [[lone]]})
    assert printed(report).count(" - ") == 2


def test_the_median_is_taken_field_by_field() -> None:
    runs = tuple(summarize([record(0.0, ttft)], ["abc"]) for ttft in (3.0, 1.0, 2.0))
    assert Variant("three runs", (), runs).median.ttft_p50 == pytest.approx(2.0)


def printed(report: Report) -> str:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as capture:
        console.print(table(report))
    return capture.get()


def test_the_table_holds_both_variants_and_the_ratio() -> None:
    lines = {line[1:31].strip(): line for line in printed(make()).splitlines()}
    workload = "2 requests, 64 shared + 16 own prompt tokens, 3 output tokens"
    assert heading(make()) == f"{workload}; median of 1 run"
    assert heading(make(off_runs=3)) == f"{workload}; median of 3 runs"
    computed = next(line for name, line in lines.items() if name.startswith("prompt tokens comp"))
    assert [cell.strip() for cell in computed.split("│")[2:4]] == ["160", "96 (1.67x)"]
    equal = next(line for name, line in lines.items() if name.startswith("answers equal"))
    assert [cell.strip() for cell in equal.split("│")[2:4]] == ["2", "1"]


def test_the_json_can_be_read_back(tmp_path: Path) -> None:
    report = make(off_runs=2)
    path = tmp_path / "deep" / "results.json"
    write_json(report, path)
    found = json.loads(path.read_text())
    assert found == to_json(report)
    off, on = found["variants"]
    assert (off["name"], len(off["runs"])) == ("cache off", 2)
    assert on["runs"][0]["requests"]["cached_tokens"] == [0, 64]
    assert found["machine"]["cores"] >= 1
    assert found["command"] == "prefixcache bench"


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "pictures" / f"saved.{ending}"
    draw(make(), path)
    if ending == "png":
        height, width, _ = imread(path).shape
        assert width == 2000
        assert height > 400
    else:
        assert path.read_text().startswith("<?xml")


def test_the_picture_says_what_was_skipped(tmp_path: Path) -> None:
    path = tmp_path / "saved.svg"
    with rc_context({"svg.fonttype": "none"}):
        draw(make(), path)
    text = path.read_text()
    for words in ("160 computed", "96 computed", "64 skipped", "2.4 times sooner", "tiny, float32"):
        assert words in text


def test_the_processor_is_named_with_its_family(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: AMD EPYC\ncpu family\t: 25\nmodel\t\t: 17\n\nmodel name: x\n")
    assert machine._cpu_model(cpuinfo) == "AMD EPYC (family 25, model 17)"
    assert machine._cpu_model(tmp_path / "absent")


def test_a_missing_package_is_said_to_be_missing() -> None:
    assert machine._version("no-such-package-here") == "not installed"
