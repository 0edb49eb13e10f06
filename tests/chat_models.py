"""Chat templates and vocabularies of the families whose calls of tools and reasoning are read."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from prefixcache.text.chat.plan import ChatFormat
from prefixcache.text.tokenization.chat_template import ChatTemplate
from prefixcache.text.tokenization.tokenizer import Tokenizer

_PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What Qwen's templates do, in short: calls, results, and reasoning behind the last question alone.
_HERMES = """\
{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > last_question | default(0) %}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls %}
{{- '\n' if m.content or not loop.first }}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}{% endif %}"""
_LISTED = "{% if tools %}{{ tools | tojson }}{% endif %}" + _PLAIN

TEMPLATES = {
    "smollm2": _PLAIN,
    "qwen2": _HERMES.replace("<think>", "<thought>").replace("</think>", "</thought>"),
    "qwen3": _HERMES,
    "qwen3-thinking": _HERMES.replace("assistant\n' }}", "assistant\n<think>\n' }}"),
    "llama3": _LISTED + "{# <|python_tag|> #}",
    "mistral": _LISTED + "{# [TOOL_CALLS] #}",
    "mistral-named": _LISTED + "{# [TOOL_CALLS] [ARGS] #}",
    "unknown": _LISTED,
    "described": _LISTED,
    "developer": _PLAIN + "{# developer #}",
}

# A form that no parser of ours knows, described as transformers reads it.
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "thinking": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.f}", "arguments": "{content.a}"},
            },
        },
    },
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "required": ["city", "unit"],
            "$defs": {"Unit": {"enum": ["C", "F"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, CLOCK]
QUESTION = [{"role": "user", "content": "What is it like in Rome?"}]


@cache
def tokenizer(family: str) -> Tokenizer:
    """One token a byte, and the family's markers as it has them: special ones show no text."""
    alphabet = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Backend(BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken("<|im_end|>"), AddedToken("<|im_start|>")])
    if family.startswith("qwen"):
        texts = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        backend.add_tokens([AddedToken(text, special=False) for text in texts])
    if family.startswith("mistral"):
        backend.add_special_tokens([AddedToken(text) for text in ("[TOOL_CALLS]", "[ARGS]")])
    template = ChatTemplate(TEMPLATES[family])
    return Tokenizer(
        backend,
        special_tokens={"eos_token": "<|im_end|>"},
        chat_template=template,
        response_template=RESPONSE_TEMPLATE if family == "described" else None,
    )


def chat_format(family: str, **options: Any) -> ChatFormat:
    """How the family's chats are written and read."""
    return ChatFormat(tokenizer(family), **options)


def assistant(*calls: tuple[str, str, Any], **fields: Any) -> dict[str, Any]:
    """A message with these calls: id, name and arguments, which are text or made text."""
    return {
        "role": "assistant",
        "tool_calls": [
            {
                "id": call_id,
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": given if isinstance(given, str) else json.dumps(given),
                },
            }
            for call_id, name, given in calls
        ],
        **fields,
    }
