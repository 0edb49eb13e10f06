"""Begins to send weights to a server, and waits in the middle of a chunk for its end."""

from __future__ import annotations

import http.client
import sys
import time
import urllib.parse
from pathlib import Path

import httpx
from safetensors.torch import load_file, save


def main(address: str, weights: Path) -> None:
    tensors = list(load_file(weights).items())
    headers = {"Content-Type": "application/octet-stream"}
    whole, path = save(dict(tensors[:3])), ""
    with httpx.Client(base_url=address, timeout=240) as client:
        is_taken = False
        while not is_taken:  # On a busy machine the update may time out before its first chunk.
            begun = client.post("/weights/begin", json={"timeout": 1}).json()
            path = f"/weights/chunk?update_id={begun['update_id']}"
            is_taken = client.post(path, content=whole, headers=headers).is_success
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(address).netloc)
    data = save(dict(tensors[3:6]))
    connection.putrequest("POST", path)
    connection.putheader("Content-Type", "application/octet-stream")
    connection.putheader("Content-Length", str(len(data)))
    connection.endheaders(data[: len(data) // 2])
    print("half a chunk is sent", flush=True)
    time.sleep(600)


main(sys.argv[1], Path(sys.argv[2]))
