"""What clients get wrong: every answer names the field, and the server goes on serving."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache.server.options import limits
from prefixcache.server.options.limits import MAX_BODY_BYTES
from support.serving import MODEL, client_of, metric, served_folder

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
}


@pytest.fixture
async def client(app: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with client_of(app) as client:
        yield client
        for path, body in GOOD.items():
            assert (await client.post(path, json=body)).status_code == 200
        assert metric((await client.get("/metrics")).text, "num_requests_running") == 0


def _error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


BOTH = [
    ("temperature", -0.1, "0.0"),
    ("temperature", 100.5, "100.0"),
    ("temperature", "hot", "number"),
    ("temperature", True, "number"),
    ("top_p", -0.1, "[0.0, 1.0]"),
    ("top_p", 1.01, "1.0"),
    ("top_p", [], "number"),
    ("top_k", -2, "-1"),
    ("top_k", 1.5, "integer"),
    ("min_p", -0.5, "0.0"),
    ("presence_penalty", 2.1, "2.0"),
    ("frequency_penalty", -2.1, "-2.0"),
    ("repetition_penalty", 0, "[0.01"),
    ("n", 0, "1"),
    ("n", 129, "128"),
    ("n", True, "integer"),
    ("seed", 2**70, "seed"),
    ("seed", "1", "integer"),
    ("max_tokens", -2, "0"),
    ("allowed_token_ids", [], "empty"),
    ("allowed_token_ids", [-1], "-1"),
    ("allowed_token_ids", [10**9], "ids are from 0"),
    ("bad_words", [" "], "empty"),
    ("bad_words", "hello", "list"),
    ("truncate_prompt_tokens", 0, "512"),
    ("truncate_prompt_tokens", 513, "512"),
    ("max_tokens", 1.0, "integer"),
    ("max_tokens", "9", "integer"),
    ("max_tokens", False, "integer"),
    ("min_tokens", -1, "0"),
    ("min_tokens", 3, "max_tokens"),
    ("stop", "", "empty"),
    ("stop", ["a", ""], "empty"),
    ("stop", 5, "string"),
    ("stop", [1], "string"),
    ("stop_token_ids", [999], "383"),
    ("stop_token_ids", [-1], "383"),
    ("stop_token_ids", ["x"], "integer"),
    ("logit_bias", {"5": 101}, "100"),
    ("logit_bias", {"999": 1}, "383"),
    ("logit_bias", {"-1": 1}, "383"),
    ("logit_bias", {"x": 1}, "token ids"),
    ("logit_bias", {"5": 1, " 5": 2}, "token ids"),
    ("logit_bias", {"\N{ARABIC-INDIC DIGIT ONE}": 1}, "token ids"),
    ("logit_bias", {"5": "x"}, "number"),
    ("logit_bias", [1], "object"),
    ("stream", "yes", "bool"),
    ("stream", 1, "bool"),
    ("stream_options", {"include_usage": True}, "stream"),
    ("stream_options", 1, "object"),
    ("ignore_eos", 0, "bool"),
    ("prompt_logprobs", -1, "0"),
    ("prompt_logprobs", 21, "20"),
    ("priority", 1.5, "integer"),
    ("cache_salt", 1, "string"),
    ("cache_read", "no", "bool"),
    ("model", 3, "string"),
    ("response_format", {"type": "xml"}, "json_schema"),
    ("response_format", {"type": "json_schema"}, "json_schema is missing"),
    ("structured_outputs", {"regex": "(a"}, "unclosed group"),
    ("structured_outputs", {"structural_tag": "{}"}, "not supported"),
    ("guided_json", {"properties": {"a": {"type": "strin"}}}, "at /properties/a"),
    ("guided_json", "x" * 2**19, "characters"),
    ("guided_choice", [], "not empty"),
    ("guided_grammar", "start: nothing", "nothing"),
    ("use_beam_search", True, "not supported"),
]
OF_COMPLETIONS = [
    ("prompt", None, "token ids"),
    ("prompt", "", "at least one token"),
    ("prompt", [], "not empty"),
    ("prompt", [""], "at least one token"),
    ("prompt", [[]], "at least one token"),
    ("prompt", ["fine", []], "at least one token"),
    ("prompt", 7, "token ids"),
    ("prompt", {"text": "x"}, "token ids"),
    ("prompt", [1, "x"], "[0]"),
    ("prompt", [True, False], "[0]"),
    ("prompt", [1.0], "[0]"),
    ("prompt", [[1], None], "[1]"),
    ("prompt", [-1], "383"),
    ("prompt", [384], "383"),
    ("prompt", [2**40], "no vocabulary"),
    ("prompt", [2**80], "integers"),
    ("prompt", [5] * 512, "512"),
    ("prompt", "word " * 600, "512"),
    ("prompt", "x" * 2_000_000, "2000000"),
    ("prompt", ["x"] * 5000, "4096"),
    ("logprobs", 21, "20"),
    ("logprobs", -1, "0"),
    ("logprobs", True, "integer"),
    ("echo", "yes", "bool"),
    ("suffix", "end", "not supported"),
    ("best_of", 129, "128"),
    ("best_of", 0, "n (1)"),
]
OF_CHAT = [
    ("messages", None, "list"),
    ("messages", [], "at least 1"),
    ("messages", "hi", "list"),
    ("messages", [{"role": "user", "content": "word " * 600}], "512"),
    ("max_completion_tokens", -2, "max_completion_tokens must be"),
    ("best_of", 2, "not supported"),
    ("top_logprobs", 2, "logprobs"),
    ("logprobs", 3, "bool"),
    ("tools", [{"type": "function"}] * 10_000, "1024"),
    ("tool_choice", "required", "needs tools"),
    ("tool_choice", "sometimes", "'required'"),
    ("functions", [{}], "not supported"),
    ("modalities", ["text", "audio"], "not supported"),
    ("chat_template", "{{ 1 }}", "not supported"),
    ("chat_template_kwargs", 1, "object"),
]


@pytest.mark.parametrize("at", range(len(BOTH)), ids=lambda at: str(BOTH[at])[:40])
async def test_a_wrong_value_is_named(client, at):
    """By each path in turn, streamed and not."""
    (field, value, message), path, stream = BOTH[at], [COMPLETIONS, CHAT][at % 2], at // 2 % 2
    extra = {"stream": True} if stream and not field.startswith("stream") else {}
    error = _error(await client.post(path, json=GOOD[path] | extra | {field: value}))
    assert error["param"].split("[")[0].split(".")[0] == field
    if not (stream and field == "prompt_logprobs"):
        assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value", "message"),
    [(COMPLETIONS, *row) for row in OF_COMPLETIONS] + [(CHAT, *row) for row in OF_CHAT],
    ids=lambda v: str(v)[:30],
)
async def test_a_wrong_value_of_one_path_is_named(client, path, field, value, message):
    error = _error(await client.post(path, json=GOOD[path] | {field: value}))
    assert error["param"] == field
    assert message in error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "tool_calls": [1]}, "messages[0].tool_calls"),
        ("hi", "messages[0]"),
        ({"role": "user"}, "messages[0].content"),
    ],
)
async def test_a_wrong_message_is_named(client, message, param):
    error = _error(await client.post(CHAT, json={"messages": [message]}))
    assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'{"max_tokens": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"n": 1, "n": 2}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"model": "\\udc00x"}',
        b'{"x": {"\\ud800": 1}}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:25]),
)
async def test_what_is_no_clean_json_is_refused(client, body):
    headers = {"Content-Type": "application/json"}
    path = [COMPLETIONS, CHAT, "/tokenize", "/detokenize"][len(body) % 4]
    error = _error(await client.post(path, content=body, headers=headers))
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_unknown_model_is_not_found(client, path):
    error = _error(await client.post(path, json=GOOD[path] | {"model": "gpt-9"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert MODEL in error["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/completions/"])
async def test_an_unknown_route_is_not_found(client, path):
    assert path in _error(await client.get(path), 404)["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETIONS, "POST"),
        ("GET", "/reset_prefix_cache", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("PUT", "/v1/responses/x", "DELETE, GET"),
    ],
)
async def test_a_wrong_method_is_answered_with_the_right_ones(client, method, path, allowed):
    """RFC 9110, section 15.5.6: all that the resource supports."""
    response = await client.request(method, path)
    _error(response, 405)
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_other_media_types_are_refused(client, media_type):
    headers = {"Content-Type": media_type} if media_type else {}
    response = await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert "application/json" in _error(response, 415)["message"]


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("identity", 200), ("", 200)])
async def test_a_compressed_body_is_refused_by_its_coding(client, coding, status):
    body = json.dumps(GOOD[COMPLETIONS]).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    response = await client.post(
        COMPLETIONS, content=gzip.compress(body) if status == 415 else body, headers=headers
    )
    assert response.status_code == status
    if status == 415:
        error = _error(response, 415)
        assert "'Content-Encoding: gzip'" in error["message"]
        assert error["code"] == "unsupported_encoding"


async def test_a_body_over_the_limit_is_refused_without_being_kept(client):
    mebibyte = b" " * 2**20

    async def body() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield mebibyte

    headers = {"Content-Type": "application/json"}
    tracemalloc.start()
    response = await client.post(COMPLETIONS, content=body(), headers=headers)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert _error(response, 413)["code"] == "body_too_large"
    assert peak < 2 * MAX_BODY_BYTES


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [384]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
async def test_wrong_tokens_are_named(client, path, body, param):
    assert _error(await client.post(path, json=body))["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"stop": ["x"] * 1025}, "stop"),
        (COMPLETIONS, {"stop": ["x" * 70, *["y" * 70] * 1000]}, "stop"),
        (CHAT, {"stop": "x" * 70_000}, "stop"),
        (CHAT, {"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        (CHAT, {"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        (CHAT, {"messages": [GOOD[CHAT]["messages"][0]] * 4097}, "messages"),
        ("/tokenize", {"messages": [GOOD[CHAT]["messages"][0]] * 4097}, "messages"),
        (COMPLETIONS, {"cache_salt": "x" * 1025}, "cache_salt"),
        (COMPLETIONS, {"prompt": [[5]] * 33, "n": 125}, "n"),
        ("/prefix_cache/probe", {"prompt": [[5]] * 4097}, "prompt"),
        ("/detokenize", {"tokens": [5] * (2**20 + 1)}, "tokens"),
        (COMPLETIONS, {"user": [""] * 2**16}, "user"),
        (CHAT, {"chat_template_kwargs": {str(n): n for n in range(2**16)}}, "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_is_too_long_is_named_with_its_limit(client, path, fields, param):
    error = _error(await client.post(path, json=GOOD.get(path, {}) | fields))
    assert error["param"] == param
    assert any(number in error["message"] for number in _LIMITS), error["message"]


_LIMITS = [str(value) for name, value in vars(limits).items() if name.startswith("MAX_")]


async def test_as_much_as_the_limits_allow_is_served(client):
    body = {
        "prompt": "hello",
        "max_tokens": 1,
        "stop": [f"{number:064}" for number in range(1024)],
        "stop_token_ids": [5] * 1024,
        "logit_bias": {str(number): -1 for number in range(383)},
        "cache_salt": "x" * 1024,
        "user": [0] * 1_000_000,
    }
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200


async def test_the_context_length_error_says_both_numbers(client):
    error = _error(await client.post(COMPLETIONS, json={"prompt": [5] * 600, "max_tokens": 7}))
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert "600" in error["message"]


@pytest.mark.parametrize(("words", "found"), [(600, True), (6, False)])
async def test_a_prompt_that_is_too_long_is_named_as_anthropic_does(tiny_checkpoint, words, found):
    """Clients that read it shorten the chat, which is no help where the answer is too long."""
    messages = [{"role": "user", "content": "a b " * words}]
    body = {"model": "tiny", "max_tokens": 600, "messages": messages}
    strict = {"clamps_max_tokens": False}
    async with served_folder(tiny_checkpoint(), served=strict) as (client, _):
        answer = await client.post("/v1/messages", json=body)
    message = answer.json()["error"]["message"]
    assert message.startswith("prompt is too long: ") == found
    assert "This model's maximum context length is 512" in message


_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 600), st.floats(allow_nan=False), st.text(max_size=8)
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_FIELDS = sorted({field for field, _, _ in [*BOTH, *OF_COMPLETIONS, *OF_CHAT]})
_bodies = st.dictionaries(
    st.sampled_from([*_FIELDS, "logprobs", "echo", "add_special_tokens"]), _values
)


@given(body=_bodies, path=st.sampled_from([COMPLETIONS, CHAT]), keep=st.booleans())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_no_body_makes_the_server_fail(app, body, path, keep):
    body = {**GOOD[path], **body, **(GOOD[path] if keep else {})}
    async with client_of(app) as client:
        headers = {"Content-Type": "application/json"}
        response = await client.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        _error(response, response.status_code)
