"""The names of parsers of answers, as flags take them."""

from __future__ import annotations

from typing import Literal

ToolCallParserName = Literal[
    "auto", "hermes", "llama3_json", "mistral", "smollm2", "response_template"
]
ReasoningParserName = Literal["auto", "none", "qwen3", "deepseek_r1"]
