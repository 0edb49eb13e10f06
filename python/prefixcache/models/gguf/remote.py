"""What says which model a repository of the hub holds, read before its weights are fetched.

Of a GGUF file that is the header, read by ranges.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from prefixcache.exceptions import ModelLoadError
from prefixcache.models.gguf.folder import check_header, check_metadata, errors_of
from prefixcache.models.gguf.header import GgufHeader, parse_header

# Of a range; each is twice the one before. The first has what the file is, and not its vocabulary.
_FIRST_BYTES, _MOST_BYTES = 64 << 10, 4 << 20
_MOST_HEADER_BYTES = 256 << 20
_MOST_JSON_BYTES = 16 << 20
HUB_SECONDS = 60
"""How long the hub may send nothing."""
_CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


def check_remote(repo_id: str, names: list[str], revision: str | None) -> None:
    """Reads the headers of a file's parts, and nothing else of them.

    A model that is not supported is refused as soon as the header says so. Raises
    `UnsupportedModelError` for it, and `ModelLoadError` for a file that is no GGUF file.
    """
    headers: list[GgufHeader] = []
    for name in names:
        data = _Ranges(repo_id, name, revision)
        with errors_of(f"{name} of {repo_id}"):
            headers.append(parse_header(data, check_metadata if not headers else None))
    with errors_of(f"{names[0]} of {repo_id}"):
        check_header(headers)


def remote_json(repo_id: str, name: str, revision: str | None) -> dict[str, Any]:
    """What a JSON file of a repository says; it is not kept.

    Raises as the hub's client does, `OSError` for more than 16 MiB, and `ModelLoadError` for what
    is no object.
    """
    from huggingface_hub import hf_hub_url

    _, body = _answer(hf_hub_url(repo_id, name, revision=revision), _MOST_JSON_BYTES)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{name} of {repo_id} holds no JSON object.")
    return cast("dict[str, Any]", value)


def _answer(url: str, most: int, **headers: str) -> tuple[Any, bytes]:
    """The hub's response and its body. Raises `OSError` where that has more than `most` bytes."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import (
        build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
        hf_raise_for_status,
    )

    session: Any = get_session()
    # A body that is sent as it is has no more bytes than were read.
    sent = build_hf_headers() | {"Accept-Encoding": "identity"} | headers
    body = bytearray()
    with session.stream("GET", url, headers=sent, timeout=HUB_SECONDS) as response:
        if response.is_error:
            response.close()  # The hub's client would read all of its body.
        hf_raise_for_status(response)
        for part in response.iter_raw():
            body += part
            if len(body) > most:
                raise OSError(f"{url} sends more than {most} bytes")
    return response, bytes(body)


class _Ranges:
    """A file's bytes from its start, asked for when they are read; slices only."""

    def __init__(self, repo_id: str, name: str, revision: str | None) -> None:
        from huggingface_hub import hf_hub_url

        self._url = hf_hub_url(repo_id, name, revision=revision)
        self._data: bytearray = bytearray()
        self._next_bytes = _FIRST_BYTES
        self._size = 0
        self._fetch()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        if part.stop > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has more than {_MOST_HEADER_BYTES >> 20} MiB")
        while len(self._data) < part.stop:
            self._fetch()
        return bytes(self._data[part])

    def _fetch(self) -> None:
        start = len(self._data)
        wanted = f"bytes={start}-{start + self._next_bytes - 1}"
        response, body = _answer(self._url, self._next_bytes, Range=wanted)
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status_code != 206 or match is None:
            raise OSError(f"{self._url} cannot be read in parts")
        if not body:
            raise OSError(f"{self._url} ends before its size")
        self._size = int(match[1])
        self._data += body
        self._next_bytes = min(2 * self._next_bytes, _MOST_BYTES)
