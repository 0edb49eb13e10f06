"""What stands for the content of weight files."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from prefixcache_store import Store
from prefixcache_store.weights import model_digest, weights_digest


def write_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_weights_are_read_again_only_if_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixcache_store.weights._CLOCK_TICK_NS", -1)
    model, notes = write_model(tmp_path / "model"), tmp_path / "notes.json"
    digest = weights_digest(model, notes)
    noted = json.loads(notes.read_text())
    false_notes = {path: [*note[:-1], "not read"] for path, note in noted.items()}
    notes.write_text(json.dumps(false_notes))
    believed = weights_digest(model, notes)
    assert believed != digest
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert weights_digest(model, notes) not in (digest, believed)
    for damaged in ("", "[1]", "{", '{"a": 1}'):
        notes.write_text(damaged)
        assert weights_digest(write_model(model), notes) == digest


def test_notes_that_a_kill_left_go_with_the_next_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "values"
    Store(folder, 1 << 20).close()
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=OSError("killed")))
    weights_digest(write_model(tmp_path / "model"), folder / "weights.json")
    assert len([*folder.iterdir()]) == 2
    Store(folder, 1 << 20).close()
    assert [file.name for file in folder.iterdir()] == ["lock"]


def test_weights_of_the_hubs_cache_are_not_read(tmp_path: Path) -> None:
    cache = tmp_path / "models--somebody--model"
    for folder in ("blobs", "refs", "snapshots"):
        (cache / folder).mkdir(parents=True)
    blob = cache / "blobs" / ("ab" * 32)
    blob.write_bytes(b"unread")
    model = write_model(cache / "snapshots" / ("c" * 40))
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(blob)
    (cache / "refs" / "main").write_text(model.name)
    notes = tmp_path / "notes.json"
    digest = weights_digest(model, notes)
    blob.write_bytes(b"other")
    assert model_digest("somebody/model", None, str(tmp_path), "auto", notes) == digest


@pytest.mark.parametrize(
    ("model", "load_format", "said"),
    [
        ("model", "auto", "no weight files"),
        ("model", "dummy", "They are random"),
        ("nobody/nothing", "auto", "weights of nobody/nothing"),
    ],
)
def test_what_no_file_stands_for_is_refused(
    model: str, load_format: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (write_model(tmp_path / "model") / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=said):
        model_digest(model, None, str(tmp_path), load_format, tmp_path / "notes.json")
