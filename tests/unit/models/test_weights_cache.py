"""Weights laid out in the folder of `--weights-cache-dir`: who maps them, and damaged files."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from prefixcache._core import Cpu, PackedLinear
from prefixcache.cli.main import app
from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.build import build
from prefixcache.models import weights
from prefixcache.models.hub import resolve_model
from prefixcache.models.laid_out.weights_folder import Parts, WeightsCache, WeightsFolder
from prefixcache.runner.cpu import cpu_runner
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model
from unit.engine.test_state_engine import Said, answer, built, tokens

CPU = Cpu(1)
SIZES = {"q": 64, "k": 48}


def layers(seed: int | None = None) -> Parts:
    """Two parts of a layer, written with random numbers or never."""
    layer = PackedLinear(CPU, 32, sum(SIZES.values()), "float32", parts=list(SIZES.values()))
    if seed is not None:
        rows = np.random.default_rng(seed).standard_normal((112, 32)).astype(np.float32)
        layer.copy_rows(0, rows.ctypes.data, len(rows))
    return {"q": (layer, 0), "k": (layer, 64)}


def numbers(parts: Parts) -> np.ndarray[Any, Any]:
    out, ids = np.empty((112, 32), np.float32), np.arange(112)
    parts["q"][0].read_rows(ids.ctypes.data, 112, out.ctypes.data)
    return out


def restored(cache: WeightsCache, digest: str = "a") -> np.ndarray[Any, Any] | None:
    """The numbers that another process maps; None where it maps none."""
    parts = layers()
    names = cache.restore(digest, parts)
    assert names in ({*SIZES}, set())
    return numbers(parts) if names else None


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "weights", 1 << 30, 0, {"program": "p"}, 2)


def files(cache: WeightsCache) -> list[Path]:
    return sorted(cache.folder.iterdir())


def test_what_was_kept_is_mapped_by_the_same_facts_alone(cache, caplog):
    caplog.set_level(logging.INFO, "prefixcache")
    assert restored(cache) is None
    cache.keep("a", layers(1))
    (file,) = files(cache)
    assert (file.stat().st_mode & 0o777, cache.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert np.array_equal(restored(cache), numbers(layers(1)))
    assert f"weights mapped from {file} in" in caplog.text
    assert restored(cache, "b") is None
    assert restored(replace(cache, facts={"program": "other"})) is None
    before = file.stat().st_ino
    cache.keep("a", layers(2))
    assert file.stat().st_ino == before


def test_writing_a_mapped_weight_leaves_the_file_as_it_is(cache):
    cache.keep("a", layers(1))
    mapped, row = layers(), np.full((1, 32), 7, np.float32)
    cache.restore("a", mapped)
    mapped["k"][0].copy_rows(70, row.ctypes.data, 1)
    wanted = numbers(layers(1))
    wanted[70] = 7
    assert np.array_equal(numbers(mapped), wanted)
    assert np.array_equal(restored(cache), numbers(layers(1)))


def spoil() -> dict[str, Callable[[Path], object]]:
    def change(file: Path, place: int, content: bytes = b"?") -> None:
        with file.open("r+b") as data:
            data.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
            data.write(content)

    def link(file: Path) -> None:
        file.rename(file.parent.parent / "elsewhere")
        file.symlink_to(file.parent.parent / "elsewhere")

    return {
        "a weight": lambda file: change(file, 1000),
        "the table": lambda file: change(file, -100),
        "the version": lambda file: change(file, -1),
        "random": lambda file: file.write_bytes(os.urandom(20_000)),
        "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
        "cut by a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
        "empty": lambda file: os.truncate(file, 0),
        "open to others": lambda file: file.chmod(0o644),
        "link": link,
    }


@pytest.mark.parametrize("damage", [*spoil(), "another's"])
def test_a_damaged_file_is_not_mapped_and_written_again(damage, cache, caplog):
    cache.keep("a", layers(1))
    (file,) = files(cache)
    if damage == "another's":
        cache.keep("b", layers(2))
        (other,) = {*files(cache)} - {file}
        other.rename(file)
    else:
        spoil()[damage](file)
    assert restored(cache) is None
    assert f"Weights are laid out again, not from {file}: " in caplog.text
    cache.keep("a", layers(1))
    assert np.array_equal(restored(cache), numbers(layers(1)))


@pytest.mark.parametrize("what", ["a file", "a link", "open to others"])
def test_a_folder_that_is_not_the_users_own_is_not_used(what, cache, tmp_path, caplog):
    (tmp_path / "target").mkdir(mode=0o700)
    {
        "a file": lambda: cache.folder.write_text(""),
        "a link": lambda: cache.folder.symlink_to(tmp_path / "target"),
        "open to others": lambda: cache.folder.mkdir(mode=0o755),
    }[what]()
    assert restored(cache) is None
    cache.keep("a", layers(1))
    assert f"Weights are not kept laid out in {cache.folder}: " in caplog.text
    assert list((tmp_path / "target").iterdir()) == []


def test_a_full_disk_means_no_file(cache, caplog, monkeypatch):
    """A limit on the size of files stands for the disk's end."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        cache.keep("a", layers(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "are not kept laid out" in caplog.text
    assert files(cache) == []
    real = os.statvfs(cache.folder)
    few = os.statvfs_result((*real[:3], 1 << 30, (1 << 30) // real.f_frsize, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: few)
    cache.keep("a", layers(1))
    assert "its disk has too little room" in caplog.text
    assert files(cache) == []


def test_the_least_recently_used_go_first(cache, caplog):
    for digest in "abc":
        cache.keep(digest, layers(1))
        os.utime(cache._path(digest), (1000 + ord(digest),) * 2)
    assert restored(cache, "a") is not None
    size = sum(file.stat().st_blocks * 512 for file in files(cache))
    bounded = replace(cache, most_bytes=size + 1)
    bounded.keep("d", layers(1))
    assert [restored(cache, digest) is not None for digest in "abcd"] == [True, False, True, True]
    assert sum(file.stat().st_blocks * 512 for file in files(cache)) <= size
    replace(cache, most_bytes=1000).keep("e", layers(1))
    assert "--weights-cache-size has no room" in caplog.text
    replace(cache, least_bytes=1 << 30).keep("e", layers(1))
    assert restored(cache, "e") is None


def test_what_a_killed_process_left_is_removed_unless_it_is_being_written(cache):
    cache.keep("a", layers(1))
    with closing(WeightsFolder(cache.folder)) as folder:
        (cache.folder / "left-1.weights.new").write_bytes(b"half")
        (cache.folder / "left-1.weights.new").chmod(0o600)
        descriptor = folder.lock("written-2.weights.new", create=True)
        assert descriptor is not None
        cache.keep("b", layers(1))
        assert [file.suffix for file in files(cache)].count(".new") == 1
        os.close(descriptor)


def test_the_command_shows_checks_and_removes(cache, monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_HOME", str(cache.folder.parent))

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["cache", *arguments])
        return result.exit_code, result.output

    assert run("ls") == run("verify") == (0, ""), "nothing was kept yet: no file is listed"
    cache.keep("a", layers(1))
    (file,) = files(cache)
    assert f"{file.name}" in run("ls")[1]
    assert "2 weights; weights a, program p" in run("ls", str(cache.folder))[1]
    assert run("verify")[0] == 0
    with file.open("r+b") as data:
        data.write(b"?")
    code, text = run("verify")
    assert (code, "2 weights, 1 of them damaged" in text) == (1, True)
    assert run("rm", str(cache.folder), "no.weights")[0] == 1
    assert run("rm")[0] == 2, "a command that is not finished removed all"
    assert "removed" in run("rm", str(cache.folder))[1]
    assert files(cache) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file's: tied embeddings, and linears of two formats and of float16 numbers."""
    place = tmp_path_factory.mktemp("gguf")
    model = make_model("smollm2", hidden_size=256, intermediate_size=512, head_dim=64)
    file = write_gguf(place / "tiny.gguf", model, pre="smollm", formats=("Q4_K", "Q6_K", "F16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFIXCACHE_HOME", str(place / "home"))
        return resolve_model(str(file))


def started(folder: Path, **flags: object) -> tuple[Said, int, int]:
    """What a server says, and how many bytes of weights it reads and maps."""
    read: list[int] = []

    def read_bytes(stream: Any, start: int, length: int) -> Any:
        read.append(length)
        return real(stream, start, length)

    real = weights.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "read_bytes", read_bytes)
        config = EngineConfig.from_flags(model=str(folder), device="cpu", num_blocks=64, **flags)
        engine = build(config, folder)
    said, _ = answer(engine, tokens(70), num_tokens=8)
    mapped = engine.engine.metrics.registry.get_sample_value("prefixcache:weights_mapped_bytes")
    engine.engine.close()
    return said, sum(read), int(mapped or 0)


@pytest.mark.parametrize("flags", [{}, {"cpu_activations": "int8", "dtype": "bfloat16"}])
def test_the_next_start_says_the_same_and_reads_no_matrix(folder, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    flags = {**flags, "weights_cache_dir": str(tmp_path / "kept")}
    said, read, none = started(folder, **flags)
    again, small, mapped = started(folder, **flags)
    assert again == said
    assert small < read / 100
    assert (none, mapped > 20 * small) == (0, True)
    forms = [started(folder, **flags, cpu_instructions="portable") for _ in range(2)]
    assert forms[0][0] == forms[1][0]
    assert [one[1] for one in forms] == [read, small]


@pytest.mark.parametrize("form", Cpu.available_instructions())
@pytest.mark.parametrize(
    "family",
    [
        *("lfm2-moe", "qwen3.5", "qwen3-next", "granite4-h", "granite4-h-moe", "nemotron-h"),
        *("gemma4", "gpt-oss"),
    ],
)
def test_every_form_says_the_same_from_known_blocks_and_laid_out_weights(
    tiny_checkpoint, tmp_path, monkeypatch, caplog, family, form
):
    """Of the families whose layers keep states, see windows, or have experts."""
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    caplog.set_level(logging.INFO, "prefixcache")
    flags = {"cpu_instructions": form, "weights_cache_dir": str(tmp_path / "kept")}
    prompt, folder = tokens(70), tiny_checkpoint(family)
    engine = built(folder, **flags)
    said, _ = answer(engine, prompt, num_tokens=8)
    assert answer(engine, prompt, num_tokens=8) == (said, 64)
    assert answer(built(folder, **flags), prompt, num_tokens=8) == (said, 0)
    assert "weights mapped from" in caplog.text


def test_small_models_are_kept_where_a_folder_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    kept = tmp_path / "home/weights"
    started(folder)
    assert not kept.exists()
    monkeypatch.setattr(cpu_runner, "_LEAST_CACHED_BYTES", 0)
    started(folder, weights_cache_dir="none")
    assert not kept.exists()
    started(folder)
    assert len(list(kept.iterdir())) == 1
