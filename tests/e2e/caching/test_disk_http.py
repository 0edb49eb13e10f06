"""Requests that end while they wait for a disk: their blocks come back, and others go on."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest

from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.kv.tiers.disk_store import DiskStore
from prefixcache.scheduler import loading
from prefixcache.scheduler.step_time import StepTimeModel
from prefixcache.server.app import create_app
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.options.limits import ServerLimits
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.serving import MODEL, running, serve_folder, wait_until

PATH = "/v1/completions"


def body(count: int, seed: int) -> dict[str, Any]:
    prompt = np.random.default_rng(seed).integers(3, 300, count).tolist()
    return {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1}


FIRST, SEEDS = body(150, 0), itertools.count(100)


@dataclass
class Served:
    """An engine at an address with a time limit of 0.2 seconds for requests, and at one without."""

    engine: AsyncEngine
    address: str
    hasty: str

    def ask(self, fields: dict[str, Any]) -> tuple[Any, int]:
        """The answer, and how much of its prompt came from the disk."""
        answer = httpx.post(self.address + PATH, json=fields, timeout=240).json()
        from_disk = answer["usage"]["prompt_tokens_details"].get("disk_cached_tokens", 0)
        return answer["choices"], from_disk

    def num_loads(self) -> int:
        loads = self.engine.metrics.gauges().loads
        assert loads is not None
        return loads.started

    def evict(self) -> None:
        """The first prompt lies on the disk alone."""
        for seed in (7, 8):
            self.ask(body(220, seed))
        wait_until(lambda: self.engine._engine.locate_prefix(FIRST["prompt"]) == (0, 144))


@pytest.fixture(scope="module")
def served(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder, disk = tiny_checkpoint(), tmp_path_factory.mktemp("disk")
    disk.chmod(0o700)
    app, engine = serve_folder(
        folder,
        num_blocks=16,
        max_model_len=240,
        disk_cache_memory="64MiB",
        disk_cache_dir=disk,
    )
    model = ServedModel(names=(MODEL,), tokenizer=Tokenizer.from_folder(folder))
    hasty = create_app(engine, model, limits=ServerLimits(request_seconds=0.2))
    fast = mock.patch.object(StepTimeModel, "seconds", return_value=0.0)
    patient = mock.patch.object(loading, "_MOST_SECONDS", 600)
    with fast, patient, running(app) as address, running(hasty) as other:
        yield Served(engine, address, other)
    engine.close()


def closed(served: Served, waits: Callable[[], None]) -> None:
    host, port = served.address.removeprefix("http://").split(":")
    sent = json.dumps(FIRST).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=240) as connection:
        connection.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        waits()


def timed_out(served: Served, waits: Callable[[], None]) -> None:
    before = served.num_loads()

    def ask() -> set[int]:
        """A request whose time is over before its load begins is sent again."""
        found = set[int]()
        while served.num_loads() == before:
            found.add(httpx.post(served.hasty + PATH, json=FIRST, timeout=240).status_code)
        return found

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        waits()
        assert answer.result() == {504}


def aborted(served: Served, waits: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.ask, FIRST)
        waits()
        for path, options in (("pause", {"mode": "abort"}), ("resume", {})):
            httpx.post(f"{served.address}/{path}", json=options, timeout=240).raise_for_status()
        assert answer.result()[0][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("end", [closed, timed_out, aborted])
def test_a_request_that_ends_while_the_disk_is_slow_gives_its_blocks_back(
    served: Served, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None]
) -> None:
    expected, _ = served.ask(FIRST)
    served.evict()
    go, get = threading.Event(), DiskStore.get

    def slow(store: DiskStore, keys: list[bytes]) -> list[bytes]:
        assert go.wait(600)
        return get(store, keys)

    monkeypatch.setattr(DiskStore, "get", slow)
    before = served.num_loads()

    def waits() -> None:
        wait_until(lambda: served.num_loads() > before)
        served.ask(body(30, next(SEEDS)))

    end(served, waits)
    wait_until(lambda: not served.engine.control.stats()["blocks_in_use"])
    served.ask(body(30, next(SEEDS)))
    go.set()
    assert served.ask(FIRST) == (expected, 144)
