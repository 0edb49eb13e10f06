"""The code of README and docs runs: Python, requests by curl, replays with the output shown."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from click.testing import CliRunner

from prefixcache import LLM, SamplingParams
from prefixcache._core import Cpu
from prefixcache.cli.main import app
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.core import PrefixCache
from prefixcache.engine.control import Control
from prefixcache.models.hub import is_downloaded
from prefixcache.server import serve
from prefixcache.server.app import create_app
from reference.prefix_hashes import block_hashes, scoped
from support.code_blocks import ROOT, Block, blocks
from support.repeatable import long
from support.server_process import PREFIXCACHE, server_process
from support.serving import serve_folder

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks(page) if block.why is None]
needs_model = pytest.mark.skipif(
    not is_downloaded(DEFAULT_MODEL), reason="prefixcache download was not run"
)
Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    options = ("--port", "0", "--kv-cache-memory", "256MiB", "--kv-cache-max-memory", "1GiB")
    log = tmp_path_factory.mktemp("server") / "log"
    with server_process((*PREFIXCACHE, "serve", *options), log) as server:
        yield server.address


def run(page: str, namespace: dict[str, Any], address: str = "") -> dict[str, Any]:
    """Runs the Python of a page in order, top-level await included."""
    found = [one for one in BLOCKS if one.language == "python" and here(one) == page]
    assert found
    for block in found:
        code = block.code.replace("http://127.0.0.1:8000", address)
        compiled = compile(code, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(compiled, namespace)
        if inspect.iscoroutine(result):
            asyncio.run(result)
    return namespace


def here(block: Block) -> str:
    return block.page.relative_to(ROOT).as_posix()


def test_every_page_with_python_is_run_below() -> None:
    tested = {
        "README.md",
        "docs/index.md",
        "docs/guides/weights.md",
        "docs/reference/hashing.md",
        "docs/reference/structured-output.md",
        "docs/tutorials/rl.md",
        "docs/tutorials/library.md",
    }
    assert {here(block) for block in BLOCKS if block.language == "python"} == tested


ANSWERS = {
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of France?": "Paris",
    "The capital of Japan is": "Tokyo",
}
# The portable form takes half a minute for each type and kind of activations.
FORMS = [long(name) if name == "portable" else name for name in Cpu.available_instructions()]
PROMPT = re.compile(r"""["']([A-Z][^"'\n]*\?|(?:The|Once) [a-z][^"'\n.]*)["']""")


def dialogues() -> list[list[dict[str, str]]]:
    """What pages, `--help`, the HTTP schema and the start line send to the default model."""
    engine = MagicMock()
    engine.control.endpoints = Control.endpoints
    schema = create_app(engine, MagicMock(strict=False)).openapi()
    answered = re.sub(r'"(query|text_1)": ".*?"', "", json.dumps(schema))  # others are ranked
    texts = [answered, inspect.getsource(serve)]
    texts += [CliRunner().invoke(app, [name, "--help"]).output for name in app.commands]
    sent = list[list[dict[str, str]]]()
    for block in BLOCKS:
        if body := re.search(r"-d '(\{.*?\})'", block.code, re.DOTALL):
            sent.append(json.loads(body[1]).get("messages", []))
        elif (here(block), block.language) != ("README.md", "python"):
            texts.append(block.code)
    asked = {prompt for text in texts for prompt in PROMPT.findall(text)}
    alone = [[{"role": "user", "content": prompt}] for prompt in sorted(asked)]
    return [messages for messages in sent if messages] + alone


def test_an_answer_to_all_that_is_asked_is_tested() -> None:
    assert {messages[-1]["content"] for messages in dialogues()} == ANSWERS.keys()


@pytest.mark.model
@needs_model
@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("instructions", FORMS)
def test_the_default_model_answers_rightly_in_any_arithmetic(
    instructions: str,
    dtype: str,
    activations: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = {"dtype": dtype, "cpu_activations": activations, "cpu_instructions": instructions}
    monkeypatch.setattr("prefixcache.LLM", partial(LLM, **flags))
    llm = run("README.md", {})["llm"]
    printed = capsys.readouterr().out
    assert re.findall(r"(Tokyo|Paris).* (\d+)$", printed, re.MULTILINE) == [
        ("Tokyo", "0"),
        ("Paris", "96"),
    ]
    params = SamplingParams(temperature=0, max_tokens=8)
    for messages in dialogues():
        prompt = messages[-1]["content"]
        is_chat = prompt.endswith("?")
        (answer,) = llm.chat(messages, params) if is_chat else llm.generate(prompt, params)
        assert ANSWERS[prompt] in answer.outputs[0].text, messages


@pytest.mark.model
@needs_model
def test_the_clients_second_answer_hits(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("docs/index.md", {}, address)
    assert "32 prompt tokens came from the cache" in capsys.readouterr().out


def test_the_code_of_the_librarys_page_runs() -> None:
    found = run("docs/tutorials/library.md", {})
    for name in ("cache", "pool"):
        found[name].validate()
        assert found[name].stats()["blocks_in_use"] == 0


@pytest.mark.model
@needs_model
def test_an_answer_follows_its_schema() -> None:
    run("docs/reference/structured-output.md", {})


def test_rollouts_are_the_same_on_a_hit_and_old_weights_are_not_hit(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy").symlink_to(tiny_checkpoint())
    Path("policy-step-1").symlink_to(tiny_checkpoint(seed=1))
    run("docs/tutorials/rl.md", {})


def test_operations_in_python(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint()
    _, engine = serve_folder(folder)
    try:
        run("docs/guides/weights.md", {"llm": LLM(str(folder), num_blocks=65), "engine": engine})
    finally:
        engine.close()


def test_hashes_of_a_router_equal_the_servers() -> None:
    cache = PrefixCache(num_blocks=64, block_size=16, model="m", kv_dtype="float32")
    tokens = np.arange(40, dtype=np.int32)
    info = {"root_hash": cache.root_hash().hex(), "block_size": 16}
    known = {"info": info, "salt": None, "token_ids": tokens.tolist()}
    known |= {"scoped": scoped, "block_hashes": block_hashes}
    found = run("docs/reference/hashing.md", known)
    assert len(found["hashes"]) == 2


CURL = [block for block in BLOCKS if block.language == "sh" and "curl " in block.code]


@pytest.mark.model
@needs_model
@pytest.mark.parametrize("block", CURL, ids=str)
def test_requests_are_answered(block: Block, address: str) -> None:
    code = block.code.replace("http://127.0.0.1:8000", address).replace("localhost:8000", address)
    bash('set -e; curl() { command curl --silent --show-error --fail-with-body "$@"; }\n' + code)


def bash(code: str, **options: Any) -> str:
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """A folder in which `prefixcache` is a command."""
    command = tmp_path / "prefixcache"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m prefixcache "$@"\n')
    command.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "COLUMNS": "80", "PYTHONPATH": str(ROOT / "python")}
    return {"cwd": tmp_path, "env": os.environ | environment}


def test_replays_print_what_the_page_shows(place: dict[str, Any]) -> None:
    (place["cwd"] / "benches").symlink_to(ROOT / "benches")
    compared = 0
    for block, after in itertools.pairwise(blocks(ROOT / "docs/guides/sizing.md")):
        if "prefixcache replay" in block.code and block.why is None:
            printed = " ".join(bash(block.code, **place).split())
            if after.language == "text":
                assert " ".join(after.code.split()) in printed
                compared += 1
    assert compared == 2


@pytest.mark.model
@needs_model
def test_a_prompt_is_answered_and_explained(address: str, place: dict[str, Any]) -> None:
    (place["cwd"] / "body.json").write_text('{"prompt": "Paris is the capital of"}')
    place["env"]["PREFIXCACHE_URL"] = address
    for page, shown in (("docs/index.md", "Tokyo"), ("docs/guides/diagnostics.md", "are cached")):
        commands = ("prefixcache generate", "prefixcache explain")
        (code,) = [b.code for b in BLOCKS if here(b) == page and b.code.startswith(commands)]
        assert shown in bash(code, **place)
