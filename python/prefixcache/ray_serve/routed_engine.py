"""The replicas' engines as one: what endpoints call in the place of an `AsyncEngine`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from threading import Event
from typing import Any

from ray.serve.handle import DeploymentHandle

from prefixcache.ray_serve.answer import Batch, RoutedAnswer
from prefixcache.ray_serve.replicas.commands import CommandClient
from prefixcache.ray_serve.replicas.replica_set import ask_all
from prefixcache.ray_serve.replicas.replica_state import Refused
from prefixcache.text.grammar.answer_matcher import Grammar
from prefixcache.text.grammar.grammars import Grammars
from prefixcache.text.grammar.sandbox import Sandboxes
from prefixcache.types.request import Request
from prefixcache.types.structured_output import StructuredOutput

_PROBE_SECONDS = 30.0


class RoutedEngine:
    """Serves requests by the replicas behind a handle; each ingress has one.

    An `EngineClient`. `max_model_len` and `block_size`, in
    tokens, are those of the replicas.
    """

    def __init__(
        self,
        replicas: DeploymentHandle[Any],
        commands: CommandClient,
        grammars: Grammars,
        *,
        max_model_len: int,
        block_size: int,
    ) -> None:
        self._block_size = block_size
        self._commands = commands
        self.max_model_len = max_model_len
        self._generate = replicas.options(method_name="generate", stream=True)
        self._replicas = replicas
        self._grammars = grammars
        self._sandboxes = Sandboxes()

    async def generate_batches(
        self,
        requests: Sequence[Request],
        *,
        deadline: float | None = None,
        max_unread: int | None = None,
    ) -> AsyncGenerator[Batch, None]:
        """As `AsyncEngine.generate_batches`; returns when a replica has taken the requests."""
        answer = RoutedAnswer(
            self._generate,
            requests,
            commands=self._commands,
            block_size=self._block_size,
            deadline=deadline,
            max_unread=max_unread,
        )
        await answer.begin()
        return answer.batches()

    def find_grammar(self, output: StructuredOutput) -> Grammar | None:
        """As `AsyncEngine.find_grammar`."""
        return self._grammars.find(output)

    def compile(
        self, output: StructuredOutput, cancelled: Event, *, quick: bool = False
    ) -> Grammar:
        """As `AsyncEngine.compile`. The replica that answers compiles it again."""
        sandbox = self._sandboxes.quick if quick else self._sandboxes.thorough
        return self._grammars.compile(output, sandbox, cancelled)

    def check(self, request: Request) -> None:
        """Nothing: the replica checks a request before it takes it."""

    async def probe_all(self, requests: Sequence[Request]) -> list[int]:
        """Most tokens of each prompt that one of the replicas has cached."""
        answers = await ask_all(self._replicas, "probe_all", requests, seconds=_PROBE_SECONDS)
        for answer in answers:
            if isinstance(answer, Refused):
                raise answer.error
        return [max(counts) for counts in zip(*answers, strict=True)] or [0] * len(requests)

    def close(self) -> None:
        """Ends what compiles grammars."""
        self._sandboxes.close()
