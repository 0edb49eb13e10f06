"""Recorded dialogues: 40 of tau-bench's airline chats (MIT, see data/LICENSE.tau-bench).

All begin with the same policy. Request k of a chat is all that stands before its k-th answer; the
recorded answer is what follows, so that the prompts are the same for every engine.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Message = dict[str, Any]

_FILE = Path(__file__).parents[1] / "data" / "taubench_airline.jsonl.gz"


def read_dialogues(system_chars: int | None = None) -> list[list[Message]]:
    """The messages of every chat, with so much of the policy."""
    with gzip.open(_FILE, "rt", encoding="utf-8") as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    for chat in chats:
        chat[0]["content"] = chat[0]["content"][:system_chars]
    return chats


def requests_of(chat: list[Message]) -> list[list[Message]]:
    """What is sent for each of the chat's answers, turn by turn."""
    return [chat[:i] for i, message in enumerate(chat) if message["role"] == "assistant"]
