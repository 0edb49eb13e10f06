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

    Raises as the hub's client does, and `ModelLoadError` for what is no object.
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(repo_id, name, revision=revision)
    response = get_session().get(url, headers=build_hf_headers())
    hf_raise_for_status(response)
    found = json.loads(response.content)
    if not isinstance(found, dict):
        raise ModelLoadError(f"{name} of {repo_id} holds no JSON object.")
    return cast("dict[str, Any]", found)


class _Ranges:
    """A file's bytes from its start, asked for when they are read; slices only."""

    def __init__(self, repo_id: str, name: str, revision: str | None) -> None:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        self._url = hf_hub_url(repo_id, name, revision=revision)
        self._session: Any = get_session()
        self._headers = build_hf_headers()
        self._data = bytearray()
        self._next_bytes = _FIRST_BYTES
        self._size = 0
        self._fetch()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        while len(self._data) < part.stop:
            self._fetch()
        return bytes(self._data[part])

    def _fetch(self) -> None:
        from huggingface_hub.utils import hf_raise_for_status

        start = len(self._data)
        wanted = f"bytes={start}-{start + self._next_bytes - 1}"
        headers = self._headers | {"Range": wanted, "Accept-Encoding": "identity"}
        with self._session.stream("GET", self._url, headers=headers) as response:
            hf_raise_for_status(response)
            match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if response.status_code != 206 or match is None:
                raise OSError(f"{self._url} cannot be read in parts")
            self._size = int(match[1])
            found = response.read()
        if not found:
            raise OSError(f"{self._url} ends before its size")
        self._data += found
        self._next_bytes = min(2 * self._next_bytes, _MOST_BYTES)
