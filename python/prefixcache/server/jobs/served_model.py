"""What the server needs to know of the model it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefixcache.config.model_config import GenerationDefaults
from prefixcache.metrics import MetricsPrefix
from prefixcache.server.options.header_lines import HeaderLines
from prefixcache.text.chat.parser_names import ReasoningParserName, ToolCallParserName
from prefixcache.text.chat.plan import ChatFormat
from prefixcache.text.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it: any of `names` asks for it, the first is shown.

    `batch_invariant` says whether an answer's bits are the same in every batch; None where that
    is not known. `dtype` is the type that it computes in, `kv_dtype` what it keeps keys and values
    as, and `activations` what a CPU multiplies weights in blocks with. `priorities` lets clients
    choose who is served first. `chat` is how chats are written and answers read, by the two parsers
    named, with `template_variables` where requests give no others.

    With `any_name` clients may ask for any other name too. `clamps_max_tokens` shortens answers to
    what the context has room for; without it requests that ask for more are refused.
    `header_lines` are left out of prompts. With
    `strict` an unknown field is an error instead of a warning. `metrics_prefix` is what
    names in `/metrics` begin with. The log shows `num_logged_characters` of a request's prompts.
    With `records_roles` a chat's requests say who wrote which of their tokens. `pooling` is what is
    read of a prompt's last token: "last", "rank", None, or a mode that is not supported. An
    embedding has `hidden_size` numbers.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    root: str = ""
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    created: int = 0
    batch_invariant: bool | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    activations: str = "exact"
    priorities: bool = False
    any_name: bool = False
    clamps_max_tokens: bool = True
    strict: bool = False
    metrics_prefix: MetricsPrefix = "prefixcache"
    num_logged_characters: int = 0
    records_roles: bool = False
    pooling: str | None = None
    hidden_size: int = 0
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    header_lines: HeaderLines = field(default_factory=lambda: HeaderLines(()))
    template_variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chat: ChatFormat = field(init=False)

    def __post_init__(self) -> None:
        chat = ChatFormat(
            self.tokenizer,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            variables=self.template_variables,
        )
        object.__setattr__(self, "chat", chat)
