"""Answers read by transformers, for models that come with a response template of their own."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, cast

from prefixcache.config.checked import is_list, is_object
from prefixcache.exceptions import ModelLoadError, how_to_install
from prefixcache.text.chat.calls.formats import call_id
from prefixcache.text.chat.message import CallDeltas, MessageDelta
from prefixcache.text.chat.tools import ToolUse

logger = logging.getLogger(__name__)

_REASONING = ("thinking", "reasoning", "reasoning_content")


class ResponseTemplate:
    """A checked response template.

    Raises `ModelLoadError` for one that transformers refuses, and where transformers is missing.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        # Imported where a model needs it: transformers takes seconds.
        try:
            from transformers.utils.chat_parsing import ResponseParser
            from transformers.utils.chat_parsing.response_templates import load_response_template  # pyright: ignore[reportUnknownVariableType]
        except ImportError as error:
            raise ModelLoadError(
                "The model's tokenizer_config.json has a response_template, which needs "
                f"transformers: {how_to_install('transformers')}, or name a form of tool calls by "
                "--tool-call-parser."
            ) from error
        try:
            self._spec = load_response_template(dict(spec))
        except (ValueError, TypeError, KeyError) as error:
            raise ModelLoadError(f"The model's response template is broken: {error}") from error
        self._parser = ResponseParser

    def parser(self, prompt: str, use: ToolUse) -> ResponseTemplateParser:
        """A parser of one answer to `prompt`."""
        tools: list[Any] = [dict(tool.spec) for tool in use.tools]
        return ResponseTemplateParser(self._parser(self._spec, prefix=prompt, tools=tools), use)


class ResponseTemplateParser:
    """Text is passed on as it comes, calls when they are whole. What cannot be read is content."""

    in_markup = False

    def __init__(self, parser: Any, use: ToolUse) -> None:
        self.in_reasoning = False
        self._parser = parser
        self._calls_field = None if use.mode == "none" else "tool_calls"
        self._calls = CallDeltas(call_id, None if use.parallel else 1)
        self._unread: list[str] = []  # of a field that is passed on when it is whole
        self._broken = False
        self._follow(parser.initial_events)

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        """What is certain after this text."""
        if self._broken:
            return MessageDelta(text)
        try:
            events = self._parser.feed(text)
            if finished:
                events += self._parser.finalize()[1]
        except (ValueError, KeyError) as error:
            kind = type(error).__name__  # its message quotes the answer
            logger.debug("An answer does not follow its response template (%s).", kind)
            self._broken = True
            return MessageDelta("".join(self._unread) + text)
        return self._follow(events)

    def _follow(self, events: list[dict[str, Any]]) -> MessageDelta:
        content: list[str] = []
        reasoning: list[str] = []
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_chunk":
                other = reasoning if name in _REASONING else self._unread
                (content if name == "content" else other).append(event["text"])
            elif kind == "region_close":
                if name != self._calls_field or not self._read_calls(event["value"]):
                    content += self._unread
                self._unread.clear()
            self.in_reasoning = name in _REASONING and kind != "region_close"
        return MessageDelta("".join(content), "".join(reasoning), self._calls.taken())

    def _read_calls(self, value: object) -> bool:
        """Takes calls; False, and none, where one names no function."""
        listed = value if is_list(value) else [value]
        functions = [tool.get("function") if is_object(tool) else None for tool in listed]
        if not all(
            is_object(function) and isinstance(function.get("name"), str) for function in functions
        ):
            return False
        for function in cast("list[dict[str, Any]]", functions):
            arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
            self._calls.add(self._calls.begin(function["name"]), arguments)
        return True
