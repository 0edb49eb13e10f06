"""The small commands: chat, models, doctor, completion."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from click.testing import CliRunner, Result
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from prefixcache.cli import chat as chat_command
from prefixcache.cli.main import app
from prefixcache.models.gguf.index import WEIGHTS_FILE
from prefixcache.models.hub import folder_of_alias
from prefixcache.server.http.routes import Router
from prefixcache.tools.openai_api import choice_text
from support.serving import running

USAGE = {
    "prompt_tokens": 27,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 16},
}


REFUSED = {"no": "invalid", "long": "context_length_exceeded"}


def _run(*arguments: str, text: str | None = None, **env: str) -> Result:
    return CliRunner(env=env).invoke(app, arguments, input=text)


class Server:
    """Answers the n-th question with "answer n", and keeps what was asked; refuses some."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.card = dict[str, str]()

    def app(self) -> Starlette:
        router = Router()
        router.get("/v1/models")(lambda: {"data": [{"id": "a-model"} | self.card]})

        @router.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.keys.add(request.headers.get("authorization"))
            if (code := REFUSED.get(body["messages"][-1]["content"])) is not None:
                error = {"message": "not that", "code": code}
                return JSONResponse({"error": error}, status_code=400)
            if body["messages"][-1]["content"] == "uncached":
                ending = {"choices": [{"delta": {}, "finish_reason": "cache_threshold"}]}
                return Response(f"data: {json.dumps(ending)}\n\n", media_type="text/event-stream")
            self.bodies.append(body)
            return StreamingResponse(self._events(), media_type="text/event-stream")

        return Starlette(routes=router.routes)

    def _events(self) -> Iterator[str]:
        deltas = [{"reasoning_content": "so: "}, {"content": "answer "}]
        for delta in [*deltas, {"content": str(len(self.bodies))}]:
            yield f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\ndata: [DONE]\n\n"


@pytest.fixture
def server() -> Generator[tuple[Server, str], None, None]:
    served = Server()
    with running(served.app()) as address:
        yield served, address


def test_a_chat_goes_on_and_begins_again(server: tuple[Server, str]) -> None:
    served, url = server
    flags = ["--url", f"{url}/v1", "--api-key", "k", "--system", "Be brief.", "--temperature", "0"]
    flags += ["--max-tokens", "9"]
    result = _run("chat", *flags, text="one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [f"so: answer {n}" for n in (1, 2, 3)]
    speed = (
        r"\[16 of 27 prompt tokens cached, first token after \d+ ms, 3 tokens, [\d.]+ tokens/s\]"
    )
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(speed, line) for line in lines)
    system = {"role": "system", "content": "Be brief."}
    asked = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    first = {"role": "assistant", "content": "so: answer 1"}
    assert [body["messages"] for body in served.bodies] == [
        [system, asked[0]],
        [system, asked[0], first, asked[1]],
        [system, asked[2]],
    ]
    assert served.keys == {"Bearer k"}
    fields = {(body["model"], body["temperature"], body["max_tokens"]) for body in served.bodies}
    assert fields == {("a-model", 0, 9)}


def test_a_refused_question_ends_what_is_not_typed(server: tuple[Server, str]) -> None:
    result = _run("chat", "--url", server[1], text="no\none\n")
    assert result.exit_code == 1
    assert "not that" in result.stderr
    assert server[0].bodies == []


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(chat_command, "sys", SimpleNamespace(stdin=terminal))


@pytest.mark.usefixtures("typed")
def test_a_typed_conversation_outlives_a_refusal(server: tuple[Server, str]) -> None:
    result = _run("chat", "--url", server[1], text="no\n/help\nlong\none\n")
    assert result.exit_code == 0
    first, no, _, long, hint, speed = result.stderr.splitlines()
    assert no == long == f"error: POST {server[1]}/v1/chat/completions: 400 not that"
    assert (first.endswith(chat_command._HELP), speed[0]) == (True, "[")
    assert "/reset" in hint
    (body,) = server[0].bodies
    assert body["messages"] == [{"role": "user", "content": "one"}]
    assert "max_tokens" not in body


@pytest.mark.usefixtures("typed")
def test_an_answer_that_the_server_does_not_give_is_an_error(server: tuple[Server, str]) -> None:
    result = _run("chat", "--url", server[1], text="uncached\none\n")
    assert result.stderr.count("error: The server ended an answer with cache_threshold.") == 1
    (body,) = server[0].bodies
    assert body["messages"] == [{"role": "user", "content": "one"}]
    assert "cache_hit_threshold" not in body


@pytest.mark.parametrize("model", [[], ["--model", "a-model"]])
def test_a_chat_asks_our_server_for_what_is_not_cached(
    server: tuple[Server, str], model: list[str]
) -> None:
    server[0].card["owned_by"] = "prefixcache"
    _run("chat", "--url", server[1], *model, text="one\n")
    assert server[0].bodies[0]["cache_hit_threshold"] == 0


def test_a_chat_with_a_named_model_needs_no_list(server: tuple[Server, str]) -> None:
    server[0].card["id"] = ""
    _run("chat", "--url", server[1], "--model", "another", text="one\n")
    assert server[0].bodies[0]["model"] == "another"
    unnamed = _run("chat", "--url", server[1], text="one\n")
    assert "lists no model; name one by --model" in unnamed.stderr


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"text": "Tokyo"}, "Tokyo"),
        ({"delta": {"content": "Tokyo", "reasoning_content": "so. "}}, "so. Tokyo"),
        ({"delta": {"reasoning": "so. "}}, "so. "),  # vLLM since its pull request 33402
        ({"delta": {"reasoning": "so. ", "reasoning_content": "so. "}}, "so. "),
        ({"delta": {"content": None}, "finish_reason": "stop"}, ""),
        ({}, ""),
    ],
)
def test_what_an_event_adds(choice: dict[str, Any], text: str) -> None:
    assert choice_text(choice) == text


def test_ctrl_c_cuts_an_answer_and_keeps_what_came(
    server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: Callable[[dict[str, Any]], str] = chat_command._text

    def text(event: dict[str, Any]) -> str:
        if texts(event) == "1":
            raise KeyboardInterrupt
        return texts(event)

    monkeypatch.setattr(chat_command, "_text", text)
    result = _run("chat", "--url", server[1], text="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["so: answer  [cut]", "so: answer 2"]
    assert server[0].bodies[1]["messages"][1]["content"] == "so: answer "


def test_a_chat_without_a_server_says_how_to_start_one() -> None:
    result = _run("chat", "--url", "http://127.0.0.1:9", text="hi\n")
    assert result.exit_code == 1
    assert "No server answers at http://127.0.0.1:9" in result.stderr
    assert "`prefixcache serve`" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_models_lists_what_is_here_and_what_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    scan, hub = huggingface_hub.scan_cache_dir, tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(hub))
    assert json.loads(_run("models", "--json").stdout) == [
        {"name": "smollm2-135m-instruct", "source": "alias", "size": None, "folder": None}
    ]
    alias = folder_of_alias("smollm2-135m-instruct")
    alias.mkdir(parents=True)
    (alias / "weights.gguf").write_bytes(bytes(3 << 20))
    file = tmp_path / "mine.gguf"
    file.write_bytes(bytes(5 << 20))
    for name, target in (("mine", file), ("gone", tmp_path / "gone.gguf")):
        folder = alias.parent / f"{name}-0123456789abcdef-linked-2"
        folder.mkdir()
        (folder / WEIGHTS_FILE).symlink_to(target)
    for repo, holds in (("models--a--b", "config.json"), ("models--a--c", "adapter.json")):
        snapshot = hub / repo / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / holds).write_bytes(bytes(2 << 20))
    found = json.loads(_run("models", "--json").stdout)
    assert [(one["name"], one["source"], one["size"]) for one in found] == [
        ("smollm2-135m-instruct", "alias", 3 << 20),
        (str(tmp_path / "gone.gguf"), "GGUF file", None),
        (str(file), "GGUF file", 5 << 20),
        ("a/b", "hub", 2 << 20),
    ]
    lines = _run("models").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "FROM", "SIZE", "FOLDER"]
    assert lines[1].split() == ["smollm2-135m-instruct", "alias", "3", "MiB", str(alias)]

    refused = _run("models", "rm", "a/b", "nowhere")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "must be a model that `models` shows, got 'nowhere'" in refused.stderr
    names = ("smollm2-135m-instruct", "mine", str(tmp_path / "gone.gguf"), "a/b")
    removed = _run("models", "rm", *names)
    assert removed.exit_code == 0, removed.stderr
    assert removed.stdout.splitlines()[0] == "smollm2-135m-instruct: removed 3.0 MiB"
    assert removed.stdout.splitlines()[-1] == "a/b: removed 2.0 MiB"
    assert [one["size"] for one in json.loads(_run("models", "--json").stdout)] == [None]
    assert not any((tmp_path / "home/models").iterdir())
    assert file.stat().st_size == 5 << 20


def test_doctor_says_what_is_chosen_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixcache._core import Cpu
    from prefixcache.cli import doctor

    installed = doctor._version
    missing = ("matplotlib",)
    monkeypatch.setattr(
        doctor, "_version", lambda name: None if name in missing else installed(name)
    )
    env = {"PREFIXCACHE_API_KEY": "s3cret"}
    result = _run("doctor", **env)
    assert result.exit_code == 0, result.stderr
    assert f"chosen                {Cpu.available_instructions()[-1]}" in result.stdout
    needs = "missing matplotlib: run pip install '.[plot]' in a checkout of prefixcache"
    assert needs in result.stdout
    assert "PREFIXCACHE_API_KEY" in result.stdout
    assert "s3cret" not in result.stdout
    found = json.loads(_run("doctor", "--json", **env).stdout)
    assert found["extras"]["plot"] == needs
    assert found["extras"]["events"].startswith("msgpack 1")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_each_shell(shell: str) -> None:
    said = _run("completion", shell)
    assert said.exit_code == 0, said.stderr
    assert f"_PREFIXCACHE_COMPLETE={shell}_complete" in said.stdout
    assert _run("completion", SHELL=f"/usr/bin/{shell}").stdout == said.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["tcsh"], {}, "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        ([], {"SHELL": "/bin/tcsh"}, "SHELL must be one of bash, zsh, fish, got 'tcsh'."),
    ],
)
def test_a_shell_that_click_does_not_know_is_wrong_usage(arguments, env, message) -> None:
    result = _run("completion", *arguments, **env)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("prefixcache ser", {"plain,serve", "plain,serve-ray"}),
        ("prefixcache serve --kv-cache-m", {"plain,--kv-cache-memory", "plain,--kv-cache-metrics"}),
    ],
)
def test_a_command_line_is_completed(words: str, expected: set[str]) -> None:
    env = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    env["_PREFIXCACHE_COMPLETE"] = "bash_complete"
    result = CliRunner(env=env).invoke(app, [], prog_name="prefixcache")
    assert result.exit_code == 0
    assert expected <= set(result.stdout.splitlines())
