"""The fields of the requests: OpenAI's, and vLLM's additions.

Values are checked where they are used, once for all endpoints.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from prefixcache.config.checked import shown
from prefixcache.exceptions import wrong
from prefixcache.server.http.body import RequestFields, refuse_unless_harmless
from prefixcache.server.jobs.sampling_fields import SamplingFields
from prefixcache.server.options.limits import MAX_MESSAGES
from prefixcache.text.chat.tools import ToolUse, read_tool_use

# What other APIs take under the name that it has in a chat, ours and vLLM's fields among it.
SAME_AS_CHAT = frozenset({*SamplingFields.model_fields, "chat_template_kwargs"}) - {
    "logprob_start_len",
    "max_tokens",
    "n",
    "prompt_logprobs",
    "return_token_ids",
    "return_weight_versions",
    "stream",
    "stream_options",
}
# OpenAI's; Anthropic's "max" is one more.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`. `prompt`: text, token ids, or a list of either."""

    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        **{
            name: harmless for name, harmless in SamplingFields.refused.items() if name != "best_of"
        },
        "suffix": ("",),
    }

    prompt: Any = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class _Message(BaseModel, strict=True, extra="allow"):
    """One message. Content is text, or parts of type text, which the template's renderer checks."""

    role: str = Field(min_length=1)
    content: str | list[Any] | None = None


class ChatFields(BaseModel):
    """How messages become a prompt."""

    messages: Annotated[list[_Message], Field(fail_fast=True)] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def tool_use(self) -> ToolUse:
        """The tools, and what the answer does with them. Raises `InvalidRequestError`."""
        parallel = self.parallel_tool_calls is not False
        return read_tool_use(self.tools, self.tool_choice, parallel=parallel)

    def template_variables(self) -> dict[str, Any]:
        """What the template is given in addition to messages and tools.

        Raises `InvalidRequestError` for another effort than those of OpenAI and Anthropic.
        """
        effort = self.reasoning_effort
        if effort is not None and effort not in _EFFORTS:
            raise wrong(
                "reasoning_effort", f"must be one of {', '.join(_EFFORTS)}, got {shown(effort)}"
            )
        named = {} if effort is None else {"reasoning_effort": effort}
        return {**named, **(self.chat_template_kwargs or {})}

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages as `ChatTemplate.render` takes them."""
        return [_plain(message, index) for index, message in enumerate(self.messages)]


def _plain(message: _Message, index: int) -> dict[str, Any]:
    field = f"messages[{index}]"
    for name in ("function_call", "audio"):
        refuse_unless_harmless(f"{field}.{name}", (message.model_extra or {}).get(name), ([],))
    return {**message.model_dump(exclude={"content"}), "content": message.content}


class TextPart(BaseModel, strict=True):
    """A part of a text."""

    type: Literal["text"]
    text: str


class Prediction(BaseModel, strict=True):
    """What much of the answer may look like: OpenAI's predicted output."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(SamplingFields, ChatFields):
    """Body of `POST /v1/chat/completions`."""

    no_effect = SamplingFields.no_effect | {"verbosity"}
    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        **SamplingFields.refused,
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "web_search_options": (),
    }

    max_lengths: ClassVar[dict[str, int]] = {
        **SamplingFields.max_lengths,
        "messages": MAX_MESSAGES,
    }

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None
    prediction: Prediction | None = None

    @property
    def given_max_tokens(self) -> int | None:
        """`max_completion_tokens` before its older name; -1 sets no limit."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given


class TokenizeRequest(RequestFields):
    """Body of `POST /tokenize` with a `prompt`."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(RequestFields, ChatFields):
    """Body of `POST /tokenize` with `messages`."""

    max_lengths: ClassVar[dict[str, int]] = {"messages": MAX_MESSAGES}

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestFields):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
