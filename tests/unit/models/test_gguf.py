"""GGUF files as models: broken ones are refused by name, and folders agree with their file."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from prefixcache.config.model_config import ModelConfig
from prefixcache.exceptions import ModelLoadError, UnsupportedModelError
from prefixcache.models import arrays, digests, hub
from prefixcache.models.gguf.header import read_header
from prefixcache.models.gguf.index import INDEX_FILE, read_index
from prefixcache.models.hub import resolve_model
from prefixcache.models.names import TensorNames
from prefixcache.models.weights import check_folder, read_folder, shapes_of
from prefixcache.runner.torch.decoder_model import DecoderModel
from support.loaded import torch_model
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model

K_PROJ = "blk.1.attn_k.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", make_model("smollm2"))


@pytest.fixture
def file(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(whole.read_bytes())
    return copy


def load(folder: Path) -> DecoderModel:
    config = ModelConfig.from_hf(folder)
    return torch_model(folder, config=config)


def edited(file: Path, place: int, layout: str, value: float) -> None:
    data = bytearray(file.read_bytes())
    struct.pack_into(layout, data, place, value)
    file.write_bytes(data)


def field(file: Path, name: str, which: str) -> int:
    """Where a field of a matrix's description stands in the header."""
    described = struct.pack("<Q", len(name)) + name.encode()
    after = file.read_bytes().index(described) + len(described)
    return after + {"dimensions": 0, "inputs": 4, "outputs": 12, "type": 20, "offset": 24}[which]


@pytest.mark.parametrize(
    ("which", "layout", "value", "message"),
    [
        ("type", "<I", 21, f"tensor {K_PROJ} is IQ3_S. Supported: F32, F16, BF16, Q4_0"),
        ("type", "<I", 35, f"tensor {K_PROJ} is TQ2_0. Supported: .*IQ4_NL, IQ4_XS, MXFP4"),
        ("type", "<I", 999, f"tensor {K_PROJ} is of the unknown type 999. Supported"),
        ("type", "<I", 12, f"tensor {K_PROJ} has rows of 64 numbers, no multiple of Q4_K's 256"),
        ("type", "<I", 0, f"tensors {K_PROJ} and .* overlap"),
        ("dimensions", "<I", 0, f"tensor {K_PROJ} has 0 dimensions"),
        ("dimensions", "<I", 2**31, f"tensor {K_PROJ} has 2147483648 dimensions"),
        ("inputs", "<Q", 65, f"tensor {K_PROJ} has rows of 65 numbers, no multiple of Q8_0's 32"),
        ("outputs", "<Q", 0, f"tensor {K_PROJ} is empty"),
        ("outputs", "<Q", 2**62, f"tensor {K_PROJ} needs the bytes .* but the file has"),
        ("offset", "<Q", 2**63, f"tensor {K_PROJ} needs the bytes .* but the file has"),
        ("offset", "<Q", 4, f"tensor {K_PROJ} does not begin at a multiple of 8 bytes"),
        ("offset", "<Q", 0, "overlap"),
    ],
)
def test_a_broken_description_names_file_and_tensor(file, which, layout, value, message):
    edited(file, field(file, K_PROJ, which), layout, value)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=rf"tiny\.gguf: .*{message}"):
        resolve_model(str(file))
    assert list((hub.cache_home() / "models").iterdir()) == []


def test_every_truncation_is_found(file: Path) -> None:
    data = file.read_bytes()
    described = field(file, K_PROJ, "type")
    for kept in [*range(0, described, described // 50), described, len(data) - 1]:
        file.write_bytes(data[:kept])
        with pytest.raises(ModelLoadError, match=r"GGUF file .*tiny\.gguf"):
            read_header(file)


def test_the_header_is_read_as_the_gguf_package_reads_it(file: Path) -> None:
    from gguf import GGUFReader

    header, theirs = read_header(file), GGUFReader(file)
    values = {key: one.contents() for key, one in theirs.fields.items() if "GGUF." not in key}
    assert header.metadata == values
    assert [(t.name, t.format, t.shape, t.start, t.nbytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist())[::-1], t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]


def test_another_architecture_is_refused_by_name(file: Path) -> None:
    file.write_bytes(
        file.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba")
    )
    with pytest.raises(
        UnsupportedModelError, match=r"tiny\.gguf: architecture 'mamba'.*llama, mistral3"
    ):
        resolve_model(str(file))


def test_metadata_without_sense_names_the_file(file: Path) -> None:
    key = b"llama.attention.head_count"
    described = struct.pack("<Q", len(key)) + key
    edited(file, file.read_bytes().index(described) + len(described) + 4, "<I", 0)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is broken: .*zero"):
        resolve_model(str(file))


def test_a_scale_that_is_no_number_names_file_and_tensor(file: Path) -> None:
    tensor = next(one for one in read_header(file).tensors if one.name == "blk.0.ffn_up.weight")
    edited(file, tensor.start + 34 * 2 * 5, "<e", np.nan)  # two blocks a row
    with pytest.raises(
        ModelLoadError, match=r"mlp\.up_proj\.weight in .*tiny\.gguf: .*row 5 has a scale"
    ):
        load(resolve_model(str(file)))


def test_a_file_that_changed_is_another_model(file: Path) -> None:
    first = resolve_model(str(file))
    stat = file.stat()
    edited(file, len(file.read_bytes()) - 40, "<I", 7)
    assert file.stat().st_size == stat.st_size
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is not the one that"):
        load(first)
    second = resolve_model(str(file))
    assert second != first
    assert load(second)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is not the one that"):
        load(first)


def test_a_file_that_was_only_touched_or_moved_is_the_same_model(file: Path) -> None:
    folder = resolve_model(str(file))
    os.utime(file, (1, 1))
    assert load(folder)
    moved = file.rename(file.with_name("moved.gguf"))
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf cannot be read"):
        load(folder)
    file.symlink_to(moved)
    assert resolve_model(str(file)).name.startswith("moved-")
    moved.rename(file)
    assert resolve_model(str(file)) == folder
    assert load(folder)


def test_a_digest_is_remembered_until_the_file_changes(file, monkeypatch):
    computed: list[Path] = []
    compute = digests.compute_blake3

    def count(path: Path) -> str:
        computed.append(path)
        return compute(path)

    monkeypatch.setattr(digests, "compute_blake3", count)
    found = [digests.file_digest(file) for _ in range(2)]
    assert found == [compute(file)] * 2
    assert len(computed) == 1
    for change in range(20):  # as fast as one can
        edited(file, 100, "<I", change)
        assert digests.file_digest(file) == compute(file)
    (note,) = (hub.cache_home() / "digests").iterdir()
    for broken in (
        b"",
        b"[]",
        b"\xff",
        b'{"state": 3}',
        note.read_bytes().replace(b"tiny", b"ynit"),
    ):
        note.write_bytes(broken)
        assert digests.file_digest(file) == compute(file)
    assert len(computed) == 1 + 20 + 5


def test_without_a_place_to_remember_a_digest_is_still_right(file, tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file, where a folder is wanted")
    assert digests.file_digest(file) == digests.compute_blake3(file)


BREAKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda index: index.update(version=99), "its version is 99, not 1"),
    "no tensors": (lambda index: index.pop("tensors"), "KeyError"),
    "tensors are a list": (lambda index: index.update(tensors=[]), "AttributeError"),
    "outside": (lambda index: first(index).update(offset=1 << 40), "lies outside of the file"),
    "negative": (lambda index: first(index).update(offset=-8), "lies outside of the file"),
    "crooked": (lambda index: first(index).update(offset=3), "multiple of 8"),
    "shape": (lambda index: first(index).update(shape=[1 << 40, 32]), "lies outside of the file"),
    "format": (lambda index: first(index).update(format="Q2_K"), "Q2_K"),
    "heads": (lambda index: first(index).update(paired_heads=7), "no whole pairs of rows"),
    "unknown field": (lambda index: first(index).update(x=1), "TypeError"),
    "size": (lambda index: index.update(size=index["size"] + 8), "is not the one that"),
    "missing": (lambda index: index["tensors"].popitem(), "The weights in .* lack"),
    "extra": (lambda index: index["tensors"].update(x=first(index)), "unexpected tensor x"),
    "misshapen": (lambda index: first(index).update(shape=[1, 32]), "configuration needs"),
}


def first(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def converted(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DecoderModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFIXCACHE_HOME", str(tmp_path_factory.mktemp("home")))
        folder = resolve_model(str(whole))
        return folder, load(folder)


@pytest.mark.parametrize("name", BREAKS)
def test_an_index_that_does_not_fit_is_refused(converted, tmp_path, name):
    folder, model = converted
    break_it, message = BREAKS[name]
    index = json.loads((folder / INDEX_FILE).read_text())
    break_it(index)
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    (tmp_path / "model.gguf").symlink_to(folder / "model.gguf")
    with pytest.raises(ModelLoadError, match=message):
        check_folder(shapes_of(model.slots), tmp_path, model.names)


def test_an_index_of_an_earlier_version_names_a_sha256(converted, tmp_path):
    folder, model = converted
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["digest"]
    (tmp_path / "model.gguf").symlink_to(folder / "model.gguf")
    right = hub.compute_sha256(folder / "model.gguf")
    for index["sha256"] in (right, "0"):
        (tmp_path / INDEX_FILE).write_text(json.dumps(index))
        fails = pytest.raises(ModelLoadError, match="is not the one")
        with nullcontext() if index["sha256"] == right else fails:
            check_folder(shapes_of(model.slots), tmp_path, model.names)


def test_tensors_leave_memory_as_they_are_written(converted, monkeypatch):
    alive = weakref.WeakSet[mmap.mmap]()
    most = 0

    class Counted(mmap.mmap):
        def __new__(cls, *args: Any) -> Any:
            nonlocal most
            most = max(most, len(alive) + 1)
            memory = super().__new__(cls, *args)
            alive.add(memory)
            return memory

    monkeypatch.setattr(arrays.mmap, "mmap", Counted)
    load(converted[0])
    assert 0 < most <= 3  # the tensor before, this one, and its rows in another order
    assert not alive


def test_a_file_that_is_cut_while_it_is_read_is_named(file: Path) -> None:
    folder = resolve_model(str(file))
    index = read_index(folder)
    tensors = read_folder(folder, TensorNames(ModelConfig.from_hf(folder)))
    next(tensors)
    os.truncate(index.files[0], index.tensors[-1].offset + 1)
    with pytest.raises(ModelLoadError, match="it ends before byte"):
        list(tensors)


@pytest.mark.parametrize(
    ("writes", "error", "problem"),
    [
        (
            "hub._convert",
            OSError(errno.ENOSPC, "No space left on device"),
            r"No space left on device.*PREFIXCACHE_HOME names",
        ),
        (  # an error as the tokenizers package raises it
            "gguf.tokenizer._write",
            Exception("No space left on device (os error 28)"),
            r"tiny\.gguf: its tokenizer .*No space left",
        ),
    ],
)
def test_a_full_disk_leaves_nothing(file, monkeypatch, writes, error, problem):
    monkeypatch.setattr(f"prefixcache.models.{writes}", mock.Mock(side_effect=error))
    with pytest.raises(ModelLoadError, match=problem):
        resolve_model(str(file))
    assert list((hub.cache_home() / "models").iterdir()) == []


def test_what_a_killed_process_left_is_removed(file: Path) -> None:
    models = hub.cache_home() / "models"
    (models / ".partial-killed" / "model").mkdir(parents=True)
    folder = resolve_model(str(file))
    assert list(models.iterdir()) == [folder]
