"""Streams of /v1/responses and /v1/messages: folded by their clients' rules they are the answer."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache._core import parse_json
from prefixcache.server.anthropic.message_events import MessageForm
from prefixcache.server.http.access import Caller
from prefixcache.server.http.json_text import json_text
from prefixcache.server.jobs.answers import AnswerChoice, Choices, TokenCounts
from prefixcache.server.jobs.context import Call
from prefixcache.server.jobs.job_maker import Job
from prefixcache.server.jobs.logprobs import TextOffsets
from prefixcache.server.openai.response_events import ResponseForm
from prefixcache.text.chat.message import Message, MessageDelta, MessageParser, ToolCallDelta
from prefixcache.types.request import Ending, PromptUse, Request, RequestOutput, TokenLogprobs
from prefixcache.types.sampling_params import SamplingParams

NOTHING: Any = None
texts = st.text("ab", max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[MessageDelta]:
    """Deltas of a message: reasoning, content, calls, content again, in pieces of any size."""
    reasoning = [MessageDelta(reasoning=text) for text in draw(st.lists(texts, max_size=3))]
    content = [MessageDelta(content=text) for text in draw(st.lists(texts, max_size=3))]
    calls = [
        MessageDelta(tool_calls=(call,))
        for index, pieces in enumerate(draw(st.lists(st.lists(texts, max_size=3), max_size=3)))
        for call in (
            ToolCallDelta(index, f"call_{index}", "look"),
            ToolCallDelta(index, arguments='{"x":"'),
            *(ToolCallDelta(index, arguments=piece) for piece in pieces),
            ToolCallDelta(index, arguments='"}'),
        )
    ]
    after = [MessageDelta(content=text) for text in draw(st.lists(texts, max_size=2))]
    deltas = [*reasoning, *content, *calls, *after]
    if draw(st.booleans()) and deltas and not after:
        deltas = [_joined(deltas)]
    return deltas or [MessageDelta()]


def _joined(deltas: list[MessageDelta]) -> MessageDelta:
    return MessageDelta(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(call for delta in deltas for call in delta.tool_calls),
    )


def test_log_probabilities_are_reported_of_content_alone() -> None:
    def known(token_id: int) -> list[TokenLogprobs]:
        return [TokenLogprobs(token_id, -0.5, 1, (), ())]

    call = MessageDelta(tool_calls=(ToolCallDelta(0, "c", "look", "{}"),))
    message, nothing = Message(), MessageDelta()
    steps = [
        (MessageDelta(reasoning="so"), []),
        (nothing, []),  # a marker's beginning
        (MessageDelta(reasoning="."), []),
        (MessageDelta("a"), [4]),
        (nothing, []),  # half a character
        (MessageDelta("é"), [5, 6]),
        (nothing, []),
        (call, []),
        (MessageDelta("b"), [9]),
    ]
    for number, (delta, reported) in enumerate(steps, 1):
        assert [one.token_id for one in message.add(delta, known(number))] == reported
    assert [one.token_id for one in message.add(nothing, known(10), finished=True)] == [10]
    parts = [(delta.content, [one.token_id for one in kept]) for delta, kept in message.parts()]
    assert parts == [("", []), ("aé", [4, 5, 6]), ("", []), ("b", [9, 10])]


def test_parts_of_a_character_begin_where_it_does() -> None:
    offsets = TextOffsets()
    sky, llama = "天".encode(), "🦙".encode()
    pieces = [
        sky[:1],
        sky[1:],
        b"a",
        llama[:2],
        llama[2:],
        b"b",
        b"",
        sky[:2],
        b"c",
        b"d" + sky[:1],
    ]
    assert [offsets.next(piece) for piece in pieces] == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6]


class Script:
    """A parser that tells the next of some deltas, whatever it is given."""

    in_reasoning = False
    in_markup = False

    def __init__(self, deltas: list[MessageDelta]) -> None:
        self._deltas = iter(deltas)

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        return next(self._deltas)


@pytest.mark.parametrize(("arguments", "reason"), [('{"a": 1}', "tool_calls"), ('{"a": "', "stop")])
def test_a_call_that_a_stop_string_cuts_is_not_to_be_made(arguments: str, reason: str) -> None:
    call = MessageDelta(tool_calls=(ToolCallDelta(0, "c", "look", arguments),))
    choice = AnswerChoice(0, 3, lambda: Script([call]))
    choice.add(RequestOutput(request_id="r", ending=Ending("stop", "city")))
    assert choice.finish_reason == reason
    form = ResponseForm(mock.Mock(), {}, None, lambda _: None)
    (item,) = form.body(_job(reason), [choice])["output"]
    assert item["status"] == ("incomplete" if reason == "stop" else "completed")


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ('{"a": "\\ud83d"}', {}),
        ('{"a": ' * 5000 + "1" + "}" * 5000, {}),
        ('{"a": 1e999, "b": 2}', {"a": None, "b": 2}),
        ('{"a": 1', {}),
    ],
    ids=["pair", "half-a-pair", "deep", "infinity", "cut"],
)
def test_a_message_with_any_arguments_of_a_call_is_json(arguments: str, reported: Any) -> None:
    call = MessageDelta(tool_calls=(ToolCallDelta(0, "c", "look", arguments),))
    choice = AnswerChoice(0, 3, lambda: Script([call]))
    choice.add(RequestOutput(request_id="r", ending=Ending("stop")))
    (block,) = parse_json(
        json_text(MessageForm("req").body(_job("stop"), [choice])), max_numbers=99, max_others=99
    )["content"]
    assert block["input"] == reported


def _job(reason: str) -> Job:
    request = Request(request_id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams())
    return Job(
        call=Call(id="id_1", caller=Caller(), receive=mock.AsyncMock(), logprobs=mock.Mock()),
        model="m",
        created=7,
        prompts=(request.prompt_token_ids,),
        params=SamplingParams(),
        requests=(request,),
    )


def _run(form: Any, deltas: list[MessageDelta], reason: str) -> tuple[list[Any], AnswerChoice, Job]:
    job, script = _job(reason), Script(deltas)
    choice = AnswerChoice(0, 3, lambda: script)
    events = copy.deepcopy([*form.begin(job)])
    for number, _ in enumerate(deltas, 1):
        end = reason if number == len(deltas) else None
        output = RequestOutput(request_id="r", token_ids=(5,), text="t", ending=Ending(end))
        choice.add(output)
        events += [copy.deepcopy(event) for event in form.events(job, [choice], 0, output)]
    events += copy.deepcopy([*form.end(job, [choice])])
    return events, choice, job


class Reasoning(MessageParser):
    """A parser to which all is reasoning."""

    in_reasoning = True
    in_markup = False

    def push(self, text: str, *, finished: bool) -> MessageDelta:
        return MessageDelta(reasoning=text)


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.tuples(*[st.integers(0, 9)] * 5)))
def test_tokens_of_all_choices_are_those_of_each(
    n: int, num_prompts: int, outputs: list[tuple[int, int, int, int, int]]
) -> None:
    job = _job("stop")
    requests = tuple(
        dataclasses.replace(job.requests[0], prompt_token_ids=[1] * (index // n + 1))
        for index in range(n * num_prompts)
    )
    params = dataclasses.replace(job.params, n=n)
    choices = Choices(
        dataclasses.replace(job, params=params, requests=requests, new_parser=Reasoning)
    )
    for place, num_tokens, cached, written, restarts in outputs:
        output = RequestOutput(
            request_id="r",
            token_ids=(5,) * num_tokens,
            prompt=PromptUse(
                num_cached_tokens=cached, num_written_tokens=written, hit_staleness=written
            ),
            num_accepted_drafts=cached,
            num_refused_drafts=written,
            restarted=not restarts,
        )
        choices.add(place % len(choices), output)
    firsts = choices[::n]
    assert choices.counts == TokenCounts(
        prompt=sum(choice.num_prompt_tokens for choice in firsts),
        completion=sum(choice.num_tokens for choice in choices),
        cached=sum(choice.first.num_cached_tokens for choice in firsts),
        written=sum(choice.first.num_written_tokens for choice in firsts),
        reasoning=sum(choice.num_reasoning_tokens for choice in choices),
        accepted=sum(choice.last.num_accepted_drafts for choice in choices),
        refused=sum(choice.last.num_refused_drafts for choice in choices),
        stale=sum(
            choice.first.num_cached_tokens for choice in firsts if choice.first.hit_staleness
        ),
        from_disk=sum(choice.first.num_disk_tokens for choice in firsts),
    )


reasons = st.sampled_from(["stop", "length"])


@settings(max_examples=150, deadline=None)
@given(answers(), reasons)
def test_events_of_a_response_fold_into_it(deltas: list[MessageDelta], reason: str) -> None:
    kept: list[Any] = []
    events, choice, job = _run(ResponseForm(NOTHING, {}, None, kept.append), deltas, reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[Any] = []
    for event in events[2:-1]:
        _fold_response(items, event)
    last = events[-1]
    status = "completed" if reason == "stop" else "incomplete"
    assert (last["type"], last["response"]["status"]) == (f"response.{status}", status)
    assert last["response"]["output"] == items == kept[0]["output"]
    assert all(item["status"] == "completed" for item in items[:-1])
    whole = ResponseForm(NOTHING, {}, None, kept.append).body(job, [choice])
    assert _plain(whole["output"]) == _plain(items)
    assert whole["usage"] == last["response"]["usage"]


def _fold_response(items: list[Any], event: dict[str, Any]) -> None:
    """As openai's client accumulates a response."""
    kind, place = event["type"], event["output_index"]
    if kind == "response.output_item.added":
        assert place == len(items)
        assert not items or items[-1]["status"] != "in_progress"
        items.append(event["item"])
        return
    item = items[place]
    assert event.get("item_id", item["id"]) == item["id"]
    assert item["status"] == "in_progress"
    if kind == "response.content_part.added":
        item["content"].append(event["part"])
    elif kind == "response.function_call_arguments.delta":
        item["arguments"] += event["delta"]
    elif kind.endswith(".delta"):
        item["content"][event["content_index"]]["text"] += event["delta"]
    elif kind == "response.function_call_arguments.done":
        assert event["arguments"] == item["arguments"]
    elif kind == "response.content_part.done":
        assert event["part"] == item["content"][0]
    elif kind == "response.output_item.done":
        item["status"] = event["item"]["status"]
        assert event["item"] == item
    else:
        assert event["text"] == item["content"][0]["text"]
        assert kind in ("response.output_text.done", "response.reasoning_text.done")


def _plain(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


@settings(max_examples=150, deadline=None)
@given(answers(), reasons)
def test_events_of_a_message_fold_into_it(deltas: list[MessageDelta], reason: str) -> None:
    events, choice, job = _run(MessageForm("req"), deltas, reason)
    first, *between, delta, last = events
    assert (first["type"], last["type"]) == ("message_start", "message_stop")
    message = first["message"]
    assert message["content"] == []
    partial: dict[int, str] = {}
    is_open = False
    for event in between:
        is_open = _fold_message(message["content"], partial, event, is_open)
    assert not is_open
    for index, text in partial.items():
        message["content"][index]["input"] = json.loads(text)
    message |= delta["delta"] | {"usage": delta["usage"]}
    assert message == MessageForm("req").body(job, [choice])
    calls = bool(choice.message.tool_calls)
    expected = "max_tokens" if reason == "length" else "tool_use" if calls else "end_turn"
    assert message["stop_reason"] == expected


def _fold_message(
    content: list[Any], partial: dict[int, str], event: dict[str, Any], is_open: bool
) -> bool:
    """As Anthropic's client accumulates a message."""
    index = event["index"]
    if event["type"] == "content_block_start":
        assert not is_open
        assert index == len(content)
        content.append(event["content_block"])
        return True
    assert is_open
    assert index == len(content) - 1
    if event["type"] == "content_block_stop":
        return False
    reported = event["delta"]
    if reported["type"] == "input_json_delta":
        partial[index] = partial.get(index, "") + reported["partial_json"]
    else:
        name = {"text_delta": "text", "thinking_delta": "thinking"}[reported["type"]]
        content[index][name] += reported[name]
    return True
