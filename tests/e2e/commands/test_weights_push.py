"""New weights in chunks while requests are served: all or none, whatever becomes of the trainer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from prefixcache import LLM, SamplingParams, weights_digest
from prefixcache.exceptions import InvalidRequestError
from prefixcache.models import replaceable
from prefixcache.models.checkpoint import read_checkpoint
from prefixcache.models.conversion import quantize_folder
from support.server_process import PREFIXCACHE, server_process
from support.serving import MODEL, client_of, serve_folder, wait_until

Checkpoint = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
PROMPT = [*range(20, 60)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TRAINER = Path(__file__).with_name("dying_trainer.py")


@pytest.fixture
def folders(tiny_checkpoint: Checkpoint) -> tuple[Path, Path]:
    return tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=4)


def make_llm(folder: Path, **flags: Any) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", num_blocks=65, **flags)


def answer(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def chunks_of(tensors: Tensors, size: int = 7) -> list[Tensors]:
    names = list(tensors)
    return [{n: tensors[n] for n in names[i : i + size]} for i in range(0, len(names), size)]


def param_of(call: Callable[[], object]) -> str | None:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    return caught.value.param


@pytest.mark.parametrize("form", ["torch", "numpy", "bytes"])
def test_chunks_replace_all_weights(folders: tuple[Path, Path], form: str) -> None:
    old, new = folders
    llm = make_llm(old)
    answer(llm)
    chunks: list[Any] = chunks_of(tensors_of(new))
    if form == "numpy":
        chunks = [{name: one.numpy() for name, one in chunk.items()} for chunk in chunks]
    if form == "bytes":
        chunks = [save(chunk) for chunk in chunks]
    digest = weights_digest(chunks)
    assert digest == read_checkpoint(new).digest
    assert llm.receive_weights(chunks, digest=digest, weight_version="step-1") == 1
    assert answer(llm) == answer(make_llm(new))
    assert llm.control.weights_name == make_llm(new).control.weights_name == f"blake3:{digest}"
    assert llm.control.weights_push.staged_bytes == 0


def test_one_array_may_be_used_for_each_chunk(folders: tuple[Path, Path]) -> None:
    llm, new = make_llm(folders[0]), tensors_of(folders[1])

    def chunks() -> Iterator[dict[str, np.ndarray]]:
        for name, tensor in new.items():
            array = tensor.numpy().copy()
            yield {name: array}
            array[:] = 0

    llm.receive_weights(chunks())
    assert answer(llm) == answer(make_llm(folders[1]))


def test_what_fails_leaves_the_old_weights(folders: tuple[Path, Path]) -> None:
    old, new = folders
    llm = make_llm(old)
    first, name = answer(llm), llm.control.weights_name
    chunks = chunks_of(tensors_of(new))

    def broken() -> Iterator[Tensors]:
        yield chunks[0]
        raise OSError("the trainer's file is gone")

    with pytest.raises(OSError, match="trainer's file"):
        llm.receive_weights(broken())
    wrong_shape = {"model.norm.weight": torch.zeros(3)}
    integers = {"model.norm.weight": np.zeros(3, np.int64)}
    assert param_of(lambda: llm.receive_weights(chunks[:-1])) == "full"
    assert param_of(lambda: llm.receive_weights([*chunks, chunks[0]])) == "chunk"
    assert param_of(lambda: llm.receive_weights([wrong_shape])) == "chunk"
    assert param_of(lambda: llm.receive_weights([integers])) == "chunk"
    assert param_of(lambda: llm.receive_weights([{"no.such": torch.zeros(3)}])) == "chunk"
    assert param_of(lambda: llm.receive_weights(chunks, digest="0" * 64)) == "digest"
    assert param_of(lambda: llm.receive_weights(chunks, mode="later")) == "mode"  # type: ignore[arg-type]
    assert param_of(lambda: llm.receive_weights([])) == "update_id"
    assert llm.control.weights_push.staged_bytes == 0
    assert (answer(llm), llm.control.weights_name) == (first, name)
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


NORM = {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}


@pytest.mark.parametrize(
    "chunk",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"{\xff\xff}",
        header(**{"model.norm.weight": NORM}),
        header(**{"model.norm.weight": {**NORM, "data_offsets": [-256, 0]}}) + b"\0" * 256,
        header(**{"model.norm.weight": {**NORM, "data_offsets": [256, 0]}}) + b"\0" * 256,
        header(**{"model.norm.weight": {**NORM, "shape": [-1, -64]}}) + b"\0" * 256,
        header(**{"model.norm.weight": {**NORM, "dtype": "I64"}}) + b"\0" * 256,
        header(**{"model.norm.weight": NORM, "model.layers.0.input_layernorm.weight": NORM})
        + b"\0" * 256,
    ],
)
def test_a_chunk_that_is_no_safetensors_is_refused(
    folders: tuple[Path, Path], chunk: bytes
) -> None:
    push = make_llm(folders[0]).control.weights_push
    update = push.begin()
    assert param_of(lambda: push.add(update, chunk)) == "chunk"
    assert push.staged_bytes == 0
    push.abort(update)


def test_numbers_of_another_type_are_converted_once(tiny_checkpoint: Checkpoint) -> None:
    folder, other = tiny_checkpoint("smollm2"), tiny_checkpoint("smollm2", seed=1)
    llm = make_llm(folder)
    halves = {name: one.to(torch.bfloat16) for name, one in tensors_of(other).items()}
    llm.receive_weights(halves)
    expected = make_llm(folder)
    expected.control.load_state_dict({name: one.float() for name, one in halves.items()})
    assert answer(llm) == answer(expected)
    as_numpy = {
        name: one.float().numpy().astype(ml_dtypes.bfloat16) for name, one in halves.items()
    }
    assert weights_digest(halves) == weights_digest(as_numpy) != weights_digest(tensors_of(other))


def test_some_tensors_alone(folders: tuple[Path, Path]) -> None:
    old, new = folders
    llm, expected = make_llm(old), make_llm(old)
    norm = {"model.norm.weight": tensors_of(new)["model.norm.weight"] * 3}
    llm.receive_weights([norm], full=False, weight_version="step-1")
    expected.control.load_state_dict(norm, strict=False)
    assert answer(llm) == answer(expected)
    assert llm.control.weights_name == "tag:step-1"
    assert param_of(lambda: llm.receive_weights([norm], full=False, digest="0" * 64)) == "digest"


def test_fused_experts_as_their_checkpoint_has_them(tiny_checkpoint: Checkpoint) -> None:
    old, new = tiny_checkpoint("gpt-oss"), tiny_checkpoint("gpt-oss", seed=1)
    llm = make_llm(old)
    assert any("experts" in name for name in tensors_of(new))
    llm.receive_weights(chunks_of(tensors_of(new), 3))
    assert answer(llm) == answer(make_llm(new))


def test_an_update_that_begins_ends_the_one_before(folders: tuple[Path, Path]) -> None:
    push = make_llm(folders[0]).control.weights_push
    chunk = chunks_of(tensors_of(folders[1]))[0]
    first, _ = push.begin(), push.add(push.begin(), chunk)
    assert push.staged_bytes > 0
    second = push.begin()
    assert push.staged_bytes == 0
    assert param_of(lambda: push.add(first, chunk)) == "update_id"
    push.abort(second)
    assert param_of(lambda: push.end(second)) == "update_id"


def test_an_update_of_which_nothing_comes_is_freed(folders: tuple[Path, Path]) -> None:
    push = make_llm(folders[0]).control.weights_push
    update = push.begin()
    push.add(update, chunks_of(tensors_of(folders[1]))[0])
    assert push.staged_bytes > 0
    push._timeout = 0.05
    push.touch(update)
    wait_until(lambda: not push.is_open)
    assert push.staged_bytes == 0


@pytest.mark.parametrize("timeout", [0, -1, 3601, float("nan"), True, "1"])
def test_a_timeout_that_is_none_is_refused(folders: tuple[Path, Path], timeout: Any) -> None:
    push = make_llm(folders[0]).control.weights_push
    assert param_of(lambda: push.begin(timeout)) == "timeout"


async def test_over_http(folders: tuple[Path, Path]) -> None:
    old, new = folders
    app, engine = serve_folder(old)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    binary = {"Content-Type": "application/octet-stream"}
    chunks = [save(chunk) for chunk in chunks_of(tensors_of(new))]
    digest = weights_digest(chunks)
    shared = f"prefixcache-{os.getpid()}"
    try:
        async with client_of(app) as client:

            async def post(path: str, **fields: Any) -> httpx.Response:
                return await client.post(f"/weights/{path}", json=fields)

            async def text() -> str:
                found = await client.post("/v1/completions", json=body)
                return found.json()["choices"][0]["text"]

            first = await text()
            update = (await post("begin", timeout=600)).json()["update_id"]
            for chunk in chunks[:-1]:
                sent = await client.post(
                    f"/weights/chunk?update_id={update}", content=chunk, headers=binary
                )
                assert sent.status_code == 200, sent.text
            assert await text() == first
            assert (await client.get("/weights/status")).json()["staged_bytes"] > 0
            Path("/dev/shm", shared).write_bytes(chunks[-1])
            found = await post("chunk", update_id=update, shm_name=shared)
            assert found.json()["num_tensors"] == len(chunks_of(tensors_of(new))[-1])
            assert not Path("/dev/shm", shared).exists()
            ended = await post("end", update_id=update, digest=digest, weight_version="step-1")
            assert ended.json() == {
                "weight_version": "step-1",
                "weights_name": f"blake3:{digest}",
                "root_hash": engine.control.prefix_hash_info().root_hash,
            }
            assert await text() != first
            for path, fields, param in (
                ("begin", {"timeout": 0}, "timeout"),
                ("chunk", {"shm_name": "x"}, "update_id"),
                ("chunk", {"update_id": update, "shm_name": "../etc/passwd"}, "shm_name"),
                ("end", {}, "update_id"),
                ("end", {"update_id": update}, "update_id"),
                ("abort", {"update_id": "x"}, "update_id"),
            ):
                refused = await post(path, **fields)
                assert refused.status_code == 400, (path, fields)
                assert refused.json()["error"]["param"] == param, refused.text
            unknown = await client.post(
                "/weights/chunk?update_id=x", content=chunks[0], headers=binary
            )
            assert unknown.json()["error"]["param"] == "update_id"
    finally:
        await engine.shutdown()
        with suppress(FileNotFoundError):
            Path("/dev/shm", shared).unlink()


async def test_a_chunk_that_waits_for_another_call_stops_nobody(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, engine = serve_folder(folders[0])
    push, waits, may_go = engine.control.weights_push, Event(), Event()
    touch = push.touch

    def held(update_id: str) -> None:
        waits.set()
        assert may_go.wait(600), "nobody was served meanwhile"
        touch(update_id)

    monkeypatch.setattr(push, "touch", held)
    (chunk,) = chunks_of(tensors_of(folders[1]), 1000)
    try:
        async with client_of(app) as client:
            begun = await client.post("/weights/begin")
            url = f"/weights/chunk?update_id={begun.json()['update_id']}"
            binary = {"Content-Type": "application/octet-stream"}
            sent = asyncio.create_task(client.post(url, content=save(chunk), headers=binary))
            assert await asyncio.to_thread(waits.wait, 60)
            assert (await client.get("/health")).status_code == 200
            may_go.set()
            assert (await sent).json()["num_tensors"] == len(chunk)
    finally:
        may_go.set()
        await engine.shutdown()


def test_what_is_no_file_of_this_user_in_shared_memory_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    push = make_llm(folders[0]).control.weights_push
    update = push.begin()
    path = Path(f"/dev/shm/prefixcache-link-{os.getpid()}")
    (tmp_path / "secret").write_bytes(b"secret")
    path.symlink_to(tmp_path / "secret")
    try:
        assert param_of(lambda: push.add_shared(update, path.name)) == "shm_name"
    finally:
        path.unlink()
    os.mkfifo(path)
    try:
        assert param_of(lambda: push.add_shared(update, path.name)) == "shm_name"
    finally:
        path.unlink()
    assert param_of(lambda: push.add_shared(update, path.name)) == "shm_name"
    push.abort(update)


@pytest.mark.slow
def test_kill_9_of_the_trainer_leaves_the_old_weights(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    command = [*PREFIXCACHE, "serve", "--model", folders[0], "--dtype", "float32"]
    command += ["--port", "0", "--num-blocks", "65"]
    with server_process(command, tmp_path / "log") as server:

        def ask() -> str:
            body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            found = httpx.post(f"{server.address}/v1/completions", json=body, timeout=240)
            return found.json()["choices"][0]["text"]

        def status() -> dict[str, Any]:
            return httpx.get(f"{server.address}/weights/status", timeout=240).json()

        first = ask()
        weights = folders[1] / "model.safetensors"
        trainer = subprocess.Popen(
            [sys.executable, TRAINER, server.address, weights], stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "half a chunk is sent\n"
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
        assert ask() == first
        wait_until(lambda: not status()["is_open"])
        assert status()["staged_bytes"] == 0
        assert ask() == first


def test_quantized_weights_take_numbers_in_their_own_format(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    old, new = tiny_checkpoint("qwen2"), tiny_checkpoint("qwen2", seed=1)
    quantize_folder(old, tmp_path, "Q8_0")
    chunks = chunks_of(tensors_of(new))
    plain, llm, other = (make_llm(tmp_path, requantize=on) for on in (False, True, True))
    first = answer(plain)
    assert param_of(lambda: plain.receive_weights(chunks)) == "chunk"
    assert answer(plain) == first
    llm.receive_weights(chunks)
    other.control.update_weights_from_disk(str(new))
    assert answer(llm) == answer(other)
    assert llm.control.weights_name == other.control.weights_name
    assert llm.control.weights_name.startswith("quantized:")


def test_weights_that_were_given_up_come_back_from_a_trainer(folders: tuple[Path, Path]) -> None:
    llm, chunks = make_llm(folders[0]), chunks_of(tensors_of(folders[1]))
    llm.control.sleep(2)
    assert param_of(lambda: llm.receive_weights(chunks[:1], full=False)) == "full"
    llm.receive_weights(chunks)
    llm.control.wake_up()
    assert answer(llm) == answer(make_llm(folders[1]))


def test_an_update_that_breaks_off_while_it_is_written_leaves_whole_weights(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot by what is known of tensors; were it to, half of them must compute nothing."""
    llm = make_llm(folders[0])
    first, name = answer(llm), llm.control.weights_name
    real = replaceable.copy_into

    def broken(slots: Any, tensors: Any, names: Any) -> Any:
        real(slots, list(tensors)[:5], names)
        raise RuntimeError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(replaceable, "copy_into", broken)
        with pytest.raises(RuntimeError, match="in the middle"):
            llm.receive_weights(chunks_of(tensors_of(folders[1])))
    assert (answer(llm), llm.control.weights_name) == (first, name)
