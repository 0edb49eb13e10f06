"""A server with `--kv-cache-dir` is killed; the next one answers from its cache, bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from killed_server import kill_servers
from support.repeatable import bounded
from support.server_process import PREFIXCACHE, ServerProcess, server_process
from support.serving import wait_until

pytestmark = pytest.mark.slow

_PROMPTS = [" ".join(f"word {number} of {name}" for number in range(40)) for name in "abc"]
_FLAGS = ["--dtype", "float32", "--num-blocks", "300", "--served-model-name", "tiny"]


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint(max_position_embeddings=4096)


@contextmanager
def _serving(
    folder: Path, tmp_path: Path, kept: Path | None, *flags: str
) -> Generator[tuple[ServerProcess, Path], None, None]:
    own = [] if kept is None else ["--kv-cache-dir", str(kept)]
    command = [*PREFIXCACHE, "serve", str(folder), "--port", "0", *_FLAGS, *own, *flags]
    log = tmp_path / f"log-{len(list(tmp_path.iterdir()))}"
    with server_process(command, log) as server:
        yield server, log


def _ask(server: ServerProcess, prompt: str, **fields: Any) -> tuple[object, int]:
    """What is answered, with log probabilities, and how much of the prompt was cached."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 3, **fields}
    answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=240).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0], cached


def _kill(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(timeout=240)


def _kept_blocks(server: ServerProcess) -> int:
    text = httpx.get(f"{server.address}/metrics", timeout=240).text
    counts = re.findall(
        r"^prefixcache:kv_file_(?:kept|restored)_blocks_total\S* (\S+)$", text, re.MULTILINE
    )
    return sum(map(int, map(float, counts)))


def _wait_until_kept(server: ServerProcess, least: int) -> None:
    """Checksums are computed next to the steps."""
    wait_until(lambda: _kept_blocks(server) >= least)


def _restored(log: Path) -> int:
    found = re.search(r"(\d+) blocks were restored", log.read_text())
    assert found, log.read_text()
    return int(found[1])


def test_a_killed_server_is_warm_again_with_the_same_bits(folder, tmp_path):
    kept = tmp_path / "kept"
    with _serving(folder, tmp_path, kept) as (server, _):
        cold = [_ask(server, prompt) for prompt in _PROMPTS]
        salted, _ = _ask(server, _PROMPTS[0], cache_salt="mine")
        warm = [_ask(server, prompt) for prompt in _PROMPTS]
        cached = [count for _, count in warm]
        assert min(cached) > 100
        _wait_until_kept(server, (sum(cached) + cached[0]) // 16)
        _kill(server)
    assert os.stat(kept).st_mode & 0o777 == 0o700
    assert [os.stat(file).st_mode & 0o777 for file in kept.iterdir()] == [0o600]
    with _serving(folder, tmp_path, kept) as (server, log):
        assert _restored(log) >= sum(cached) // 16
        assert [_ask(server, prompt) for prompt in _PROMPTS] == warm
        assert _ask(server, _PROMPTS[0], cache_salt="mine") == (salted, cached[0])
        assert _ask(server, _PROMPTS[0], cache_salt="other")[1] == 0
        _kill(server)
    assert [answer for answer, _ in cold] == [answer for answer, _ in warm]


def test_what_was_reset_or_of_a_tag_is_not_found(folder, tmp_path):
    kept = tmp_path / "kept"
    with _serving(folder, tmp_path, kept) as (server, _):
        _ask(server, _PROMPTS[0])
        httpx.post(f"{server.address}/reset_prefix_cache", timeout=240).raise_for_status()
        _ask(server, _PROMPTS[1])
        _, cached = _ask(server, _PROMPTS[1])
        _wait_until_kept(server, cached // 16)
        _kill(server)
    with _serving(folder, tmp_path, kept) as (server, _):
        assert [_ask(server, prompt)[1] for prompt in _PROMPTS[:2]] == [0, cached]
        update = {"model_path": str(folder), "weight_version": "step-1"}
        answer = httpx.post(f"{server.address}/update_weights_from_disk", json=update, timeout=240)
        answer.raise_for_status()
        _ask(server, _PROMPTS[2])
        assert _ask(server, _PROMPTS[2])[1] > 0
        _kill(server)
    with _serving(folder, tmp_path, kept) as (server, log):
        assert _restored(log) == 0
        assert [_ask(server, prompt)[1] for prompt in _PROMPTS] == [0, 0, 0]


def test_a_damaged_block_is_computed_again(folder, tmp_path):
    kept = tmp_path / "kept"
    with _serving(folder, tmp_path, kept) as (server, _):
        first, _ = _ask(server, _PROMPTS[0])
        _, cached = _ask(server, _PROMPTS[0])
        _wait_until_kept(server, cached // 16)
        _kill(server)
    (file,) = kept.iterdir()
    with file.open("r+b") as data:
        # The KV of the first tensor: some of it becomes something else.
        data.seek(2 << 20)
        blocks = data.read(64 << 10)
        data.seek(2 << 20)
        data.write(blocks[: 40 << 10] + bytes(byte ^ 1 for byte in blocks[40 << 10 :]))
    with _serving(folder, tmp_path, kept) as (server, _):
        answer, hit = _ask(server, _PROMPTS[0])
        assert answer == first
        assert 0 < hit < cached
        metrics = httpx.get(f"{server.address}/metrics", timeout=240).text
        assert re.search(
            r"^prefixcache:kv_file_failed_checks_total\S* [1-9]", metrics, re.MULTILINE
        )
        assert _ask(server, _PROMPTS[0]) == (first, cached)


def test_a_router_learns_what_was_restored(folder, tmp_path):
    """From a snapshot: the same blocks, each with its parent and its tokens."""
    msgpack = pytest.importorskip("msgpack")
    pytest.importorskip("zmq")
    flags = (
        "--kv-events-config",
        '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:*"}',
    )

    def snapshot(server: ServerProcess) -> dict[int, tuple[int | None, list[int]]]:
        answer = httpx.get(f"{server.address}/prefix_cache/snapshot", timeout=240)
        unpacker = msgpack.Unpacker()
        unpacker.feed(answer.content)
        blocks = {}
        for event in list(unpacker)[1:-1]:
            parent = event["parent_block_hash"]
            for place, block in enumerate(event["block_hashes"]):
                blocks[block] = parent, event["token_ids"][16 * place :][:16]
                parent = block
        return blocks

    kept = tmp_path / "kept"
    with _serving(folder, tmp_path, kept, *flags) as (server, _):
        for prompt in _PROMPTS:
            _ask(server, prompt)
        _ask(server, _PROMPTS[0], cache_salt="mine")
        before = snapshot(server)
        _wait_until_kept(server, len(before) + 10)
        _kill(server)
    with _serving(folder, tmp_path, kept, *flags) as (server, log):
        assert _restored(log) > len(before) > 30
        assert snapshot(server) == before
        hit = _ask(server, _PROMPTS[0])[1]
        assert hit > 100


def test_resizes_and_sleep_leave_what_is_there_right(folder, tmp_path):
    kept = tmp_path / "kept"

    def post(server: ServerProcess, path: str, body: object = None) -> None:
        answer = httpx.post(f"{server.address}{path}", json=body, timeout=240)
        assert answer.status_code < 300, answer.text

    with _serving(folder, tmp_path, kept) as (server, _):
        _ask(server, _PROMPTS[1])
        post(server, "/sleep")
        post(server, "/wake_up")
        _ask(server, _PROMPTS[2])
        first, _ = _ask(server, _PROMPTS[0])
        _, cached = _ask(server, _PROMPTS[0])
        post(server, "/prefix_cache/resize", {"num_blocks": 30})
        post(server, "/prefix_cache/resize", {"num_blocks": 300})
        assert _ask(server, _PROMPTS[0]) == (first, cached)
        _wait_until_kept(server, cached // 16)
        _kill(server)
    with _serving(folder, tmp_path, kept) as (server, _):
        assert _ask(server, _PROMPTS[1])[1] == 0
        assert _ask(server, _PROMPTS[0]) == (first, cached)


def test_a_second_server_has_a_file_of_its_own(folder, tmp_path):
    kept = tmp_path / "kept"
    with (
        _serving(folder, tmp_path, kept) as (one, _),
        _serving(folder, tmp_path, kept) as (other, log),
    ):
        assert _ask(one, _PROMPTS[0]) == _ask(other, _PROMPTS[0])
        assert _restored(log) == 0
        assert len(list(kept.iterdir())) == 2


def test_a_folder_of_others_is_not_used(folder, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o755)
    with _serving(folder, tmp_path, kept) as (server, log):
        assert "kept in memory alone" in log.read_text()
        assert "mode 0755" in log.read_text()
        _ask(server, _PROMPTS[0])
        assert _ask(server, _PROMPTS[0])[1] > 0
    assert list(kept.iterdir()) == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_no_answer_changes_whichever_call_on_the_files_fails(folder, tmp_path):
    tests, shim = Path(__file__).parents[2], tmp_path / "shim.so"
    source = tests / "failing_files.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, tests / "failing_files.py", folder, str(bounded(6, 1))],
        env=os.environ | {"LD_PRELOAD": str(shim), "FAILING_FOLDER": str(tmp_path / "kept")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert min(map(int, done.stdout.split())) > bounded(25, 150)


def test_killed_servers_answer_as_cold_ones(folder, tmp_path, tiny_checkpoint, seed):
    other = tiny_checkpoint(max_position_embeddings=4096, seed=1)
    kills = kill_servers([folder, other], tmp_path, bounded(2, 10), seed)
    assert kills.num_asked > 24


@pytest.mark.long
def test_the_folder_never_exceeds_its_size(folder, tmp_path):
    """Of servers of several layouts, one after the other and two at a time, that resize."""
    kept = tmp_path / "kept"
    ceiling = ("--kv-cache-max-memory", "8MiB")
    too_small = [*PREFIXCACHE, "serve", str(folder), *_FLAGS, *ceiling]
    too_small += ["--kv-cache-dir", str(kept), "--kv-cache-dir-size", "1"]
    done = subprocess.run(too_small, capture_output=True, text=True, check=False)
    found = re.search(r"must be at least (\d+) bytes", done.stderr)
    assert found, done.stderr
    assert not kept.exists()
    limit = int(found[1]) + (1 << 20)
    flags = (*ceiling, "--kv-cache-dir-size", str(limit))
    sizes: list[int] = []
    requests = 40

    def use(server: ServerProcess) -> None:
        for number in range(requests):
            _ask(server, f"{number} " + _PROMPTS[number % 3])
            if number % 4 == 0:
                body = {"num_blocks": 100 + 8 * number}
                httpx.post(f"{server.address}/prefix_cache/resize", json=body, timeout=240)
            sizes.append(sum(file.stat().st_blocks for file in kept.iterdir()) * 512)

    for block_size in ("16", "32", "8"):
        with _serving(folder, tmp_path, kept, *flags, "--block-size", block_size) as (one, log):
            assert _restored(log) == 0
            use(one)
    with _serving(folder, tmp_path, kept, *flags) as (one, _):
        with _serving(folder, tmp_path, kept, *flags) as (other, log):
            assert "take the room" in log.read_text()
            use(other)
        use(one)
    assert limit // 4 < max(sizes) <= limit
