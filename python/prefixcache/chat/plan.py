"""A chat as the engine takes it: the prompt's text, the grammar of its answer, and its parser."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixcache.chat.message import MessageParser, PlainParser
from prefixcache.chat.tools import NO_TOOLS, ToolUse
from prefixcache.exceptions import InvalidRequestError
from prefixcache.sampling_params import SamplingParams
from prefixcache.structured_output import StructuredOutput
from prefixcache.tokenization.chat_template import ChatTemplate
from prefixcache.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """What is asked of the engine for one chat, and how its answers are read.

    `new_parser` makes the parser of one answer. With `show_special_tokens` the answer's text must
    hold them, since its format is marked by such tokens.
    """

    prompt: str
    structured_output: StructuredOutput | None = None
    new_parser: Callable[[], MessageParser] = PlainParser
    show_special_tokens: bool = False

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        """The options with what the plan asks for."""
        if self.structured_output is params.structured_output and not self.show_special_tokens:
            return params
        return dataclasses.replace(
            params,
            structured_output=self.structured_output,
            skip_special_tokens=params.skip_special_tokens and not self.show_special_tokens,
        )


class ChatFormat:
    """How one model's chats are written and its answers read. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._template = tokenizer.chat_template

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tool_use: ToolUse = NO_TOOLS,
        structured_output: StructuredOutput | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPlan:
        """The plan of a chat whose messages have OpenAI's form.

        `structured_output` is what the answer's content must look like; `variables` reach the
        template. The rest is as in `ChatTemplate.render`. Takes time that grows with the messages
        and the tools. Raises `InvalidRequestError`, naming the field, for what is wrong.
        """
        if tool_use.tools:
            raise InvalidRequestError(
                "tools is not supported by this server.",
                param="tools",
                code="unsupported_parameter",
            )
        prompt = self._known_template().render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return ChatPlan(prompt=prompt, structured_output=structured_output)

    def _known_template(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequestError("This model has no chat template.", param="messages")
        return self._template
