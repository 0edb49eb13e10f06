"""A checkpoint's digest is that of its tensors, whatever files they lie in, and of nothing else."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ModelLoadError
from prefixcache.models import digests
from prefixcache.models.checkpoint import model_digest, read_checkpoint
from prefixcache.models.hub import resolve_model
from reference.prefix_hashes import weights_digest
from support.tiny_gguf import write_gguf
from support.tiny_models import edit_config, make_model

Tensor = tuple[str, str, tuple[int, ...], bytes]
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_file(file: Path, tensors: list[Tensor]) -> None:
    """A file of safetensors, whose tensors lie in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, form, shape, content in tensors:
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": form, "shape": shape, "data_offsets": offsets}
        data += content
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + data)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    return tmp_path


def expected(tensors: list[Tensor]) -> str:
    return weights_digest(tensors).hex()


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    names = draw(
        st.lists(NAMES.filter(lambda name: name != "__metadata__"), unique=True, max_size=5)
    )
    shapes = [draw(SHAPES) for _ in names]
    seed = draw(st.integers(0, 2**32 - 1))
    pick = np.random.default_rng(seed)
    return [
        (name, "U8", shape, pick.bytes(int(np.prod(shape, dtype=int))))
        for name, shape in zip(names, shapes, strict=True)
    ]


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(all_tensors=tensors(), data=st.data())
def test_one_file_and_shards_have_the_digest_of_the_reference(home, all_tensors, data):
    folder = home / "shards"
    folder.mkdir(exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    write_file(folder / ONE_FILE, data.draw(st.permutations(all_tensors)))
    assert read_checkpoint(folder).digest == expected(all_tensors)
    places = {one[0]: data.draw(st.sampled_from("ab")) for one in all_tensors}
    for shard in set(places.values()):
        write_file(folder / shard, [one for one in all_tensors if places[one[0]] == shard])
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    assert read_checkpoint(folder, threads=3).digest == expected(all_tensors)


WHOLE: list[Tensor] = [("a", "F16", (2, 2), b"12345678"), ("b", "F16", (2,), b"abcd")]
OTHERS: dict[str, list[Tensor]] = {
    "a bit": [("a", "F16", (2, 2), b"12345679"), WHOLE[1]],
    "a shape": [("a", "F16", (4,), b"12345678"), WHOLE[1]],
    "a format": [("a", "BF16", (2, 2), b"12345678"), WHOLE[1]],
    "a name": [("c", "F16", (2, 2), b"12345678"), WHOLE[1]],
    "a tensor less": WHOLE[:1],
    "names swapped": [("b", *WHOLE[0][1:]), ("a", *WHOLE[1][1:])],
}


def test_whatever_is_another_tensor_is_another_digest(home: Path) -> None:
    found = {}
    for name, some in {"whole": WHOLE, **OTHERS}.items():
        write_file(home / ONE_FILE, some)
        found[name] = read_checkpoint(home).digest
        assert found[name] == expected(some), name
    assert len(set(found.values())) == len(found)


def test_weights_are_read_again_only_when_they_changed(home, monkeypatch):
    read: list[Path] = []
    compute = digests.hash_file_ranges

    def counted(file: Path, *args: Any) -> list[bytes]:
        read.append(file)
        return compute(file, *args)

    monkeypatch.setattr(digests, "hash_file_ranges", counted)
    file = home / ONE_FILE
    write_file(file, WHOLE)
    first = [read_checkpoint(home) for _ in range(3)]
    assert first == [first[0]] * 3
    assert len(read) == 1
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    write_file(file, OTHERS["a bit"])
    os.utime(file, ns=times)  # as a copy that keeps times does
    with pytest.raises(ModelLoadError, match="were changed while they were read"):
        first[0].check_unchanged()
    assert read_checkpoint(home).digest == expected(OTHERS["a bit"])
    assert len(read) == 2


def _header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


BROKEN = {
    "empty": b"",
    "a long header": struct.pack("<Q", 1 << 40),
    "no JSON": _header(b"{"),
    "a list": _header(b"[]"),
    "nested": _header(b"[" * 100_000),
    "no offsets": _header(b'{"a": {"dtype": "F16", "shape": [1]}}'),
    "backwards": _header(b'{"a": {"dtype": "F16", "shape": [1], "data_offsets": [2, 0]}}'),
    "too short": _header(b'{"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}'),
    "huge": _header(b'{"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 1e99]}}'),
    "a surrogate": _header(b'{"\\ud800": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(home: Path, name: str) -> None:
    (home / ONE_FILE).write_bytes(BROKEN[name])
    with pytest.raises(ModelLoadError, match="Cannot read the weight file"):
        read_checkpoint(home)


def test_a_gguf_file_is_the_same_under_any_name(home: Path) -> None:
    file = write_gguf(home / "tiny.gguf", make_model("smollm2"))
    first = read_checkpoint(resolve_model(str(file)))
    file.rename(home / "moved.gguf")
    assert read_checkpoint(resolve_model(str(home / "moved.gguf"))).digest == first.digest


def test_the_model_is_what_it_computes(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")

    def digest(**changes: Any) -> str:
        edit_config(folder, **changes)
        return model_digest(ModelConfig.from_hf(folder))

    first = digest()
    assert digest(eos_token_id=7, dtype="float32") == first
    assert digest(rms_norm_eps=0.5) != first


def test_a_field_that_a_model_does_not_use_leaves_its_digest_as_it_was() -> None:
    """Blocks that were stored before the field came are found again."""
    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    config = ModelConfig(architecture="LlamaForCausalLM", **sizes, **heads)
    assert model_digest(config).startswith("c6755efca5e27656")
    assert model_digest(replace(config, residual_scale=0.5)) != model_digest(config)


FEW_THREADS = """
import resource, sys
from prefixcache._core import hash_file_ranges
with open("/proc/self/statm") as file:
    pages = int(file.read().split()[0])
most = pages * resource.getpagesize() + 64 * 2**20  # room for some stacks of threads, not for 400
resource.setrlimit(resource.RLIMIT_AS, (most, most))
found = hash_file_ranges(sys.argv[1], [(i, i + 1) for i in range(400)], 400)
assert found == [hash_file_ranges(sys.argv[1], [(i, i + 1)], 1)[0] for i in range(400)]
"""


def test_where_the_system_gives_no_threads_those_that_there_are_do_it_all(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(200)) * 2)
    subprocess.run([sys.executable, "-c", FEW_THREADS, str(file)], check=True)
