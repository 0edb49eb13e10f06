"""Models of the hub, over a loopback server that has its file list, ranges and redirects."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load, save

from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ModelLoadError, UnsupportedModelError
from prefixcache.models import hub
from prefixcache.models.gguf import remote
from prefixcache.models.gguf.choice import choose
from prefixcache.models.hub import resolve_model
from prefixcache.models.loader import check_weights
from prefixcache.models.weights import read_folder
from support.tiny_gguf import write_gguf
from support.tiny_models import make_checkpoint, make_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MEGABYTE = 1 << 20


class Hub(ThreadingHTTPServer):
    """Repositories of files by name; `sent` counts the bytes of answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.sent = 0
        self.asked: list[tuple[str, str, str | None]] = []
        self.refusal = 0
        self.ignores_ranges = False
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The part of the hub's API that fetches models. Files of weights are elsewhere."""

    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.split("?")[0].lstrip("/")
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        if self.server.refusal:
            self._send(self.server.refusal, b'{"error": "for a reason"}', {})
        elif match := re.fullmatch(r"api/models/([^/]+/[^/]+)(/revision/.+)?", path):
            self._list(match[1])
        elif match := re.fullmatch(rf"api/models/([^/]+/[^/]+)/tree/{COMMIT}", path):
            files = self.server.repos[match[1]].items()
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": name}
                for name, content in files
            ]
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        elif match := re.fullmatch(r"(elsewhere/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.server.repos.get(match[2], {}).get(match[3])
            if content is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            elif match[1] or not match[3].endswith((".gguf", ".safetensors")):
                self._file(content)
            else:
                self._elsewhere(path, content)
        else:
            self._send(404, b"", {})

    def _list(self, repo: str) -> None:
        files = self.server.repos.get(repo)
        if files is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": name} for name in files]
        listed = {"id": repo, "sha": COMMIT, "siblings": siblings}
        self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _elsewhere(self, path: str, content: bytes) -> None:
        about = self._about(content)
        self._send(
            302,
            b"",
            {
                "Location": f"{self.server.url}/elsewhere/{path}",
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": about["ETag"],
                "X-Linked-Size": str(len(content)),
            },
        )

    def _file(self, content: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or self.server.ignores_ranges:
            self._send(200, content, self._about(content))
            return
        start = int(asked[1])
        part = content[start : int(asked[2]) + 1 if asked[2] else None]
        place = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"}
        self._send(206, part, self._about(content) | place)

    def _about(self, content: bytes) -> dict[str, str]:
        return {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            with suppress(ConnectionError):  # Who has read enough hangs up.
                for start in range(0, len(body), MEGABYTE):
                    self.wfile.write(body[start : start + MEGABYTE])
                    self.server.sent += len(body[start : start + MEGABYTE])


@pytest.fixture
def server() -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def loopback(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The server as the hub, with caches of its own."""
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    return server


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("file") / "tiny.gguf", make_model("smollm2"))


def split(file: Path, folder: Path, count: int) -> list[Path]:
    """The file as llama.cpp's gguf-split writes it: metadata first, tensors in turn after it."""
    import gguf

    reader, tensors = gguf.GGUFReader(file), gguf.GGUFReader(file).tensors
    parts = [folder / f"{file.stem}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        for key, one in reader.fields.items() if number == 0 else ():
            if not key.startswith(("GGUF.", "general.architecture")):
                kind = one.types[0]
                inner = one.types[1] if len(one.types) > 1 else None
                writer.add_key_value(key, one.contents(), kind, inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for tensor in tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def weights(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor."""
    names = check_weights(ModelConfig.from_hf(folder), folder)
    return {
        one.name: getattr(one.tensor, "blocks", one.tensor).tobytes()
        for one in read_folder(folder, names)
    }


def test_a_quantization_is_taken_from_a_repository_of_gguf_files(loopback, file, caplog):
    content = file.read_bytes()
    names = ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "tiny-UD-Q4_K_M.gguf", "mmproj-F16.gguf")
    loopback.repos["owner/tiny-GGUF"] = dict.fromkeys(names, content) | {"config.json": b"{}"}
    with caplog.at_level(logging.INFO, "prefixcache"):
        folder = resolve_model("owner/tiny-GGUF:q8_0")
    assert "Of owner/tiny-GGUF the GGUF file tiny-Q8_0.gguf is taken" in caplog.text
    assert folder.name.startswith("tiny-Q8_0-")
    assert ModelConfig.from_hf(folder).num_layers == 2
    fetched = {path.rpartition("/")[2] for _, path, _ in loopback.asked if "resolve" in path}
    assert fetched == {"tiny-Q8_0.gguf"}
    with caplog.at_level(logging.INFO, "prefixcache"):
        resolve_model("owner/tiny-GGUF")
    assert "tiny-Q4_K_M.gguf is taken" in caplog.text
    assert resolve_model("owner/tiny-GGUF:tiny-UD-Q4_K_M.gguf").is_dir()
    with pytest.raises(ModelLoadError, match=r"no GGUF file for 'Q2_K'\. GGUF files: tiny-Q4_K_M"):
        resolve_model("owner/tiny-GGUF:Q2_K")


def test_a_later_start_reads_no_file_and_needs_no_hub(loopback, file, monkeypatch):
    loopback.repos["owner/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": file.read_bytes()}
    first = resolve_model("owner/tiny-GGUF")
    loopback.asked.clear()
    assert resolve_model("owner/tiny-GGUF") == first
    assert [command for command, _, _ in loopback.asked if command == "GET"] == ["GET"]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert resolve_model("owner/tiny-GGUF") == first
    assert resolve_model("owner/tiny-GGUF:Q4_K_M") == first
    with pytest.raises(ModelLoadError, match=r"^Cannot fetch a/b from the hub: .* GGUF file.*$"):
        resolve_model("a/b")


def test_a_split_file_is_the_model_of_the_whole_one(loopback, file, tmp_path):
    parts = split(file, tmp_path, 3)
    whole = weights(resolve_model(str(file)))
    for name in (parts[1], tmp_path):
        folder = resolve_model(str(name))
        assert folder.name.startswith("tiny-")
        assert weights(folder) == whole
    loopback.repos["owner/big-GGUF"] = {f"Q4_K_M/{part.name}": part.read_bytes() for part in parts}
    from_hub = resolve_model("owner/big-GGUF")
    assert from_hub == folder
    loopback.repos["owner/big-GGUF"].popitem()
    with pytest.raises(ModelLoadError, match=r"split in 3 parts, there is: .*00002-of-00003"):
        resolve_model("owner/big-GGUF")
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match="split in 3 parts"):
        resolve_model(str(parts[0]))


def test_a_checkpoint_is_fetched_after_its_config_was_read(loopback, tmp_path):
    source = make_checkpoint(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    loopback.repos["owner/tiny"] = files | {"README.md": b"x"}
    folder = resolve_model("owner/tiny", "main")
    assert ModelConfig.from_hf(folder) == ModelConfig.from_hf(source)
    assert {path.name for path in folder.iterdir()} == files.keys()


def checkpoint(folder: Path) -> dict[str, bytes]:
    """A checkpoint in two files with weights, an index and a file that nothing needs."""
    source = make_checkpoint(folder)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    tensors = load(files.pop("model.safetensors"))
    shards = {"model-1.safetensors": dict[str, Any](), "model-2.safetensors": dict[str, Any]()}
    weight_map = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(tensors)}
    for name, shard in weight_map.items():
        shards[shard][name] = tensors[name]
    index = {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}
    weights = {name: save(part, {"format": "pt"}) for name, part in shards.items()}
    return files | index | weights | {"README.md": b"x"}


UNREACHABLE = -1


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, UNREACHABLE])
def test_a_complete_copy_starts_without_the_hub(
    loopback, file, tmp_path, monkeypatch, caplog, status
):
    loopback.repos["owner/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": file.read_bytes()}
    loopback.repos["owner/tiny"] = checkpoint(tmp_path / "source")
    names = ["owner/tiny", "owner/tiny-GGUF", "owner/tiny-GGUF:Q4_K_M"]
    folders = [resolve_model(name) for name in names]
    if status == UNREACHABLE:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    else:
        loopback.refusal = status
    assert [resolve_model(name) for name in names] == folders
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    reason = "refused" if status == UNREACHABLE else str(status)
    said = [text for text in warnings if re.match(r"The copy of .* is used: .*" + reason, text)]
    assert len(said) == len(names)
    for absent in ("owner/tiny-GGUF:Q2_K", "owner/other"):
        with pytest.raises(
            ModelLoadError, match=f"Cannot fetch owner/.*{reason}.*No complete copy"
        ):
            resolve_model(absent)


@pytest.mark.parametrize(
    "missing",
    ["config.json", "tokenizer.json", "model.safetensors.index.json", "model-2.safetensors"],
)
@pytest.mark.parametrize("hub_lists_its_files", [False, True])
def test_an_incomplete_copy_ends_with_what_the_hub_says(
    loopback, tmp_path, missing, hub_lists_its_files
):
    loopback.repos["owner/tiny"] = checkpoint(tmp_path / "source")
    folder = resolve_model("owner/tiny")
    (folder / missing).unlink()
    if not hub_lists_its_files:
        for listing in folder.parents[1].glob("trees/*"):
            listing.unlink()
    loopback.refusal = 429
    with pytest.raises(ModelLoadError, match=r"Cannot fetch owner/tiny.*429.*No complete copy"):
        resolve_model("owner/tiny")


QUANTIZERS = [
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, r"fp8 \(e4m3\)"),
    ({"quant_method": "awq", "bits": 4}, r"awq \(4 bits\)"),
    ({"quant_method": "gptq", "bits": 4}, r"gptq \(4 bits\)"),
    (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        r"compressed-tensors \(pack-quantized\)",
    ),
    ({"quant_method": "mxfp4"}, "mxfp4"),
]


@pytest.mark.parametrize(("quantization", "said"), QUANTIZERS)
def test_quantized_safetensors_are_refused_before_they_are_fetched(
    loopback, tmp_path, quantization, said
):
    config = json.loads((make_checkpoint(tmp_path / "source") / "config.json").read_text())
    loopback.repos["owner/tiny"] = {
        "config.json": json.dumps(config | {"quantization_config": quantization}).encode(),
        "model.safetensors": bytes(8 * MEGABYTE),
    }
    with pytest.raises(UnsupportedModelError, match=rf"by {said} .*GGUF.*Q4_K_M"):
        resolve_model("owner/tiny")
    assert loopback.sent < MEGABYTE


@pytest.mark.parametrize("config", [b"[]", b'"/etc"', b"7"])
def test_a_configuration_that_is_no_object_is_refused_by_name(loopback, config: bytes) -> None:
    loopback.repos["owner/tiny"] = {"config.json": config, "model.safetensors": b""}
    with pytest.raises(ModelLoadError, match=r"config\.json of owner/tiny .*JSON object"):
        resolve_model("owner/tiny")


@pytest.mark.parametrize("size", [1 << 10, 80 * MEGABYTE])
def test_a_server_that_sends_whole_files_is_not_read_whole(loopback, file, size):
    loopback.ignores_ranges = True
    loopback.repos["owner/tiny-GGUF"] = {"tiny-Q8_0.gguf": file.read_bytes()[:size] + bytes(size)}
    with pytest.raises(ModelLoadError, match=r"more than 65536 bytes|read in parts"):
        resolve_model("owner/tiny-GGUF")
    loopback.repos["owner/tiny"] = {"config.json": b" " * size + b"[", "model.safetensors": b""}
    with pytest.raises(ModelLoadError, match=r"more than 16777216 bytes|no JSON obj"):
        resolve_model("owner/tiny")
    assert loopback.sent < 60 * MEGABYTE


def test_an_error_without_an_end_is_not_read(loopback, monkeypatch):
    files = {"config.json": b"{}", "model.safetensors": b""}
    loopback.repos["owner/tiny"] = files
    monkeypatch.setattr(Handler, "_file", lambda self, _: self._send(500, bytes(80 << 20), {}))
    with pytest.raises(ModelLoadError, match=r"Cannot fetch owner/tiny.*500"):
        resolve_model("owner/tiny")
    assert loopback.sent < 60 * MEGABYTE


def test_a_header_without_an_end_is_read_to_a_bound(loopback, monkeypatch):
    """It says that its first name has 2^40 bytes, and the server that the file has more."""
    monkeypatch.setattr(remote, "_MOST_HEADER_BYTES", MEGABYTE)
    begin = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 40)
    monkeypatch.setattr(
        Handler,
        "_file",
        lambda self, _: self._send(
            206, begin, {"Content-Range": f"bytes 0-{len(begin) - 1}/{1 << 50}"}
        ),
    )
    loopback.repos["owner/tiny-GGUF"] = {"tiny-Q8_0.gguf": b""}
    with pytest.raises(ModelLoadError, match="its header has more than 1 MiB"):
        resolve_model("owner/tiny-GGUF")


def bad_architecture(content: bytes) -> bytes:
    return content.replace(b"llama", b"lalma", 1)


def bad_file_type(content: bytes) -> bytes:
    key = b"general.file_type" + struct.pack("<II", 4, 7)
    assert key in content
    return content.replace(key, key[:-4] + struct.pack("<I", 19), 1)


def bad_tensor(content: bytes) -> bytes:
    place = content.index(b"blk.1.ffn_down.weight") + len(b"blk.1.ffn_down.weight") + 20
    return content[:place] + struct.pack("<I", 21) + content[place + 4 :]


def without_heads(content: bytes) -> bytes:
    key = b"attention.head_count" + struct.pack("<I", 4)
    return content.replace(key + struct.pack("<I", 4), key + struct.pack("<I", 0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (bad_architecture, "architecture 'lalma' is not supported"),
        (bad_file_type, "its quantization is IQ2_XXS. Supported: F32"),
        (bad_tensor, "tensor blk.1.ffn_down.weight is IQ3_S. Supported: F32"),
        (lambda content: content[4:], "is broken: it does not begin with GGUF"),
        (lambda content: content.replace(b"block_count", b"clock_count"), "lacks llama.block_coun"),
        (without_heads, "is broken: .*zero"),
    ],
)
def test_a_gguf_file_is_refused_by_its_header(loopback, tmp_path, change, said):
    model = make_model("smollm2")
    content = change(write_gguf(tmp_path / "tiny.gguf", model).read_bytes())
    loopback.repos["owner/tiny-GGUF"] = {"tiny-Q8_0.gguf": content + bytes(8 * MEGABYTE)}
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=f"tiny-Q8_0.gguf .*{said}"):
        resolve_model("owner/tiny-GGUF")
    assert loopback.sent < MEGABYTE
    asked = [found for _, path, found in loopback.asked if path.startswith("elsewhere/")]
    assert len(asked) == 1
    assert not list((hub.cache_home() / "models").glob("*"))


def test_the_endpoint_is_that_of_the_environment(server: Hub, file: Path, tmp_path: Path) -> None:
    server.repos["owner/tiny-GGUF"] = {"tiny-Q8_0.gguf": file.read_bytes()}
    folders = {"HF_HOME": str(tmp_path / "hf"), "PREFIXCACHE_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "prefixcache", "download", "owner/tiny-GGUF:Q8_0"]
    done = subprocess.run(
        command,
        env=os.environ | folders | {"HF_ENDPOINT": server.url},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).name.startswith("tiny-Q8_0-")


@pytest.mark.parametrize(
    ("names", "wanted", "taken"),
    [
        (["a-Q8_0.gguf", "a-UD-Q4_K_XL.gguf"], None, ["a-UD-Q4_K_XL.gguf"]),
        (["a-Q8_0.gguf", "a-Q3_K_M.gguf"], None, ["a-Q8_0.gguf"]),
        (["odd.gguf"], None, ["odd.gguf"]),
        (["a-Q4_K_S.gguf", "a-Q4_K.gguf"], "Q4_K", ["a-Q4_K.gguf"]),
        (["a-UD-Q4_K_XL.gguf", "a-Q4_K_XL.gguf"], "ud-q4_k_xl", ["a-UD-Q4_K_XL.gguf"]),
        (["x/a-F16-00001-of-00002.gguf", "x/a-F16-00002-of-00002.gguf"], "F16", None),
        (["x/a-F16.gguf", "a-F16.gguf"], "a-F16.gguf", ["a-F16.gguf"]),
    ],
)
def test_names_say_which_file_is_taken(names, wanted, taken):
    assert choose(names, wanted) == (taken or names)
