"""Compiled grammars by their content, each compiled once."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple
from weakref import WeakValueDictionary

from prefixcache.exceptions import GrammarError, InvalidRequestError, SlowGrammarError
from prefixcache.text.grammar.answer_matcher import Grammar, Trigger
from prefixcache.text.grammar.mask_workers import MaskWorkers
from prefixcache.text.grammar.sandbox import Sandbox
from prefixcache.text.grammar.vocabulary import Vocabulary
from prefixcache.types.structured_output import StructuredOutput

_MOST_KEPT = 64
_MOST_BYTES_KEPT = 2**28
_MOST_TRIGGERS = 8
_MOST_REFUSED = 1024
_MOST_LINES = 8
_MOST_CHARACTERS = 160  # of a line


class Grammars:
    """The grammars of one vocabulary. Safe to share between threads.

    Those used last are kept, and every one that an answer follows. `make_vocabulary` is called
    with the first grammar.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self._workers = MaskWorkers()
        self._lock = threading.Lock()
        self._compiling: dict[StructuredOutput, threading.Lock] = {}
        self._known: WeakValueDictionary[StructuredOutput, Grammar] = WeakValueDictionary()
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # by digests
        self._triggers: OrderedDict[str, Trigger] = OrderedDict()

    @property
    def vocabulary(self) -> Vocabulary:
        """What the grammars are compiled for."""
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def find(self, output: StructuredOutput) -> Grammar | None:
        """The grammar if it is compiled already."""
        with self._lock:
            grammar = self._known.get(output)
            if grammar is not None:
                self._keep(output, grammar)
            return grammar

    def compile(
        self,
        output: StructuredOutput,
        sandbox: Sandbox | None = None,
        cancelled: threading.Event | None = None,
    ) -> Grammar:
        """The grammar, which takes a while when it is new.

        What others have written should go through a `sandbox` first, which bounds time and memory.
        Raises `InvalidRequestError` that says what is wrong, at once for what was refused before,
        and what `Sandbox.run` does.
        """
        grammar = self.find(output)
        if grammar is not None:
            return grammar
        with self._lock:
            compiling = self._compiling.setdefault(output, threading.Lock())
        # Others that want the same one wait for it, but not in the way of quick ones.
        if not compiling.acquire(blocking=sandbox is None or not sandbox.is_quick):
            raise SlowGrammarError("it is being compiled")
        try:
            return self.find(output) or self._compile(output, sandbox, cancelled)
        finally:
            compiling.release()
            with self._lock:
                self._compiling.pop(output, None)

    def _compile(
        self,
        output: StructuredOutput,
        sandbox: Sandbox | None,
        cancelled: threading.Event | None,
    ) -> Grammar:
        from prefixcache.text.grammar.compiler import compile_grammar

        if not self.vocabulary.eos_token_ids:
            raise _invalid("this model names no token that ends an answer")
        if (problem := self._refused.get(_digest(output))) is not None:
            raise _invalid(problem)
        try:
            num_bytes = 0 if sandbox is None else sandbox.run(output, self.vocabulary, cancelled)
            matcher, words = compile_grammar(output, self.vocabulary)
        except SlowGrammarError:
            raise
        except GrammarError as error:
            raise _invalid(self._refuse(output, _without_long_quotes(str(error)))) from None
        trigger = None if output.begin_after is None else self._trigger(output.begin_after)
        grammar = Grammar(matcher, words, self.vocabulary, trigger, self._workers, num_bytes)
        with self._lock:
            self._known[output] = grammar
            self._keep(output, grammar)
        return grammar

    def _refuse(self, output: StructuredOutput, problem: str) -> str:
        """Remembers that it cannot be compiled, and why; returns the message for clients."""
        with self._lock:
            self._refused[_digest(output)] = problem
            if len(self._refused) > _MOST_REFUSED:
                self._refused.popitem(last=False)
        return problem

    def _trigger(self, text: str) -> Trigger:
        """Triggers are few, and what they allow takes longer to find than a grammar to compile."""
        vocabulary = self.vocabulary
        with self._lock:
            trigger = self._triggers.pop(text, None)
        trigger = trigger or Trigger(text, vocabulary)
        with self._lock:
            self._triggers[text] = trigger
            if len(self._triggers) > _MOST_TRIGGERS:
                self._triggers.popitem(last=False)
        return trigger

    def _keep(self, output: StructuredOutput, grammar: Grammar) -> None:
        self._kept[output] = grammar
        self._kept.move_to_end(output)
        num_bytes = sum(kept.num_bytes for kept in self._kept.values())
        while len(self._kept) > _MOST_KEPT or num_bytes > _MOST_BYTES_KEPT:
            _, dropped = self._kept.popitem(last=False)
            num_bytes -= dropped.num_bytes


def _digest(output: StructuredOutput) -> bytes:
    return hashlib.sha256(pickle.dumps(astuple(output))).digest()


def _without_long_quotes(problem: str) -> str:
    """Llguidance quotes lines of a grammar, and names in it, however long they are."""
    return "\n".join(map(_cut, problem.splitlines()[:_MOST_LINES]))


def _cut(line: str) -> str:
    """The line without its middle, if it is long: the error is at the start or the end."""
    most = _MOST_CHARACTERS // 2
    return line if len(line) <= 2 * most else f"{line[:most]}...{line[-most:]}"


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_output cannot be compiled: {problem}", param="structured_output"
    )
