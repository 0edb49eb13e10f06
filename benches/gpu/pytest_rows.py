"""A pytest plugin: `-p pytest_rows --rows FILE` adds a row to the record for each finished test."""

from __future__ import annotations

from pathlib import Path

import pytest
from record import Row, append_row


class Rows:
    """Writes a row for each test, and for each file that cannot be read."""

    def __init__(self, record: Path) -> None:
        self._record = record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's call, or what went wrong or was skipped around it."""
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has no tests."""
        if report.failed:
            self._write(report.nodeid, "cannot be collected", None)

    def _write(self, name: str, outcome: str, seconds: float | None) -> None:
        row: Row = {"section": "tests", "what": name, "unit": f"s; {outcome}"}
        if seconds is not None:
            row["value"] = seconds
        if outcome != "skipped":
            row["ok"] = outcome == "passed"
        append_row(self._record, row)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--rows`."""
    parser.addoption("--rows", type=Path, help="the record that each test's row is added to")


def pytest_configure(config: pytest.Config) -> None:
    """Starts with the record's name."""
    record = config.getoption("rows")
    if record is not None:
        config.pluginmanager.register(Rows(record.absolute()))
