"""A pytest plugin: `-p pytest_rows --rows FILE` adds a row to the record for each finished test.

Where a test loses the device, the session ends and `--progress` tells the test's number: another
session goes on after it by `--resume-at`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from progress import LOST, Progress, device_is_lost
from record import Row, append_row


class Rows:
    """Writes a row for each test, and for each file that cannot be read."""

    def __init__(self, record: Path, progress: Progress) -> None:
        self._record = record
        self._progress = progress

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out what an earlier session began."""
        items[:] = [item for item in items if self._progress.is_left()]

    def pytest_runtest_logstart(self) -> None:
        """Each test is a part."""
        self._progress.begin()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's call, or what went wrong or was skipped around it."""
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report.duration)
        if report.failed and device_is_lost():
            pytest.exit(f"{report.nodeid} lost the device", LOST)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has no tests."""
        if report.failed:
            self._write(report.nodeid, "cannot be collected", None)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """A session that goes to its end leaves nothing to another one."""
        if exitstatus != LOST:
            self._progress.end()

    def _write(self, name: str, outcome: str, seconds: float | None) -> None:
        row: Row = {"section": "tests", "what": name, "unit": f"s; {outcome}"}
        if seconds is not None:
            row["value"] = seconds
        if outcome != "skipped":
            row["ok"] = outcome == "passed"
        append_row(self._record, row)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--rows`, `--progress` and `--resume-at`."""
    parser.addoption("--rows", type=Path, help="the record that each test's row is added to")
    parser.addoption("--progress", type=Path, help="a file for the number of the test")
    parser.addoption("--resume-at", type=int, default=0, help="tests to leave out")


def pytest_configure(config: pytest.Config) -> None:
    """Starts with the record's name."""
    record = config.getoption("rows")
    if record is not None:
        progress = Progress(config.getoption("progress").absolute(), config.getoption("resume_at"))
        config.pluginmanager.register(Rows(record.absolute(), progress))
