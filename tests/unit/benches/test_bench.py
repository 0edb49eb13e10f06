"""Workloads, numbers, tables and pictures of the bench, on records made by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.image import imread

from prefixcache.exceptions import ConfigError
from prefixcache.tools.bench import machine
from prefixcache.tools.bench.records import RequestRecord, Run, parse_objectives
from prefixcache.tools.bench.reports.compare import compare_files
from prefixcache.tools.bench.reports.page import write_page
from prefixcache.tools.bench.reports.plots import draw
from prefixcache.tools.bench.reports.report import (
    Report,
    Variant,
    make_report,
    medians,
    summarize,
    to_json,
)
from prefixcache.tools.bench.reports.tables import heading, table
from prefixcache.tools.pictures import INK
from prefixcache.tools.results import write_json

SETTINGS = {
    "model": "tiny",
    "dtype": "float32",
    "num_requests": 2,
    "prefix_len": 64,
    "suffix_len": 16,
    "output_len": 3,
}


def record(
    sent: float,
    ttft: float,
    *,
    cached: int | None = 0,
    output: str = "abc",
    session: int = 0,
    prompt: int = 80,
) -> RequestRecord:
    first = sent + ttft
    return RequestRecord(
        sent=sent,
        arrivals=(first, first + 0.1, first + 0.4),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=3,
        output=output,
        session=str(session),
    )


def make(off_runs: int = 1, cached: int | None = 64, **more: Any) -> Report:
    off = [Run([record(0.0, 1.0), record(0.5, 1.6, session=1)]) for _ in range(off_runs)]
    second = record(0.5, 0.1, cached=cached, output="abd", session=1, prompt=80)
    on = [Run([record(0.0, 1.0), second])]
    return make_report("prefixcache bench", SETTINGS, {"cache off": off, "cache on": on}, **more)


def test_a_summary_counts_what_the_records_say() -> None:
    run = Run([record(0.0, 1.0), record(0.5, 0.1, cached=64, session=1)], failures=["refused"])
    reference = {("0", 0): "abc", ("1", 0): "xyz"}
    summary = summarize(run, {"ttft": 0.5, "itl": 0.3}, reference)
    assert summary.duration == pytest.approx(1.4)
    assert summary.requests_per_second == pytest.approx(2 / 1.4)
    assert summary.output_tokens_per_second == pytest.approx(6 / 1.4)
    assert (summary.computed_tokens, summary.cached_tokens) == (96, 64)
    assert (summary.requests, summary.failed_requests) == (2, 1)
    assert summary.hit_rate == pytest.approx(0.4)
    assert summary.slo_attainment == pytest.approx(1 / 3)
    assert summary.goodput == pytest.approx(1 / 1.4)
    assert summary.ttft_p50 == pytest.approx(0.55)
    assert summary.ttft_p90 == pytest.approx(0.91)
    assert summary.ttft_p99 == pytest.approx(0.991)
    assert summary.inter_token_p50 == pytest.approx(0.2)
    assert summary.latency_p50 == pytest.approx(0.95)
    assert summary.same_outputs == 1


def test_one_token_has_no_inter_token_time() -> None:
    lone = RequestRecord(
        sent=0.0, arrivals=(0.5,), prompt_tokens=8, cached_tokens=0, output_tokens=1, output=(7,)
    )
    summary = summarize(Run([lone]), {}, None)
    assert summary.inter_token_p50 is None
    assert Variant("one token", (), (summary, summary)).median.inter_token_p99 is None
    assert summary.slo_attainment is None


@pytest.mark.parametrize(("itl", "attained"), [(0.21, 1.0), (0.19, 0.0)])
def test_an_objective_between_tokens_is_of_their_mean(itl: float, attained: float) -> None:
    summary = summarize(Run([record(0.0, 1.0)]), {"itl": itl}, None)
    assert summary.slo_attainment == attained


def test_objectives_are_in_milliseconds() -> None:
    assert parse_objectives(("ttft:500", "e2el:2000.5")) == {"ttft": 0.5, "e2el": 2.0005}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0", "ttft:nan", "ttft:inf", "speed:5", ""])
def test_a_wrong_objective_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="as in ttft:500"):
        parse_objectives((text,))


def test_a_run_without_an_answer_has_no_numbers() -> None:
    report = make_report("x", SETTINGS, {"as served": [Run(error="gone")], "later": []})
    assert report.errors == ("as served: gone",)
    assert [variant.name for variant in report.variants] == ["as served"]
    assert not report.has_records
    assert "0" in printed(report)


def test_hits_that_are_not_reported_are_not_taken_for_none() -> None:
    report = make(cached=None)
    assert report.variants[1].median.hit_rate is None
    rate = next(line for line in printed(report).splitlines() if "hit rate" in line)
    assert [cell.strip() for cell in rate.split("│")[2:4]] == ["0.0%", "not reported"]


def printed(report: Report) -> str:
    return table([one.name for one in report.variants], medians(report))


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
    write_json(to_json(report), path)
    found = json.loads(path.read_text())
    assert found == json.loads(json.dumps(to_json(report)))
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


def test_the_picture_leaves_out_what_has_no_answer(tmp_path: Path) -> None:
    gone, short, long = (
        Run(error="gone"),
        Run([record(0.0, 1.0)]),
        Run([record(0.0, 1.0, prompt=8)]),
    )
    for number, runs in enumerate(
        ({"off": [short], "on": [gone]}, {"off": [gone], "on": [short, gone, gone, long]})
    ):
        path = tmp_path / f"{number}.png"
        draw(make_report("prefixcache bench", SETTINGS, runs), path)
        assert path.stat().st_size


def test_the_page_stands_alone_and_says_all(tmp_path: Path) -> None:
    report = make(remarks=["<script>alert(1)</script>"])
    write_page(report, tmp_path / "pages" / "report.html")
    text = (tmp_path / "pages" / "report.html").read_text()
    wanted = ("<svg", "160", "96 (1.67x)", "cache off", SETTINGS["model"], "&lt;script&gt;")
    assert [words for words in wanted if words not in text] == []
    loads = r"""<script|<link|<img|(?:src|href)=["'](?!#)|url\((?!#)|@import"""
    assert re.findall(loads, text) == []


def test_two_results_stand_side_by_side(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_json(to_json(make()), a)
    write_json(to_json(replace(make(), settings=SETTINGS | {"output_len": 9})), b)
    text = "\n".join(compare_files(a, b))
    assert "output_len: 3 in A, 9 in B" in text
    assert text.count("96 (1.00x)") == 1
    assert "A: cache off" in text


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"variants": []}', '{"variants": [{"name": 1}], "settings": {}}']
)
def test_what_is_no_result_is_named(tmp_path: Path, content: str) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(content)
    with pytest.raises(ConfigError, match=r"wrong\.json"):
        list(compare_files(wrong, wrong))
    with pytest.raises(ConfigError, match=r"absent\.json"):
        list(compare_files(tmp_path / "absent.json", wrong))


def test_the_picture_says_what_was_skipped(tmp_path: Path) -> None:
    path = tmp_path / "saved.svg"
    with rc_context({"svg.fonttype": "none"}):
        draw(make(), path)
    text = path.read_text()
    for words in ("160 computed", "96 computed", "64 skipped", "2.4 times sooner", "tiny, float32"):
        assert words in text


def test_a_light_picture_comes_with_a_dark_one(tmp_path: Path) -> None:
    draw(make(), tmp_path / "saved-light.svg")
    light, dark = ((tmp_path / f"saved-{tone}.svg").read_text() for tone in ("light", "dark"))
    assert INK in light
    assert INK not in dark
    assert "#e4e7eb" in dark
    assert [*tmp_path.iterdir()] == [*tmp_path.glob("saved-*.svg")]


def test_the_processor_is_named_with_its_family(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: AMD EPYC\ncpu family\t: 25\nmodel\t\t: 17\n\nmodel name: x\n")
    assert machine._cpu_model(cpuinfo) == "AMD EPYC (family 25, model 17)"
    assert machine._cpu_model(tmp_path / "absent")
