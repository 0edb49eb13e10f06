"""The names of parsers of answers, as flags take them."""

from __future__ import annotations

from typing import Literal

ToolCallParserName = Literal[
    "auto",
    "gemma4",
    "granite",
    "hermes",
    "lfm2",
    "llama3_json",
    "mistral",
    "nemotron_json",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "qwen3_coder",
    "seed_oss",
    "smollm2",
    "response_template",
]
ReasoningParserName = Literal[
    "auto", "none", "deepseek_r1", "gemma4", "mistral", "openai_gptoss", "qwen3", "seed_oss"
]
