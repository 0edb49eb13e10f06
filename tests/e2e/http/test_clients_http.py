"""First requests of real clients, and two more turns with what came back, to templates of families.

No turn is refused, and each text that a client sent stands in the prompt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.text.chat.plan import ChatFormat, ChatPlan
from prefixcache.types.structured_output import StructuredOutput
from support.chat_models import TEMPLATES, tokenizer
from support.repeatable import slow
from support.serving import FakeEngine, client_of, fake_app, says, served_folder

DATA = Path(__file__).parents[2] / "data"
CLIENTS = {path.stem: json.loads(path.read_text()) for path in sorted(DATA.glob("clients/*.json"))}
SOURCES = {path.stem: path.read_text() for path in sorted(DATA.glob("templates/*.jinja"))}
SOURCES["gpt-oss"] = TEMPLATES["gpt-oss"]

Values = dict[str, Any]
# One for each kind of guard.
QUICK = ("gemma2", "gpt-oss", "mistral-v3", "phi3", "qwen3.5")
# Their thoughts may be longer than the answers here.
THINKING = ("deepseek-r1-distill", "gpt-oss", "qwen3.5")
# A system entry that Claude Code puts behind each turn of the user.
NOTICE = {"role": "system", "content": "<total_tokens>5000000 tokens left</total_tokens>"}


class Chat:
    """A client of chat completions: messages as the SDK returns them, and results of tools."""

    history = "messages"
    limit = "max_tokens"

    def forced(self) -> object:
        """The choice of tools with which an answer must call one."""
        return "required"

    def answered(self, answer: Values) -> tuple[list[Values], list[str]]:
        said = {k: v for k, v in answer["choices"][0]["message"].items() if v is not None}
        calls = said.get("tool_calls", ())
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "prints 17"} for call in calls
        ]
        return [{"content": None, **said}, *results], [call["function"]["name"] for call in calls]

    def says(self, text: str) -> list[Values]:
        return [{"role": "user", "content": text}]


class Responses(Chat):
    """Codex: items without ids, all of them again in each turn."""

    history = "input"
    limit = "max_output_tokens"

    def answered(self, answer: Values) -> tuple[list[Values], list[str]]:
        items = [
            {k: v for k, v in i.items() if k not in ("id", "status")} for i in answer["output"]
        ]
        calls = [item for item in items if item["type"].endswith("_call")]
        items += [
            {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "prints 17"}
            for call in calls
        ]
        return items, [call["name"] for call in calls]

    def says(self, text: str) -> list[Values]:
        part = {"type": "input_text", "text": text}
        return [{"type": "message", "role": "user", "content": [part]}]


class Messages(Chat):
    """Claude Code: reminders and system entries behind each turn of the user."""

    def forced(self) -> object:
        return {"type": "any"}

    def answered(self, answer: Values) -> tuple[list[Values], list[str]]:
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "prints 17"}
            for call in calls
        ]
        reminder = {
            "type": "text",
            "text": "<system-reminder>\nNo files changed.\n</system-reminder>",
        }
        returned = [{"role": "user", "content": [*results, reminder]}, NOTICE] if calls else []
        said = {"role": "assistant", "content": answer["content"]}
        return [said, *returned], [call["name"] for call in calls]

    def says(self, text: str) -> list[Values]:
        return [{"role": "user", "content": [{"type": "text", "text": text}]}, NOTICE]


def _client_of(path: str) -> Chat:
    kinds = {"/v1/responses": Responses, "/v1/messages": Messages}
    return kinds.get(path.partition("?")[0], Chat)()


def _texts(value: object) -> Iterator[str]:
    """Contents, texts of parts, outputs of tools; thoughts of earlier turns may be left out."""
    if isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, dict) and value.get("type") != "reasoning":
        for name in ("content", "text", "output"):
            said = value.get(name)
            if isinstance(said, str):
                yield said
            else:
                yield from _texts(said)


class _Conversation:
    """One client at one server; `prompts` get each prompt that it writes."""

    def __init__(self, http: httpx.AsyncClient, client: Values, prompts: list[str]) -> None:
        self.path, self.body = client["path"], {**client["body"], "stream": False}
        self.body.pop("stream_options", None)
        self.kind = _client_of(self.path)
        self.body[self.kind.limit] = 40
        self._http, self._prompts = http, prompts

    async def answer(self, **changes: Any) -> list[str]:
        """The names of the tools that are called; what came back is a part of the history."""
        response = await self._http.post(self.path, json={**self.body, **changes})
        assert response.status_code == 200, (response.text, self.body)
        self._check_prompt()
        items, names = self.kind.answered(response.json())
        self.add(items)
        return names

    def add(self, items: list[Values]) -> None:
        history = self.kind.history
        self.body = {**self.body, history: [*self.body[history], *items]}

    def _check_prompt(self) -> None:
        prompt = self._prompts[-1]
        said = [
            *_texts(self.body[self.kind.history]),
            *([self.body["instructions"]] if "instructions" in self.body else ()),
            *(block["text"] for block in self.body.get("system", ())),
        ]
        lost = [text for text in said if text.strip() not in prompt]
        assert not lost, prompt


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that are written during the test."""
    written: list[str] = []
    plan = ChatFormat.plan

    def recorded(self: ChatFormat, *arguments: Any, **options: Any) -> ChatPlan:
        made = plan(self, *arguments, **options)
        written.append(made.prompt)
        return made

    monkeypatch.setattr(ChatFormat, "plan", recorded)
    return written


@pytest.mark.parametrize("client", CLIENTS)
async def test_the_first_request_is_taken_as_it_is(client):
    class Scripted(FakeEngine):
        def find_grammar(self, output: StructuredOutput) -> object:
            return output

    engine = Scripted(lambda request: says(request, "Hello."))
    engine.max_model_len = 16384
    async with client_of(fake_app(engine, tokenizer("qwen2"))) as http:
        sent = await http.post(CLIENTS[client]["path"], json=CLIENTS[client]["body"])
    assert sent.status_code == 200, sent.text
    assert "Hello." in sent.text


@pytest.mark.parametrize("family", [name if name in QUICK else slow(name) for name in SOURCES])
async def test_two_more_turns_go_on_from_what_came_back(tiny_checkpoint, tmp_path, prompts, family):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(max_position_embeddings=8192), folder)
    (folder / "chat_template.jinja").write_text(SOURCES[family])
    async with served_folder(folder, num_blocks=1500) as (http, _):
        for client in CLIENTS.values():
            talk = _Conversation(http, client, prompts)
            forced = {"tool_choice": talk.kind.forced()} if talk.body.get("tools") else {}
            names = await talk.answer(**forced)
            assert bool(names) == bool(forced) or family in THINKING
            for question in ("And other.py?", "Thanks."):
                if names:  # their results are there
                    names = await talk.answer()
                talk.add(talk.kind.says(question))
                names = await talk.answer()
