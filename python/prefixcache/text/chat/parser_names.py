"""The names of parsers of answers, as flags take them."""

from __future__ import annotations

from typing import Literal

ToolCallParserName = Literal[
    "apriel",
    "auto",
    "deepseek_v3",
    "deepseek_v31",
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
    "auto",
    "none",
    "apriel",
    "deepseek_r1",
    "gemma4",
    "granite",
    "granite_thinking",
    "mistral",
    "openai_gptoss",
    "qwen3",
    "reka",
    "seed_oss",
]
