"""The answers of `/v1/responses`: output items as they come, and the events that tell of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from prefixcache.config.checked import is_list
from prefixcache.server.http.errors import error_body
from prefixcache.server.jobs.answers import AnswerChoice, comparison_fields, usage
from prefixcache.server.jobs.diagnosis import openai_comparison
from prefixcache.server.jobs.job_maker import Job
from prefixcache.server.jobs.logprobs import chat_logprobs
from prefixcache.server.openai.response_tools import ClientTool, InputText
from prefixcache.text.chat.message import MessageDelta, ToolCallDelta
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import RequestOutput, TokenLogprobs

Event = dict[str, Any]
Item = dict[str, Any]


class OutputItems:
    """Items of an answer in the order in which it says them: one is open at a time.

    Calls are those of `tools`, by the functions that stand for them.
    """

    def __init__(self, tools: Mapping[str, ClientTool]) -> None:
        self.items: list[Item] = []
        self._tools = tools
        self._is_open = False
        self._input = InputText()

    def add(self, delta: MessageDelta, logprobs: Sequence[Any] | None = None) -> Iterator[Event]:
        """The events of what was added."""
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning, None)
        if delta.content or logprobs:
            yield from self._add_text("message", delta.content, logprobs)
        for call in delta.tool_calls:
            yield from self._add_call(call)

    def end(self, status: str) -> Iterator[Event]:
        """The events of the end of the last item."""
        if self._is_open:
            yield from self._close("completed" if status == "completed" else "incomplete")

    def _add_text(self, kind: str, text: str, logprobs: Sequence[Any] | None) -> Iterator[Event]:
        if not (self._is_open and self.items[-1]["type"] == kind):
            yield from self._open(_text_item(kind))
            part = _text_part(kind)
            self.items[-1]["content"].append(part)
            yield self._event("response.content_part.added", content_index=0, part={**part})
        part = self.items[-1]["content"][0]
        part["text"] += text
        more: Event = {}
        if kind == "message":
            more["logprobs"] = [*(logprobs or ())]
            part["logprobs"] += logprobs or ()
        yield self._event(f"{_NAMES[kind]}.delta", content_index=0, delta=text, **more)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            tool = self._tools.get(call.name) or ClientTool(call.name)
            kind = "ctc" if tool.is_custom else "fc"
            item = {"id": _new_id(kind), **tool.item(call.id or ""), "status": "in_progress"}
            self._input = InputText()
            yield from self._open(item)
        if self.items[-1]["type"] == "custom_tool_call":
            yield from self._add_input(self._input.push(call.arguments))
        elif call.arguments:
            self.items[-1]["arguments"] += call.arguments
            yield self._event("response.function_call_arguments.delta", delta=call.arguments)

    def _add_input(self, text: str) -> Iterator[Event]:
        self.items[-1]["input"] += text
        if text:
            yield self._event("response.custom_tool_call_input.delta", delta=text)

    def _open(self, item: Item) -> Iterator[Event]:
        yield from self.end("completed")
        self.items.append(item)
        self._is_open = True
        yield self._item_event("response.output_item.added")

    def _close(self, status: str) -> Iterator[Event]:
        item, self._is_open = self.items[-1], False
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **fields)
        elif item["type"] == "custom_tool_call":
            yield from self._add_input(self._input.end())
            yield self._event("response.custom_tool_call_input.done", input=item["input"])
        else:
            (part,) = item["content"]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            name = f"{_NAMES[item['type']]}.done"
            yield self._event(name, content_index=0, text=part["text"], **logprobs)
            yield self._event("response.content_part.done", content_index=0, part={**part})
        item["status"] = status
        yield self._item_event("response.output_item.done")

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **place, **fields}

    def _item_event(self, kind: str) -> Event:
        item = self.items[-1]
        copied = {name: [*value] if is_list(value) else value for name, value in item.items()}
        return {"type": kind, "output_index": len(self.items) - 1, "item": copied}


_NAMES = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def _text_item(kind: str) -> Item:
    item: Item = {"type": kind, "id": _new_id("msg" if kind == "message" else "rs")}
    item |= {"role": "assistant"} if kind == "message" else {"summary": []}
    return item | {"status": "in_progress", "content": []}


def _text_part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(slots=True)
class ResponseForm:
    """OpenAI's `response` objects and their events, which are numbered.

    `settings` are the members that tell what was asked. `keep` gets the answer once it is
    complete. `tools` are those that answers call, by the functions that stand for them.
    """

    tokenizer: Tokenizer
    settings: Mapping[str, Any]
    num_logprobs: int | None
    keep: Callable[[Mapping[str, Any]], None]
    tools: Mapping[str, ClientTool] = field(default_factory=dict[str, ClientTool])
    is_named: ClassVar[bool] = True
    _output: OutputItems = field(init=False)
    _num_events: int = 0

    def __post_init__(self) -> None:
        self._output = OutputItems(self.tools)

    def body(self, job: Job, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """The whole answer."""
        choice = choices[0]
        for delta, logprobs in choice.message.parts():
            self._take(delta, logprobs)
        status = _status(job, choice)
        for _ in self._output.end(_last_status(choice, status)):
            pass
        return self._complete(job, choice, status)

    def begin(self, job: Job) -> Iterable[Event]:
        """Events before the first output."""
        begun = self._response(job, "in_progress")
        return [
            self._numbered(job, {"type": f"response.{name}", "response": begun})
            for name in ("created", "in_progress")
        ]

    def events(
        self,
        job: Job,
        choices: Sequence[AnswerChoice],
        index: int,
        output: RequestOutput,  # noqa: ARG002
    ) -> Iterator[Event]:
        """Events of what an output added."""
        choice = choices[index]
        for event in self._take(choice.delta, choice.content_logprobs):
            yield self._numbered(job, event)

    def end(self, job: Job, choices: Sequence[AnswerChoice]) -> Iterator[Event]:
        """Events of the last item's end, and the whole answer."""
        choice = choices[0]
        status = _status(job, choice)
        for event in self._output.end(_last_status(choice, status)):
            yield self._numbered(job, event)
        complete = self._complete(job, choice, status)
        kind = status if status in ("completed", "incomplete") else "failed"
        yield self._numbered(job, {"type": f"response.{kind}", "response": complete})

    def failed(self, job: Job, error: Exception) -> Event:
        """The last event of an answer that failed."""
        fields = error_body(error)[1]["error"]
        shown = {"code": fields["code"] or "server_error", "message": fields["message"]}
        response = {**self._response(job, "failed"), "error": shown}
        return self._numbered(job, {"type": "response.failed", "response": response})

    def _take(self, delta: MessageDelta, logprobs: Sequence[TokenLogprobs]) -> list[Event]:
        shown = None
        if self.num_logprobs is not None and logprobs:
            shown = [*chat_logprobs(logprobs, self.num_logprobs, self.tokenizer)["content"]]
        return [*self._output.add(delta, shown)]

    def _complete(self, job: Job, choice: AnswerChoice, status: str) -> dict[str, Any]:
        body = self._response(job, status)
        if status == "incomplete":
            cut = choice.finish_reason == "length"
            body["incomplete_details"] = {
                "reason": "max_output_tokens" if cut else choice.finish_reason or ""
            }
        body["usage"] = _usage(usage(choice.counts))
        body |= comparison_fields(job, "prompt_cache_diagnostics", openai_comparison)
        body["completed_at"] = int(time.time()) if status == "completed" else None
        self.keep(body)
        return body

    def _response(self, job: Job, status: str) -> dict[str, Any]:
        return {
            "id": job.call.id,
            "object": "response",
            "created_at": job.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": job.model,
            **self.settings,
            "output": [*self._output.items],
            "usage": None,
        }

    def _numbered(self, job: Job, event: Event) -> Event:
        number = self._num_events
        self._num_events = job.call.outcome.num_events = number + 1
        return {"type": event["type"], "sequence_number": number, **event}


def _status(job: Job, choice: AnswerChoice) -> str:
    """Where no answer was wanted, the response is complete without one."""
    complete = ("stop", "tool_calls", *(["length"] if job.params.max_tokens == 0 else []))
    if choice.finish_reason in complete:
        return "completed"
    return "cancelled" if choice.finish_reason == "abort" else "incomplete"


def _last_status(choice: AnswerChoice, status: str) -> str:
    """The status of the last item: a call that a stop string cut is not to be made."""
    is_cut = choice.finish_reason == "stop" and choice.message.tool_calls
    return "incomplete" if is_cut else status


def _usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Details of the answer are those of a chat; reasoning is always among them."""
    prompt, completion = counts["prompt_tokens_details"], counts.get("completion_tokens_details")
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": prompt["cached_tokens"],
            "cache_write_tokens": prompt["cache_write_tokens"],
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **(completion or {})},
        "total_tokens": counts["total_tokens"],
    }
