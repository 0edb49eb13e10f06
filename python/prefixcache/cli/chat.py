"""The command `prefixcache chat`: a conversation in the terminal with a server that runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from prefixcache.cli.command_line import Given
from prefixcache.config.checked import Checked, PositiveInt
from prefixcache.config.flags import flag
from prefixcache.exceptions import PrefixCacheError

if TYPE_CHECKING:
    import httpx

_HELP = "/reset begins a new conversation, /exit or Ctrl-D ends. Ctrl-C cuts an answer."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(Checked):
    """Whom to talk to, and how it answers."""

    url: str = flag("http://127.0.0.1:8000", "OpenAI-compatible server to talk to.", "Server")
    api_key: str | None = flag(None, "Key of the server.", "Server", secret=True, shown="none")
    model: str | None = flag(
        None, "Name of the model.", "Server", shown="the first that the server lists"
    )
    system: str | None = flag(None, "System message of the conversation.", "Answer", shown="none")
    max_tokens: PositiveInt | None = flag(
        None, "Most tokens of an answer.", "Answer", shown="the server's"
    )
    temperature: float | None = flag(
        None, "0 always takes the likeliest token.", "Answer", shown="the server's"
    )


def chat(given: Given) -> None:
    """Chat with a running server.

    Answers are streamed. After each answer, the cached tokens of its prompt and the speed are
    shown: with a prefix cache, a turn computes only its new tokens.
    """
    import httpx

    from prefixcache.tools.openai_api import server_root

    options = given.make(ChatOptions)
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    timeout = httpx.Timeout(None, connect=10)
    url = server_root(options.url)
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=timeout) as client:
            _Conversation(client, options).run()
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise PrefixCacheError(
            f"No server answers at {options.url} ({error}). Start one with `prefixcache serve`, or "
            "name another by --url."
        ) from error


class _Conversation:
    """Messages so far, each answer among them, and a server that continues them."""

    def __init__(self, client: httpx.Client, options: ChatOptions) -> None:
        from prefixcache.tools.openai_api import first_card, has_hit_thresholds

        self._client = client
        self._options = options
        card = first_card(client.get("/v1/models"), options.model)
        self._model = options.model or str(card["id"])
        self._fields = {"cache_hit_threshold": 0} if has_hit_thresholds(card) else {}
        self._messages = list[dict[str, str]]()
        self._reset()

    def run(self) -> None:
        """Reads questions and answers them until there are no more.

        A refused question ends a conversation that is not typed. Raises `RefusedStreamError`.
        """
        from prefixcache.tools.openai_api import RefusedStreamError

        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with suppress(ImportError):
                import_module("readline")  # input() edits lines with it
            click.echo(f"{self._model} at {self._options.url}. {_HELP}", err=True)
        while (question := _read(is_terminal)) is not None:
            if question == "/reset":
                self._reset()
            elif question == "/exit":
                break
            elif question.startswith("/"):
                click.echo(_HELP, err=True)
            elif question:
                try:
                    self._answer(question)
                except RefusedStreamError as error:
                    if not is_terminal:
                        raise
                    self._messages.pop()
                    click.echo(f"error: {error}", err=True)
                    if error.code == "context_length_exceeded":
                        click.echo("The conversation is too long. " + _HELP, err=True)

    def _reset(self) -> None:
        system = self._options.system
        self._messages[:] = [] if system is None else [{"role": "system", "content": system}]

    def _answer(self, question: str) -> None:
        """Shows the answer as it comes; one that Ctrl-C cuts stays as far as it came."""
        self._messages.append({"role": "user", "content": question})
        begun, first, parts = time.perf_counter(), 0.0, list[str]()
        usage: dict[str, Any] = {}
        try:
            for event in self._events():
                usage = event.get("usage") or usage
                text = _text(event)
                first = first or (time.perf_counter() if text else 0.0)
                parts.append(text)
                click.echo(text, nl=False)
        except KeyboardInterrupt:
            click.echo(" [cut]", nl=False)
        self._messages.append({"role": "assistant", "content": "".join(parts)})
        click.echo()
        if usage:
            click.echo(_speed(usage, begun, first or begun), err=True)

    def _events(self) -> Iterator[dict[str, Any]]:
        from prefixcache.tools.openai_api import check_status, read_event

        body: dict[str, Any] = {
            "model": self._model,
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        for name in ("max_tokens", "temperature"):
            if (value := getattr(self._options, name)) is not None:
                body[name] = value
        with self._client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.is_error:
                reply.read()
                check_status(reply)
            yield from filter(None, map(read_event, reply.iter_lines()))


def _read(is_terminal: bool) -> str | None:
    """The next question; None at the end."""
    try:
        return input("> " if is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _text(event: dict[str, Any]) -> str:
    """What an event adds to the answer. Raises `RefusedStreamError` where it ends it early."""
    from prefixcache.tools.openai_api import check_ending, choice_text

    try:
        choices = event.get("choices") or ()
        text = "".join(map(choice_text, choices))
        endings = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    except (AttributeError, LookupError, TypeError):
        raise PrefixCacheError(f"An event of unknown form: {json.dumps(event)[:300]}") from None
    for ending in endings:
        check_ending(ending)
    return text


def _speed(usage: dict[str, Any], begun: float, first: float) -> str:
    prompt, answer = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", 0)
    seconds = time.perf_counter() - first
    rate = f", {(answer - 1) / seconds:.1f} tokens/s" if answer > 1 and seconds > 0 else ""
    ttft = f"first token after {1000 * (first - begun):.0f} ms"
    return f"[{cached} of {prompt} prompt tokens cached, {ttft}, {answer} tokens{rate}]"
