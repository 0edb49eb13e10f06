"""Clients of every kind, polite and not, and the judgement of what each got."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soak.answers import Answer, EventReader
from soak.bank import Question, asked_now
from soak.faults import INJECTED
from soak.lives import Life, Lives
from soak.tally import Tally
from soak.wire import BadReplyError, CutReplyError, Head, NoReplyError, Wire, request_bytes

REFUSALS = (429, 503)
# Longer than all requests of a connection may take on a busy machine; what takes longer hangs.
_HANG_SECONDS = 360
_MOST_RETRY_SECONDS = 10
_MOST_ON_A_CONNECTION = 4
_SLOW_BUFFER = 2048
# After which slow readers read what is left as fast as they can.
_DAWDLE_SECONDS = 20
_REPLACED = re.compile("weights_replaced|weights were replaced")
_CONNECTION_ERRORS = (BadReplyError, ConnectionError, asyncio.LimitOverrunError)

Expected = Mapping[str, Sequence[Answer]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that the server gives a request to come, and to be answered, and an idle client."""

    read_seconds: float
    request_seconds: float
    keep_alive_seconds: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question to a process, at a monotonic time, by a client who reads slowly or not."""

    life: Life
    question: Question
    since: float
    is_slow: bool


class Crowd:
    """The clients. `may_ask` is closed while the server is to be quiet; `hurry` ends dawdling."""

    def __init__(
        self,
        lives: Lives,
        tally: Tally,
        bank: Sequence[Question],
        expected: Expected,
        keys: Sequence[str],
        choose: random.Random,
        limits: Limits,
    ) -> None:
        self._lives = lives
        self._tally = tally
        self._bank = bank
        self._expected = expected
        self._keys = keys
        self._choose = choose
        self._limits = limits
        self.may_ask = asyncio.Event()
        self.hurry = asyncio.Event()
        self.num_active = 0
        kinds: dict[Callable[[Life], Awaitable[None]], int] = {
            self._patient: 52,
            self._leaver: 26,
            self._slow: 6,
            self._half_open: 6,
            self._half_closer: 4,
            self._odd: 6,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    async def visit(self) -> None:
        """One client: a connection or a few, until it has what it came for."""
        life = self._lives.current
        if life is None or not self.may_ask.is_set():
            return
        self.num_active += 1
        since = time.monotonic()
        kind = self._choose.choices(self._kinds, self._weights)[0]
        try:
            await asyncio.wait_for(kind(life), _HANG_SECONDS)
        except asyncio.TimeoutError:
            self._tally.blame("a client hangs", kind=kind.__name__)
        except _CONNECTION_ERRORS as error:
            self._judge_broken(life, since, kind.__name__, error)
        except Exception as error:  # noqa: BLE001 - a bug of the soak must not stop it
            self._tally.blame("the soak cannot read an answer", kind=kind.__name__, error=error)
        finally:
            self.num_active -= 1

    async def insist(self, until: float) -> None:
        """Asks again as soon as the server allows, until that monotonic time."""
        while time.monotonic() < until:
            if self.may_ask.is_set():
                await self.visit()
            await asyncio.sleep(self._choose.uniform(0.001, 0.05))

    # The kinds of clients.

    async def _patient(self, life: Life) -> None:
        """Asks a few times on one connection and reads everything.

        A client that did not run for a while reads an answer late, and asks again on a connection
        that the server has closed by then, as it may.
        """
        wire = await Wire.open(life.port)
        former = math.inf
        try:
            for _ in range(self._choose.randint(1, _MOST_ON_A_CONNECTION)):
                since = time.monotonic()
                try:
                    head = await self._ask(wire, life, self._choose.choice(self._bank))
                except (NoReplyError, ConnectionError):
                    if since - former < self._limits.keep_alive_seconds:
                        raise
                    self._tally.add("came too late for its connection", since=since, timed=False)
                    break
                former = since
                if not (wire.is_reusable and self.may_ask.is_set() and head.status < 400):
                    break
        finally:
            wire.close()

    async def _leaver(self, life: Life) -> None:
        """Leaves at a random moment: while it asks, while it waits, or inside the answer."""
        wire = await Wire.open(life.port)
        since = time.monotonic()
        question, body = self._question()
        content = b"".join(request_bytes("POST", question.path, self._key(), body))
        moment = self._choose.choice(("asking", "waiting", "reading", "reading"))
        try:
            if moment == "asking":
                wire.send(content[: self._choose.randrange(len(content))])
                await asyncio.sleep(self._choose.uniform(0, 0.2))
            else:
                wire.send(content)
            if moment == "waiting":
                await asyncio.sleep(self._choose.expovariate(5))
            if moment == "reading":
                parts = self._choose.randint(0, 12)
                await self._read(wire, life, question, body, since, leave_after=parts)
            self._tally.add("left", since=since, timed=False)
        finally:
            self._leave(wire)

    def _leave(self, wire: Wire) -> None:
        if self._choose.random() < 0.5:
            wire.abort()
        else:
            wire.close()

    async def _slow(self, life: Life) -> None:
        """Reads a long answer in small sips; the server may lose patience."""
        wire = await Wire.open(life.port, receive_buffer=_SLOW_BUFFER)
        since = time.monotonic()
        question = self._choose.choice([q for q in self._bank if q.body.get("logprobs") == 5])
        body = question.body | {"stream": True}
        try:
            wire.send(b"".join(request_bytes("POST", question.path, self._key(), body)))
            pause = self._choose.choice((0.02, 0.2, 2.0))
            await self._read(wire, life, question, body, since, pause=pause)
        except _CONNECTION_ERRORS:
            self._tally.add("cut while reading slowly", since=since, timed=False)
        finally:
            wire.abort()

    async def _half_open(self, life: Life) -> None:
        """Says nothing, or a part of a request, until the server ends it, as it must in time."""
        wire = await Wire.open(life.port)
        since = time.monotonic()
        question, body = self._question()
        content = b"".join(request_bytes("POST", question.path, self._key(), body))
        try:
            wire.send(content[: self._choose.choice((0, 20, len(content) // 2))])
            ended = asyncio.ensure_future(wire.reader.read())
            hurried = asyncio.ensure_future(self.hurry.wait())
            both = {ended, hurried}
            await asyncio.wait(
                both,
                timeout=3 * self._limits.read_seconds + 30,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not (ended.done() or hurried.done()):
                self._tally.blame("a half-open connection was kept")
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            self._tally.add("half-open", since=since, timed=False)
        finally:
            wire.abort()

    async def _half_closer(self, life: Life) -> None:
        """Ends its own direction once it has asked, which the server may take for leaving."""
        wire = await Wire.open(life.port)
        since = time.monotonic()
        question, body = self._question()
        try:
            wire.send(b"".join(request_bytes("POST", question.path, self._key(), body)))
            wire.writer.write_eof()
            await self._read(wire, life, question, body, since)
        except _CONNECTION_ERRORS:
            self._tally.add("cut after a half-close", since=since, timed=False)
        finally:
            wire.close()

    async def _odd(self, life: Life) -> None:
        """What is answered without the model, and what is wrong."""
        since = time.monotonic()
        method, path, body, expected = self._choose.choice(_ODDITIES)
        wire = await Wire.open(life.port)
        try:
            wire.send(b"".join(request_bytes(method, path, self._key(), body)))
            head = await wire.head()
            content = b"".join([part async for part in wire.parts()])
        finally:
            wire.close()
        if head.status in REFUSALS:
            self._judge_refusal(life, head, content, since)
        elif head.status == 500 and life.was_disturbed("fault", since, time.monotonic()):
            self._tally.add("failed by an injected fault", since=since, timed=False)
        elif head.status == expected:
            self._tally.add("other endpoints", since=since, timed=False)
        else:
            self._tally.blame("unexpected status", path=path, status=head.status, body=content)

    # One request.

    def _question(self) -> tuple[Question, dict[str, Any]]:
        question = self._choose.choice(self._bank)
        return question, asked_now(question, self._choose)

    def _key(self) -> str:
        return self._choose.choice(self._keys)

    async def _ask(self, wire: Wire, life: Life, question: Question) -> Head:
        since = time.monotonic()
        body = asked_now(question, self._choose)
        wire.send(b"".join(request_bytes("POST", question.path, self._key(), body)))
        head = await self._read(wire, life, question, body, since)
        if head.status in REFUSALS:
            seconds = min(float(head.headers.get("retry-after", 1)), _MOST_RETRY_SECONDS)
            await asyncio.sleep(seconds * self._choose.uniform(0.5, 1))
        return head

    async def _read(
        self,
        wire: Wire,
        life: Life,
        question: Question,
        body: Mapping[str, Any],
        since: float,
        *,
        leave_after: int | None = None,
        pause: float = 0,
    ) -> Head:
        """Reads an answer, or its beginning, and judges it."""
        head = await wire.head()
        answer, events, first = Answer(), EventReader(), None
        content = bytearray()
        is_stream = head.headers.get("content-type", "").startswith("text/event-stream")
        num_parts = 0
        async for part in wire.parts():
            first = first or time.monotonic() - since
            if is_stream:
                for one in events.push(part):
                    answer.add_event(question.path, one)
            else:
                content += part
            num_parts += 1
            if leave_after is not None and num_parts > leave_after:
                break
            if pause and not self.hurry.is_set() and time.monotonic() < since + _DAWDLE_SECONDS:
                await asyncio.sleep(pause)
        answer.is_complete |= events.is_done
        if content and (leave_after is None or num_parts <= leave_after):
            answer.add_body(question.path, json.loads(content))
        asked = _Asked(life, question, since, is_slow=pause > 0)
        self._judge(asked, head, answer, bytes(content), first)
        return head

    # Judgement.

    def _judge(
        self,
        asked: _Asked,
        head: Head,
        answer: Answer,
        content: bytes,
        first_token: float | None,
    ) -> None:
        life, question, since, now = asked.life, asked.question, asked.since, time.monotonic()
        if head.status in REFUSALS:
            self._judge_refusal(life, head, content, since)
            return
        if answer.error is not None or head.status != 200:
            self._judge_error(asked, head, answer)
            return
        names = life.weights_between(since, now)
        rights = self._rights(question, names)
        if answer.equals_one_of(rights):
            outcome = "equal"
        elif not answer.is_complete and answer.begins_one_of(rights):
            outcome = "equal as far as it was read"
        elif life.was_disturbed("abort", since, now) and _was_aborted(answer, rights):
            outcome = "aborted by a command"
        else:
            self._blame("an answer differs", question, answer, names)
            return
        life.num_served += 1
        self._tally.add(outcome, since=since, first_token=first_token)

    def _judge_refusal(self, life: Life, head: Head, content: bytes, since: float) -> None:
        """Whoever is refused gets the time to retry."""
        retry = head.headers.get("retry-after", "")
        code = _error_of(content).get("code") or "no code"
        if not (retry.isdigit() and int(retry) > 0):
            self._tally.blame("a refusal without Retry-After", status=head.status, body=content)
        elif code == "server_stopping" and life.ending is None:
            self._tally.blame("a server that does not stop says that it does")
        else:
            self._tally.add(f"refused: {head.status} {code}", since=since)

    def _judge_error(self, asked: _Asked, head: Head, answer: Answer) -> None:
        life, question, since, now = asked.life, asked.question, asked.since, time.monotonic()
        error = answer.error or {}
        reported = f"{error.get('code')} {error.get('message')}"
        names = life.weights_between(since, now)
        if not answer.begins_one_of(self._rights(question, names)):
            self._blame("an answer differs before its error", question, answer, names)
        elif _REPLACED.search(reported) and life.was_disturbed("weights", since, now):
            self._tally.add("restarted after new weights, with an error", since=since)
        elif "asleep" in reported and life.was_disturbed("sleep", since, now):
            self._tally.add("refused: asleep, with an error in its stream", since=since)
        elif "shutting down" in reported and life.ending is not None:
            self._tally.add("cut by SIGTERM, with an error", since=since)
        elif "timeout" in reported and now - since >= self._limits.request_seconds:
            self._tally.add("cut by --request-timeout, with an error", since=since)
        elif "slow_reader" in reported and asked.is_slow:
            self._tally.add("cut while reading slowly, with an error", since=since, timed=False)
        elif INJECTED in reported or life.was_disturbed("fault", since, now):
            self._tally.add("failed by an injected fault", since=since)
        else:
            about = f"{question.index} {question.path}"
            self._tally.blame("an error", asked=about, status=head.status, error=error)

    def _rights(self, question: Question, names: set[str]) -> list[Answer]:
        return [self._expected[name][question.index] for name in sorted(names)]

    def _blame(self, what: str, question: Question, answer: Answer, names: set[str]) -> None:
        rights = {name: self._expected[name][question.index] for name in names}
        differences = {name: answer.difference(right) for name, right in rights.items()}
        about = f"{question.index} {question.path}"
        self._tally.blame(what, asked=about, found=differences, error=answer.error)

    def _judge_broken(self, life: Life, since: float, kind: str, error: Exception) -> None:
        """A connection that ended without an answer."""
        if life.was_killed:
            self._tally.add("cut by SIGKILL", since=since, timed=False)
        elif life.ending is not None and not isinstance(error, CutReplyError):
            # It came when the server had closed its port, or its idle connections.
            self._tally.add("came too late for SIGTERM's answer", since=since, timed=False)
        else:
            self._tally.blame("a connection broke", kind=kind, error=error, ending=life.ending)


_ODDITIES: Sequence[tuple[str, str, Any, int]] = (
    ("GET", "/health", None, 200),
    ("GET", "/ready", None, 200),
    ("GET", "/ping", None, 200),
    ("GET", "/v1/models", None, 200),
    ("GET", "/version", None, 200),
    ("GET", "/metrics", None, 403),
    ("GET", "/nothing", None, 404),
    ("POST", "/tokenize", {"prompt": "a block of the cache"}, 200),
    ("POST", "/prefix_cache/probe", {"prompt": "a block", "cache_salt": "s"}, 200),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": -2}, 400),
    ("POST", "/v1/completions", {"prompt": "x" * 20000, "max_tokens": 1}, 400),
    ("POST", "/v1/chat/completions", {"messages": "x"}, 400),
)


def _was_aborted(answer: Answer, rights: Sequence[Answer]) -> bool:
    begun = answer.without_aborts()
    return begun is not None and begun.begins_one_of(rights)


def _error_of(content: bytes) -> dict[str, Any]:
    try:
        return json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
