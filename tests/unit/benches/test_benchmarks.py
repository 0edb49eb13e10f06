"""BENCHMARKS.md and the README's chart are made from records, and what they claim is in these."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from prefixcache.cli.main import app

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "benches/results").glob("*.md"))
RECORDS = sorted((ROOT / "benches/record").glob("*.json"))
COMMAND = re.compile(r"(?:`|^    )(?:make|python|cargo bench|prefixcache) ", re.MULTILINE)
VARIABLE = re.compile(r"[A-Z_]+=")
SCRIPT = re.compile(r"benches/\w+/\w+\.py")


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benches"))
        yield importlib.import_module("page")


def test_committed_files_are_what_the_script_makes(page: ModuleType) -> None:
    for path, text in page.made().items():
        assert path.read_text() == text, f"{path.name}: run python benches/page.py"
    assert len(page.PAGE.read_text().splitlines()) <= 160


@pytest.mark.parametrize("record", RECORDS, ids=lambda file: file.name)
def test_a_record_has_its_command_date_and_machine(record: Path) -> None:
    made = json.loads(record.read_text())
    assert made["command"]
    assert re.match(r"2\d\d\d-\d\d-\d\d", made["date"])
    assert made["machine"]["cpu"]
    assert made["machine"]["cores"]


def test_each_claim_takes_its_numbers_from_its_record(page: ModuleType) -> None:
    rows, _ = page.settings()
    assert len({row.id for row in rows}) == len(rows) >= 20
    for row in rows:
        assert not re.search(r"\d\.\d", re.sub(r"\{.*?\}", "", row.claim)), row.id
        record = page.read(row.record)
        results = row.results(record)
        said = row.said(record)
        assert any(f"{one.shown}" in said or page.number(one.ours) in said for one in results)
        assert "{record}" in row.command


def test_each_command_of_a_row_exists(page: ModuleType) -> None:
    for row in page.settings(recorded=False)[0]:
        words = [word for word in shlex.split(row.command) if not VARIABLE.match(word)]
        if words[0] == "python":
            assert (ROOT / words[1]).exists(), row.id
        else:
            arguments = [word.replace("{record}", "out.json") for word in words[2:]]
            app.commands[words[1]].make_context(words[1], arguments)


def test_a_row_that_got_worse_does_not_hold(
    page: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The row is run with a command that writes a record with other numbers."""
    row = next(row for row in page.settings()[0] if row.id == "C1")
    record = page.read(row.record)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    for factor, code in ((1.0, 0), (1 - row.tolerance / 2, 0), (1 - row.tolerance * 2, 1)):
        changed = json.loads(json.dumps(record))
        (cached,) = [one for one in changed["variants"] if one["name"] == "cache on"]
        cached["median"]["requests_per_second"] *= factor
        (tmp_path / "new.json").write_text(json.dumps(changed))
        asked = page.Row(**{**vars(row), "command": "cp new.json {record}"})
        assert page.run(asked, write=False) == code
    assert "the claim does not hold within 20%" in capsys.readouterr().out
    assert page.run(page.Row(**{**vars(row), "command": "false"}), write=False) == 2


def test_counts_of_changed_answers_are_those_of_the_recorded_answers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benches/serving"))
        bench = importlib.import_module("same_answers")
    record = json.loads((ROOT / "benches/record/same-answers.json").read_text())
    for name, answers in record["answers"].items():
        assert bench.counts([bench.Pair(**pair) for pair in answers]) == record["values"][name]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_each_section_of_results_has_a_command_that_exists(file: Path) -> None:
    sections = re.split(r"^## ", file.read_text(), flags=re.MULTILINE)[1:]
    assert sections
    for section in sections:
        assert COMMAND.search(section), section.splitlines()[0]
        assert "not kept" not in section
    for script in SCRIPT.findall(file.read_text()):
        assert (ROOT / script).exists(), script
