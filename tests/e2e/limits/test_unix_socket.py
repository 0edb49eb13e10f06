"""`--uds`: who may connect, what may lie at the path, and that its clients administer nothing."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import openai
import pytest

from prefixcache.exceptions import FieldError
from prefixcache.server.http.listener import listening
from prefixcache.server.jobs.context import Lifecycle
from prefixcache.server.options.serve_options import ServeOptions
from prefixcache.server.serve import Server
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.serving import MODEL, FakeEngine, fake_app, says
from support.tiny_models import save_tokenizer


@contextmanager
def _serving(path: Path, tokenizer: Tokenizer) -> Generator[None, None, None]:
    app = fake_app(FakeEngine(lambda request: says(request, "hi")), tokenizer)
    server = Server(app, ServeOptions(), Lifecycle())
    server.capture_signals = nullcontext
    with listening(ServeOptions(uds=path)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield
        server.stop()
        thread.join()


def test_clients_use_the_socket_and_it_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    save_tokenizer(tmp_path)
    _bind(path).close()  # as a server leaves it that was killed
    with _serving(path, Tokenizer.from_folder(tmp_path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=240) as http:
            client = openai.OpenAI(
                base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
            )
            answer = client.completions.create(model=MODEL, prompt="x", max_tokens=3)
            assert answer.choices[0].text == "hi"
            assert http.post("/reset_prefix_cache").status_code == 403
        with pytest.raises(FieldError, match="uds names a socket that another process listens"):
            listening(ServeOptions(uds=path)).__enter__()
    assert not path.exists()


def _bind(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.bind(str(path))
    return found


def test_the_file_is_left_alone_once_it_is_anothers(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    options = ServeOptions(uds=path, uds_permissions="0660")
    with listening(options):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        path.unlink()
        with _bind(path):
            pass
    assert path.exists()


def _file(path: Path) -> None:
    path.write_text("precious")


def _link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("make", [_file, Path.mkdir, os.mkfifo, _link])
def test_what_is_no_socket_is_not_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "socket"
    make(path)
    with pytest.raises(FieldError, match=r"uds names a path for a socket") as raised:
        listening(ServeOptions(uds=path)).__enter__()
    assert raised.value.field == "uds"
    assert os.path.lexists(path)


@pytest.mark.parametrize("name", ["none/socket", "x" * 200, "a\0b"])
def test_a_path_that_cannot_be_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(FieldError, match="uds cannot listen on"):
        listening(ServeOptions(uds=tmp_path / name)).__enter__()


@pytest.mark.parametrize("text", ["6660", "68", "rw-------", ""])
def test_permissions_are_octal(text: str) -> None:
    with pytest.raises(FieldError, match="uds_permissions must be three octal digits"):
        ServeOptions(uds_permissions=text)
