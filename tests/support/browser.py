"""Headless Chromium, driven over its debugging pipe: no driver, no port, nothing but the program.

Tests that need it are skipped where `chromium` is not installed.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--remote-debugging-pipe",
    "about:blank",
)

# Chromium reads commands from descriptor 3 and answers on 4, which may be taken by the ends.
_WITH_PIPE = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """A tab. `problems` are what its console and its content security policy complained of."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, os.fdopen(from_browser, "rb")
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._unread = b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._from.fileno(), 1 << 20)
            assert more, "the browser ended"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        self.call("Browser.close")
        os.close(self._to)
        self._from.close()

    def go(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        loaded = f"document.readyState == 'complete' && location.href == {json.dumps(address)}"
        self.wait_for(loaded)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited; raises when it throws."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 240.0) -> Any:
        """The expression's first true value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"{script} did not come true; {self.problems}"
            time.sleep(0.01)
        return value

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "End": 35}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Gives the page a size in CSS pixels and a colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path) -> None:
        """A PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def counts(self) -> dict[str, float]:
        """What the page holds after its garbage was collected: nodes, listeners, bytes."""
        self.call("HeapProfiler.collectGarbage")
        metrics = self.call("Performance.getMetrics")["metrics"]
        return {one["name"]: one["value"] for one in metrics}


@contextmanager
def browser() -> Generator[Page, None, None]:
    """A browser with a profile of its own, and its one tab."""
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        ends = (read_there, write_there)
        program = [CHROMIUM or "", f"--user-data-dir={profile}", *sandbox, *_FLAGS]
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PIPE, *map(str, ends), *program],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        page = Page(write_here, read_here)
        try:
            yield page
        finally:
            page.close()
            process.wait(timeout=240)
