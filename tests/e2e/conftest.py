"""A server of a tiny model, one for each module that asks for it, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.serving import client_of, serve_folder


@pytest.fixture(scope="module")
def app(tiny_checkpoint: Callable[..., Path]) -> Generator[Any, None, None]:
    app, engine = serve_folder(tiny_checkpoint())
    yield app
    engine.close()


@pytest.fixture
async def client(app: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with client_of(app) as client:
        yield client
