"""A running `serve-ray`: its processes, by what Ray calls them, and requests to it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

REPLICA = "EngineReplica"
INGRESS = "Ingress"
COMMANDS = "Commands"


@dataclass(frozen=True)
class Cluster:
    """Its address, and the process that was started."""

    address: str
    pid: int

    def processes(self, deployment: str) -> list[int]:
        """The processes of a deployment."""
        title = f"ray::ServeReplica:prefixcache:{deployment}"
        return [pid for pid in _descendants(self.pid) if _title(pid).startswith(title)]

    def kill(self, deployment: str) -> int:
        """Kills one of the processes of a deployment, which it returns."""
        pid = self.processes(deployment)[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_busiest(self) -> int:
        """Kills the replica with the most requests, as soon as there are some; its process."""
        pids = {one["replica"]: one["pid"] for one in self.replicas()}
        pid = 0

        def is_found() -> bool:
            nonlocal pid
            page = httpx.get(f"{self.address}/metrics", timeout=240).text
            running = re.findall(r'num_requests_running{.*replica="(\w+)".*} (\S+)', page)
            replica, most = max(running, key=lambda one: float(one[1]))
            pid = pids[replica]
            return float(most) > 0

        self.wait_until(is_found)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until(self, is_true: Callable[[], bool], seconds: float = 240) -> None:
        """Raises `TimeoutError` when it does not come true in time."""
        deadline = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.2)

    def wait_for_replicas(self, count: int) -> None:
        """Until `count` answer."""
        self.wait_until(lambda: len(self.replicas()) == count)

    def replicas(self) -> list[dict[str, Any]]:
        """What each replica says of itself."""
        response = httpx.get(f"{self.address}/server_info", timeout=240)
        return response.json()["replicas"] if response.is_success else []

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.address}{path}", json=body, timeout=240)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _descendants(root: int) -> list[int]:
    """The processes below one, however deep."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found, size = {root}, 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found - {root})


def prompt(number: int, length: int = 120) -> list[int]:
    """Token ids of a prompt of its own."""
    return [3 + (number * 31 + place * (7 + number % 5)) % 370 for place in range(length)]


async def completion(address: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=240) as client:
        return await client.post(f"{address}/v1/completions", json=body)


async def all_completions(address: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """The answers to requests that are sent at once."""
    return await asyncio.gather(*(completion(address, **body) for body in bodies))


def said(response: httpx.Response) -> Any:
    """What an answer says: its choices, or its error."""
    body = response.json()
    return body["choices"] if "choices" in body else body["error"]["message"]


def streamed(lines: list[str]) -> tuple[str, str | None]:
    """The text of a stream of completions, and the message of its error."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    errors = [one["error"]["message"] for one in events if "error" in one]
    text = "".join(one["choices"][0]["text"] for one in events if one.get("choices"))
    return text, errors[0] if errors else None


GREEDY = {"model": "tiny", "temperature": 0}


def bodies_of(count: int, **fields: Any) -> list[dict[str, Any]]:
    body = {**GREEDY, "max_tokens": 24, **fields}
    return [{**body, "prompt": prompt(number)} for number in range(count)]


async def until(is_true: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(is_true):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


class Traffic:
    """The same completions again and again, from a thread, until it is left."""

    def __init__(self, address: str, bodies: list[dict[str, Any]], *, stream: bool = False) -> None:
        self._address = address
        self._bodies = [{**body, "stream": stream} for body in bodies]
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=[one]) for one in self._bodies]
        self.answers: list[tuple[int, httpx.Response | Exception]] = []

    def _send(self, body: dict[str, Any]) -> None:
        index = self._bodies.index(body)
        with httpx.Client(timeout=240) as client:
            while not self._stopped.is_set():
                self.answers.append((index, self._answer(client, body)))

    def _answer(self, client: httpx.Client, body: dict[str, Any]) -> httpx.Response | Exception:
        try:
            return client.post(f"{self._address}/v1/completions", json=body)
        except httpx.HTTPError as error:
            time.sleep(0.2)
            return error

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
