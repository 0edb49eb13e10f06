"""The requests that are asked again and again, and what a quiet server answers to each."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from soak.answers import Answer
from soak.wire import ask

Body = dict[str, Any]

_WORDS = (
    *("block", "cache", "token", "prefix", "queue", "the", "of", "a", "sixteen", "answer", "pool"),
    *("question", "weights", "eviction", "reads", "slowly", "stream", "and", "then", "again"),
    *("Zwölf", "Boxkämpfer", "天地", "🦙", "[1,", "2]", "{}"),
)
_NUM_TOPICS = 10
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["hit", "miss"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Question:
    """`index` is its place in the bank."""

    index: int
    path: str
    body: Body


def make_bank(size: int, choose: random.Random) -> list[Question]:
    """Questions under a few long prefixes: greedy and seeded, short and long, at every endpoint."""
    topics = [_text(choose, choose.randint(40, 220)) for _ in range(_NUM_TOPICS)]
    makers = (_completion, _completion, _choices, _chat, _chat, _schema, _response, _message, _long)
    bank: list[Question] = []
    for index in range(size):
        text = f"{choose.choice(topics)} {_text(choose, choose.randint(1, 30))}"
        path, body = makers[index % len(makers)](text, choose)
        seeded = index % 2 or path == "/v1/messages"
        sampling = (
            {"temperature": 0.9, "top_p": 0.95, "seed": index} if seeded else {"temperature": 0}
        )
        if path == "/v1/messages":  # this API has no seed
            sampling = {"temperature": 0}
        bank.append(Question(index, path, body | sampling))
    return bank


def asked_now(question: Question, choose: random.Random) -> Body:
    """The body with what changes no answer: streamed or not, and what it does to the cache."""
    body = question.body | {"stream": choose.random() < 0.6}
    if question.path in ("/v1/completions", "/v1/chat/completions"):
        body |= choose.choice(_CACHE_FIELDS)
    return body


_CACHE_FIELDS: Sequence[Body] = (
    *({},) * 6,
    {"cache_salt": "salt"},
    {"cache_read": False},
    {"cache_write": False},
    {"retention": [{"start": 0, "end": 1, "priority": 80, "ttl_s": 5}]},
    {"prompt_cache_options": {"mode": "explicit"}},
)


async def answers_of(port: int, key: str, bank: Sequence[Question]) -> list[Answer]:
    """Asked one after the other, not streamed. Raises `RuntimeError` for an error."""
    answers: list[Answer] = []
    for question in bank:
        head, content = await ask(port, "POST", question.path, key, question.body)
        answer = Answer()
        answer.add_body(question.path, json.loads(content))
        if head.status != 200 or answer.error is not None:
            raise RuntimeError(f"{question}: {head.status}, {content[:300]!r}")
        answers.append(answer)
    return answers


def _text(choose: random.Random, num_words: int) -> str:
    return " ".join(choose.choice(_WORDS) for _ in range(num_words))


def _user(text: str) -> list[Body]:
    return [{"role": "user", "content": text}]


def _completion(text: str, choose: random.Random) -> tuple[str, Body]:
    tokens = choose.randint(1, 40)
    return "/v1/completions", {"prompt": text, "max_tokens": tokens, "logprobs": 2}


def _choices(text: str, choose: random.Random) -> tuple[str, Body]:
    path, body = _completion(text, choose)
    return path, body | {"n": choose.randint(2, 4), "stop": ["th", "qq"]}


def _chat(text: str, choose: random.Random) -> tuple[str, Body]:
    scores = {"logprobs": True, "top_logprobs": 2}
    limit = {"max_completion_tokens": choose.randint(1, 40)}
    return "/v1/chat/completions", {"messages": _user(text), **scores, **limit}


def _schema(text: str, choose: random.Random) -> tuple[str, Body]:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}}
    path, body = _chat(text, choose)
    return path, body | {"max_completion_tokens": 48, "response_format": form}


def _response(text: str, choose: random.Random) -> tuple[str, Body]:
    return "/v1/responses", {"input": text, "max_output_tokens": choose.randint(16, 40)}


def _message(text: str, choose: random.Random) -> tuple[str, Body]:
    return "/v1/messages", {
        "model": "soak",
        "messages": _user(text),
        "max_tokens": choose.randint(1, 40),
    }


def _long(text: str, choose: random.Random) -> tuple[str, Body]:
    """For those who leave in the middle, and those who read slowly."""
    limits = {"max_tokens": choose.randint(150, 300), "ignore_eos": True}
    return "/v1/completions", {"prompt": text, "logprobs": 5, **limits}
