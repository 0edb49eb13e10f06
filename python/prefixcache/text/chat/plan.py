"""A chat as the engine takes it: the prompt's text, the grammar of its answer, and its parser."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefixcache.exceptions import InvalidRequestError, ModelLoadError, wrong
from prefixcache.text.chat.answer_grammar import answer_grammar, tool_grammar
from prefixcache.text.chat.calls.formats import (
    PHI4_MINI,
    SMOLLM2,
    TOOL_FORMATS,
    ToolFormat,
    call_id,
    detected_format,
)
from prefixcache.text.chat.grammars import Markers
from prefixcache.text.chat.harmony.grammar import harmony_grammar
from prefixcache.text.chat.harmony.parser import HarmonyParser
from prefixcache.text.chat.history import read_messages
from prefixcache.text.chat.message import MessageParser, PlainParser
from prefixcache.text.chat.parser_names import ReasoningParserName, ToolCallParserName
from prefixcache.text.chat.prompt_writer import PromptWriter
from prefixcache.text.chat.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    ReasoningStart,
    detected_reasoning,
)
from prefixcache.text.chat.response_template import ResponseTemplate
from prefixcache.text.chat.tools import NO_TOOLS, ToolUse
from prefixcache.text.tokenization.chat_template import ChatTemplate
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

_HARMONY_ENDS = ("<|return|>", "<|call|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """What is asked of the engine for one chat, and how its answers are read.

    `new_parser` makes the parser of one answer. With `show_special_tokens` the answer's text must
    hold them, since its format is marked by such tokens. An answer ends at one of `stop_token_ids`.
    """

    prompt: str
    structured_output: StructuredOutput | None = None
    new_parser: Callable[[], MessageParser] = PlainParser
    show_special_tokens: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        """The options with what the plan asks for."""
        if self.structured_output is params.structured_output and not self.show_special_tokens:
            return params
        return dataclasses.replace(
            params,
            structured_output=self.structured_output,
            skip_special_tokens=params.skip_special_tokens and not self.show_special_tokens,
            stop_token_ids=(*params.stop_token_ids, *self.stop_token_ids),
        )


class ChatFormat:
    """How one model's chats are written and its answers read. Safe to share between threads.

    "auto" takes what the model's chat template tells; a template without tools is given them in
    SmolLM2's form. `variables` reach the template where a chat gives no others. Raises
    `ModelLoadError` for another form where the template knows no tools.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._variables = variables or {}
        self._template = template = tokenizer.chat_template
        self._markers = Markers(tokenizer)
        self._shows_tools = template is not None and template.shows_tools
        # Templates leave out what has a role that they do not know, or show it as they may.
        knows_developer = template is not None and "developer" in template.source
        self._developer = "developer" if knows_developer else "system"
        self._is_harmony = _speaks_harmony(template, tool_call_parser, reasoning_parser)
        self._stop_token_ids = tuple(
            tokenizer.added_token_ids[marker]
            for marker in _HARMONY_ENDS
            if self._is_harmony and marker in tokenizer.added_token_ids
        )
        self._tools = self._tool_format(tool_call_parser)
        self._writer = None
        if template is not None:
            self._writer = PromptWriter(template, self._tools, is_harmony=self._is_harmony)
        self._library = self._response_template(tokenizer, tool_call_parser)
        self._reasoning = self._reasoning_format(reasoning_parser)

    def _tool_format(self, name: ToolCallParserName) -> ToolFormat | None:
        if self._template is None or self._is_harmony:
            return None
        if not self._shows_tools:
            if "<|/tool|>" in self._template.source and name in ("auto", PHI4_MINI.name):
                return PHI4_MINI
            if name not in ("auto", SMOLLM2.name, "response_template"):
                raise ModelLoadError(
                    f"The model's chat template shows no tools, so answers in the form {name!r} "
                    "are not to be expected; tool_call_parser must be auto or smollm2."
                )
            return SMOLLM2
        detected = detected_format(self._template.for_tools)
        if name in TOOL_FORMATS and (detected is None or detected.name != name):
            return TOOL_FORMATS[name]
        return detected

    def _response_template(
        self, tokenizer: Tokenizer, name: ToolCallParserName
    ) -> ResponseTemplate | None:
        """The model's own, where it is asked for or nothing else reads its calls."""
        spec = tokenizer.response_template
        is_read = self._tools is not None or self._template is None or self._is_harmony
        if name != "response_template" and is_read:
            return None
        if spec is not None:
            return ResponseTemplate(spec)
        if name == "response_template":
            raise ModelLoadError(
                "tool_call_parser is response_template, but the model's tokenizer_config.json has "
                "none."
            )
        logger.warning(
            "The model's chat template shows tools in a form that is not known here: requests "
            "with tools are refused. --tool-call-parser names a form."
        )
        return None

    def _reasoning_format(self, name: ReasoningParserName) -> ReasoningFormat | None:
        if name == "auto":
            return None if self._template is None else detected_reasoning(self._template.for_tools)
        return REASONING_FORMATS.get(name)

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
        knows_calls = self._library is not None or self._is_harmony
        calls = None if knows_calls else self._calls(tool_use)
        if self._writer is None:
            raise InvalidRequestError("This model has no chat template.", param="messages")
        prompt = self._writer.write(
            read_messages(messages, developer=self._developer),
            tool_use.tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._variables, **(variables or {})},
        )
        if self._library is not None:
            return _library_plan(self._library, prompt, tool_use, structured_output)
        if self._is_harmony:
            return self._harmony_plan(
                prompt, tool_use, structured_output, in_final=continue_final_message
            )
        reasoning, output, start = self._reasoning, structured_output, ReasoningStart()
        if reasoning is not None:
            begin = reasoning.begin(prompt, continued=continue_final_message)
            start = ReasoningStart(begin, reasoning)
        if calls is None:
            grammar = answer_grammar(output, start, self._markers)
        else:
            grammar = tool_grammar(tool_use, calls, output, start, self._markers)
        return ChatPlan(
            prompt=prompt,
            structured_output=grammar,
            new_parser=partial(_parser, calls, tool_use, start),
            show_special_tokens=self._marked_specially(calls, start),
        )

    def _harmony_plan(
        self, prompt: str, use: ToolUse, output: StructuredOutput | None, *, in_final: bool
    ) -> ChatPlan:
        return ChatPlan(
            prompt=prompt,
            structured_output=harmony_grammar(use, output, self._markers, in_final=in_final),
            new_parser=partial(HarmonyParser, use, call_id, in_final=in_final),
            show_special_tokens=True,
            stop_token_ids=self._stop_token_ids,
        )

    def _calls(self, use: ToolUse) -> ToolFormat | None:
        """The format in which calls are read; None where there are none."""
        if use.mode == "none":
            return None
        if self._tools is None:
            raise InvalidRequestError(
                "tools: how this model writes calls of tools is not known; --tool-call-parser "
                f"names one of {', '.join(TOOL_FORMATS)}.",
                param="tools",
                code="unsupported_parameter",
            )
        return self._tools

    def _marked_specially(self, calls: ToolFormat | None, start: ReasoningStart) -> bool:
        markers = () if calls is None else calls.markers
        tags = start.reasoning.opening, start.reasoning.closing
        reasoning = () if start.begin == "outside" else tags
        return any(map(self._markers.is_special, (*markers, *reasoning)))


def _library_plan(
    library: ResponseTemplate, prompt: str, use: ToolUse, output: StructuredOutput | None
) -> ChatPlan:
    """A response template tells how answers are read, not how they are written."""
    if use.mode == "required":
        raise wrong(
            "tool_choice",
            "must be 'none' or 'auto': this model's calls cannot be forced, since they "
            "are known by its response template alone",
        )
    return ChatPlan(
        prompt=prompt,
        structured_output=output,
        new_parser=partial(library.parser, prompt, use),
        show_special_tokens=True,
    )


def _parser(calls: ToolFormat | None, use: ToolUse, start: ReasoningStart) -> MessageParser:
    inner = PlainParser() if calls is None else calls.parser(use)
    return inner if start.begin == "outside" else ReasoningParser(inner, start)


def _speaks_harmony(
    template: ChatTemplate | None, calls: ToolCallParserName, reasoning: ReasoningParserName
) -> bool:
    """Whether answers come in channels.

    Raises `ModelLoadError` where a parser is named that reads them and the template shows none.
    """
    signs = ("<|channel|>", "<|message|>", "<|call|>")
    shown = template is not None and all(sign in template.source for sign in signs)
    if not shown and (calls == "openai" or reasoning == "openai_gptoss"):
        raise ModelLoadError(
            "The model's chat template has no channels, so answers in the form of gpt-oss are not "
            "to be expected; tool_call_parser and reasoning_parser must name other ones, or auto."
        )
    return shown and calls in ("auto", "openai")
