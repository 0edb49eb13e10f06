"""A server of a tiny model, one for each module that asks for it, clients, and a tokenizer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.serving import client_of, running, serve_folder
from support.tiny_models import save_tokenizer


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    """Of `serve_folder`; a module whose server has others replaces this fixture."""
    return {}


@pytest.fixture(scope="module")
def app(
    tiny_checkpoint: Callable[..., Path], options: dict[str, Any]
) -> Generator[Any, None, None]:
    app, engine = serve_folder(tiny_checkpoint(), **options)
    yield app
    engine.close()


@pytest.fixture(scope="module")
def address(app: Any) -> Generator[str, None, None]:
    """Of the server on a port of loopback."""
    with running(app) as address:
        yield address


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """That of tiny models, for servers of no model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture
async def client(app: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with client_of(app) as client:
        yield client
