"""Chat templates and vocabularies of the families whose calls of tools and reasoning are read."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
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
# Harmony, as gpt-oss's template writes it: its instructions are the developer's, the analysis of
# an answer is shown until a final message follows, a message has one call, and its result the name
# of the call before.
_HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort | default('medium') }}
{{- '\n\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- set rest = messages %}
{%- if messages[0].role in ('developer', 'system') %}{% set rest = messages[1:] %}{% endif %}
{%- if tools or rest | length < messages | length %}
{{- '<|start|>developer<|message|>' }}
{%- if rest | length < messages | length %}
{{- '# Instructions\n\n' + messages[0].content + '\n\n' }}
{%- endif %}
{%- for tool in tools or [] %}
{{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = ' }}
{{- tool.function.parameters | default({}) | tojson }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for m in rest %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- set later = rest[loop.index:] | selectattr('role', 'equalto', 'assistant') %}
{%- if not (later | rejectattr('tool_calls', 'defined') | list) and (m.thinking or m.content) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- set last.name = call.name %}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- elif m.role == 'user' %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
# What the other families' templates do with calls, between the turns of the plain one.
_CALLS = {
    "lfm2": """\
{%- macro value(v) %}
{{- "'" + v + "'" if v is string else v | tojson if v is mapping else v | string }}
{%- endmacro %}
{%- macro calls(m) %}
{{- '<|tool_call_start|>[' }}
{%- for c in m.tool_calls %}{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}
{{- k + '=' + value(v) }}{{ ', ' if not loop.last }}
{%- endfor %}){{ ', ' if not loop.last }}{% endfor %}
{{- ']<|tool_call_end|>' }}
{%- endmacro %}""",
    "olmo3": """\
{%- macro calls(m) %}
{{- '<function_calls>\n' }}
{%- for c in m.tool_calls %}{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}
{{- k + '=' + ("'" + v + "'" if v is string else v | tojson) }}{{ ', ' if not loop.last }}
{%- endfor %}){{ '\n' if not loop.last }}{% endfor %}
{{- '\n</function_calls>' }}
{%- endmacro %}""",
    "qwen3-coder": """\
{%- macro calls(m) %}
{%- for c in m.tool_calls %}
{{- '\n' if m.content or not loop.first }}
{{- '<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}""",
    "gemma4": """\
{%- macro value(v) %}
{%- if v is string %}{{ '<|"|>' + v + '<|"|>' }}
{%- elif v is mapping %}{
{%- for k, one in v | dictsort %}{{ k }}:{{ value(one) }}{{ ',' if not loop.last }}{% endfor %}}
{%- elif v is iterable %}[
{%- for one in v %}{{ value(one) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ v | tojson }}{% endif %}
{%- endmacro %}
{%- macro calls(m) %}
{%- for c in m.tool_calls %}
{{- '<|tool_call>call:' + c.function.name + value(c.function.arguments) + '<tool_call|>' }}
{%- endfor %}
{%- endmacro %}""",
    "phi4-mini": """\
{%- macro calls(m) %}
{{- '<|tool_call|>' + m.tool_calls | map(attribute='function') | list | tojson }}
{{- '<|/tool_call|>' }}
{%- endmacro %}""",
}
_CALLS["mistral-ids"] = """\
{%- macro calls(m) %}
{%- for c in m.tool_calls %}
{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' }}
{{- c.function.arguments | tojson }}
{%- endfor %}
{%- endmacro %}"""
_CALLS["llama3-own"] = """\
{%- macro calls(m) %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- endmacro %}{# <|python_tag|> #}"""
_CALLS["nemotron"] = """\
{%- macro calls(m) %}
{{- '<TOOLCALL>' + m.tool_calls | map(attribute='function') | list | tojson + '</TOOLCALL>' }}
{%- endmacro %}"""
# DeepSeek's write arguments as text, as if they were no object.
_CALLS["deepseek-v31"] = """\
{%- macro calls(m) %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}
{{- '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endmacro %}"""
_CALLS["deepseek-v3"] = (
    _CALLS["deepseek-v31"]
    .replace("begin｜>' + c", "begin｜>function<｜tool▁sep｜>' + c")
    .replace("name + '<｜tool▁sep｜>' +", "name + '\n```json\n' +")
    .replace("'<｜tool▁call▁end｜>' }}", "'\n```<｜tool▁call▁end｜>' }}{{ '\n' if not loop.last }}")
)
_CALLS["apriel"] = """\
{%- macro calls(m) %}
{{- '<tool_calls>[' }}
{%- for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | string }}
{{- '}' }}{{ ', ' if not loop.last }}
{%- endfor %}
{{- ']</tool_calls>' }}
{%- endmacro %}{# [BEGIN FINAL RESPONSE] #}"""
_CALLS["exaone4"] = """\
{%- macro calls(m) %}
{%- for c in m.tool_calls %}
{{- '\n' if m.content or not loop.first }}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson(ensure_ascii=False) | safe }}
{{- '}</tool_call>' }}
{%- endfor %}
{%- endmacro %}{# [|assistant|] #}"""
_CALLS["seed-oss"] = (
    (_CALLS["qwen3-coder"].replace("tool_call>", "seed:tool_call>") + "{# </seed:think> #}")
    .replace("{{- '<parameter=' + k + '>\n'", "{{- '<parameter=' + k + '>'")
    .replace("'\n</parameter>", "'</parameter>")
) + "{% for t in tools or [] %}{{ t.function.parameters.properties.items() | list }}{% endfor %}"
_WITH_CALLS = _LISTED.replace(
    "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ calls(m) }}{% endif %}"
)

TEMPLATES = {
    "smollm2": _PLAIN,
    "qwen2": _HERMES.replace("<think>", "<thought>").replace("</think>", "</thought>"),
    "qwen3": _HERMES,
    "qwen3-thinking": _HERMES.replace("assistant\n' }}", "assistant\n<think>\n' }}"),
    "llama3": _LISTED + "{# <|python_tag|> #}",
    "mistral": _LISTED + "{# [TOOL_CALLS] #}",
    "mistral-named": _LISTED + "{# [TOOL_CALLS] [ARGS] #}",
    # Reasoning is a part of the content.
    "ministral3": (
        _LISTED.replace(
            "{{ m.content }}",
            "{% for p in ([{'text': m.content}] if m.content is string else m.content) %}"
            "{{ '[THINK]' + p['thinking'] + '[/THINK]' if p['thinking'] else p.text }}"
            "{% endfor %}",
        )
        + "{# [TOOL_CALLS] [ARGS] #}"
    ),
    "granite3": _LISTED + "{# <|tool_call|> #}",
    "granite3.2": _LISTED + "{# <|tool_call|> Here is my response: #}",
    "granite3.3": _LISTED + "{# <|tool_call|> </think> <response></response> #}",
    "reka": _PLAIN + "{# </reasoning> #}",
    # As the first of LFM2, which shows no calls of earlier answers.
    "lfm2-own": "<|tool_list_start|>" + _LISTED,
    "lfm2.5-own": "List of tools: [" + _LISTED,
    # SmolLM3's own shows no calls either, and tools under another name.
    "smollm3-own": "{% if xml_tools %}{{ xml_tools }}<tool_call>{% endif %}" + _PLAIN,
    # The first of Gemma 4: results are fields of the message that made the calls.
    "gemma4-own": _CALLS["gemma4"]
    + """\
{%- for m in messages %}
{{- '<|turn>' + m.role + '\n' }}{% if m.tool_calls %}{{ calls(m) }}{% endif %}
{%- for r in m.tool_responses %}
{{- '<|tool_response>response:' + r.name + value({'value': r.response}) + '<tool_response|>' }}
{%- endfor %}
{{- m.content }}{% if m.content or not m.tool_responses %}{{ '<turn|>\n' }}{% endif %}
{%- endfor %}
{%- if not messages[-1].tool_responses %}{{ '<|turn>model\n' }}{% endif %}
{%- if tools %}{% endif %}""",
    "gpt-oss": _HARMONY,
    # As Microsoft's own, which has no variable for tools.
    "phi4-mini-own": """\
{%- for m in messages %}
{{- '<|' + m['role'] + '|>' + m['content'] }}
{%- if m['role'] == 'system' and m['tools'] %}{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    **{family: calls + _WITH_CALLS for family, calls in _CALLS.items()},
    "seed-oss-budget": _LISTED + "<seed:think><seed:cot_budget_reflect>\n{# </seed:think> #}",
    "gemma4-thinking": _CALLS["gemma4"] + _WITH_CALLS + "{# <|channel>thought <channel|> #}",
    "unknown": _LISTED + "{# <tool_call> <arg_key> #}",
    "minimax": _LISTED + "{# <tool_call> <invoke> #}",
    "described": _LISTED,
    "developer": _PLAIN + "{# developer #}",
    # As Mistral's first ones.
    "by-turns": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    + _PLAIN,
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


_MISTRAL = ("[TOOL_CALLS]", "[ARGS]")
_SPECIAL = {
    "mistral": _MISTRAL,
    "mistral-named": _MISTRAL,
    "mistral-ids": (*_MISTRAL, "[CALL_ID]"),
    "ministral3": (*_MISTRAL, "[THINK]", "[/THINK]"),
    "gpt-oss": (
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        *("<|return|>", "<|call|>"),
    ),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    "phi4-mini": ("<|tool_call|>", "<|/tool_call|>"),
    "granite3": ("<|tool_call|>",),
    "deepseek-v31": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
}


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
    special = _SPECIAL.get(family.removesuffix("-thinking").removesuffix("-own"), ())
    backend.add_special_tokens([AddedToken(text) for text in special])
    template = ChatTemplate(TEMPLATES[family])
    return Tokenizer(
        backend,
        special_tokens={"eos_token": "<|return|>" if family == "gpt-oss" else "<|im_end|>"},
        chat_template=template,
        response_template=RESPONSE_TEMPLATE if family == "described" else None,
    )


def with_special_tokens(folder: Path, family: str) -> Path:
    """A copy of a tiny model's folder with a family's template, and its markers as tokens.

    The model needs some rows in addition to the tokenizer's own tokens.
    """
    copy = folder.parent / f"{folder.name}-{family}"
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    backend = Backend.from_file(str(copy / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text) for text in _SPECIAL.get(family, ())])
    backend.save(str(copy / "tokenizer.json"))
    (copy / "chat_template.jinja").write_text(TEMPLATES[family])
    return copy


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
