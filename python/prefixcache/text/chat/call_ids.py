"""Ids of calls in the length that a model's chat template demands."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from typing import Any

from prefixcache.exceptions import InvalidRequestError
from prefixcache.text.tokenization.chat_template import ChatTemplate

_Message = dict[str, Any]

_CHARACTERS = string.ascii_letters + string.digits
_LENGTH = 9  # Mistral's templates raise on other ones


class CallIds:
    """Finds out which ids a template refuses, and writes others for those."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        usual = self._takes(_CHARACTERS[:_LENGTH])
        self._refuses_longer = usual and not self._takes("call_0123456789abcdef01234567")
        self._refuses_shorter = usual and not self._takes("c1")

    def fitted(self, messages: Sequence[_Message]) -> list[_Message]:
        """The messages with ids that the template takes: those of results fit their calls."""
        if not (self._refuses_longer or self._refuses_shorter):
            return [*messages]
        return [self._with_ids(message) for message in messages]

    def _with_ids(self, message: _Message) -> _Message:
        if message.get("role") == "tool":
            return {**message, "tool_call_id": self._fitted(message["tool_call_id"])}
        calls: list[_Message] | None = message.get("tool_calls")
        if not calls:
            return message
        return {**message, "tool_calls": [{**c, "id": self._fitted(c["id"])} for c in calls]}

    def _fitted(self, call_id: str) -> str:
        longer = len(call_id) - _LENGTH
        fits = not longer or not (self._refuses_longer if longer > 0 else self._refuses_shorter)
        return call_id if fits else _hashed(call_id)

    def _takes(self, call_id: str) -> bool:
        function: dict[str, Any] = {"name": "f", "arguments": {}}
        call = {"id": call_id, "type": "function", "function": function}
        question = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call_id, "name": "f", "content": "c"}
        try:
            self._template.render([question, answer, result])
        except InvalidRequestError:
            return False
        return True


def _hashed(call_id: str) -> str:
    """Nine letters and digits, the same for the same id."""
    digest = hashlib.sha256(call_id.encode(errors="surrogatepass")).digest()
    return "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in digest[:_LENGTH])
