"""Masks of grammars against slow oracles, and answers that follow them whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from prefixcache import LLM, SamplingParams
from prefixcache.config.engine_config import DEFAULT_MODEL, EngineConfig
from prefixcache.engine.build import build
from prefixcache.engine.engine import Engine
from prefixcache.exceptions import (
    GrammarError,
    InvalidRequestError,
    QueueFullError,
    SlowGrammarError,
)
from prefixcache.models.hub import is_downloaded
from prefixcache.text.grammar import compiler, grammars
from prefixcache.text.grammar.answer_matcher import AnswerMatcher
from prefixcache.text.grammar.grammars import Grammars
from prefixcache.text.grammar.mask_workers import MaskWorkers
from prefixcache.text.grammar.sandbox import Sandbox, Sandboxes
from prefixcache.text.grammar.vocabulary import Vocabulary
from prefixcache.types.request import Request
from prefixcache.types.structured_output import StructuredOutput
from support.repeatable import bounded

Checkpoint = Callable[..., Path]
TOKENS = (
    *(b"</s>", b"<x>"),
    *(bytes([byte]) for byte in b'ab01"{}[]:, \n<>/'),
    *(b"ab", b"ba", b"aab", b"01", b'"a', b'a"', b"</", b"a</", b"></a", b">a", b"</a>", b"b</a>a"),
)
EOS, SPECIAL = 0, 1
PATTERNS = (
    "(<x>|[<a]){1,4}",
    "a*b",
    "(ab|ba){1,3}",
    "[ab]{2,5}0?1*",
    '("[ab]{0,3}",?)+',
    "a(b(0|1)+)*|0",
)


def encode(text: str) -> list[int]:
    """The longest tokens first."""
    found, rest = list[int](), text.encode()
    while rest:
        fitting = [i for i, t in enumerate(TOKENS) if i > SPECIAL and rest.startswith(t)]
        if not fitting:
            return found
        found.append(max(fitting, key=lambda i: len(TOKENS[i])))
        rest = rest[len(TOKENS[found[-1]]) :]
    return found


def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS, (EOS, SPECIAL), (EOS,), encode)


def all_grammars() -> Grammars:
    return Grammars(vocabulary)


def allowed(matcher: AnswerMatcher, unwanted: tuple[int, ...] = ()) -> set[int]:
    words = matcher.mask(unwanted).words(60)
    assert words is not None
    return {*np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()}


def walk(matcher: AnswerMatcher, choices: list[int]) -> Iterator[tuple[bytes, set[int]]]:
    """The text so far and what may follow, with the given ones of it taken."""
    text = b""
    for choice in choices:
        may_follow = allowed(matcher)
        yield text, may_follow
        token = sorted(may_follow)[choice % len(may_follow)]
        if token == EOS:
            return
        matcher.push(token)
        text += TOKENS[token]


choices = st.lists(st.integers(0, 1000), min_size=1, max_size=12)


@settings(max_examples=bounded(40, 2000))
@given(pattern=st.sampled_from(PATTERNS), choices=choices)
def test_what_may_follow_is_what_leaves_the_text_a_beginning(pattern, choices):
    matcher = all_grammars().compile(StructuredOutput("regex", pattern)).for_answer()
    for text, may_follow in walk(matcher, choices):
        fitting = {
            i
            for i, token in enumerate(TOKENS)
            if i > SPECIAL and regex.fullmatch(pattern.encode(), text + token, partial=True)
        }
        ends = {EOS} if regex.fullmatch(pattern.encode(), text) else set[int]()
        assert may_follow & {EOS, SPECIAL} == ends
        assert may_follow - ends <= fitting
        if may_follow - ends != fitting:
            # One text alone can follow: its tokens are the model's own.
            assert len(may_follow - ends) < len(fitting)
            starts = {TOKENS[i][:1] for i in fitting}
            assert len(starts) == 1


@settings(max_examples=bounded(40, 2000))
@given(marker=st.sampled_from(["</a>", "a", "aab", "abaab", "><"]), choices=choices)
def test_before_its_marker_a_grammar_leaves_out_what_reaches_beyond_it(marker, choices):
    output = StructuredOutput("regex", "0[01]*", begin_after=marker)
    matcher, sought = all_grammars().compile(output).for_answer(), marker.encode()
    for text, may_follow in walk(matcher, choices):
        if sought in text:
            assert text.count(sought) >= 1
            begun = text.index(sought) + len(sought)
            assert regex.fullmatch(rb"(0[01]*)?", text[begun:])
            assert may_follow <= {EOS, *(i for i, t in enumerate(TOKENS) if not t.strip(b"01"))}
        else:
            beyond = {i for i, t in enumerate(TOKENS) if sought in (text + t)[:-1]}
            assert may_follow == {*range(len(TOKENS))} - beyond - {EOS}


def test_an_end_that_is_not_wanted_is_kept_for_where_nothing_else_can_follow() -> None:
    grammar = all_grammars().compile(StructuredOutput("regex", "a{1,2}"))
    matcher, going_on = grammar.for_answer(), grammar.for_answer(ignore_eos=True)
    a = TOKENS.index(b"a")
    for each in (matcher, going_on):
        each.push(a)
    assert EOS in allowed(matcher)
    assert allowed(matcher, unwanted=(EOS,)) == allowed(going_on) == {a}
    for each in (matcher, going_on):
        each.push(a)
    assert allowed(matcher, unwanted=(EOS,)) == allowed(going_on) == {EOS}
    going_on.reset()
    assert EOS not in allowed(going_on)


def test_a_token_against_the_grammar_is_an_error_of_its_answer_alone() -> None:
    grammar = all_grammars().compile(StructuredOutput("regex", "a+"))
    matcher, other = grammar.for_answer(), grammar.for_answer()
    matcher.push(TOKENS.index(b"b"))
    other.push(TOKENS.index(b"a"))
    with pytest.raises(GrammarError):
        allowed(matcher)
    assert EOS in allowed(other)


def test_a_grammar_is_compiled_once_and_kept_while_it_is_followed() -> None:
    known, output = all_grammars(), StructuredOutput("json_object")
    with mock.patch.object(compiler, "compile_grammar", wraps=compiler.compile_grammar) as compile_:
        threads = [threading.Thread(target=known.compile, args=(output,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = known.compile(output)
        assert compile_.call_count == 1
        for number in range(grammars._MOST_KEPT + 1):
            known.compile(StructuredOutput("regex", f"a{{{number}}}b"))
        assert len(known._kept) == grammars._MOST_KEPT
        assert known.compile(output) is held
        assert compile_.call_count == grammars._MOST_KEPT + 2


def test_the_grammars_that_were_used_last_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_KEPT", 2)
    known = all_grammars()
    first, second, third = (StructuredOutput("regex", text) for text in "ab0")
    for output in (first, second, first, third):
        known.compile(output)
    kept = [known.find(output) is not None for output in (first, second, third)]
    assert kept == [True, False, True]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (StructuredOutput("json", "{"), "not JSON"),
        (StructuredOutput("json", "false"), "must be an object"),
        (StructuredOutput("json", "[" * 10**5), "not JSON"),
        (StructuredOutput("json", '{"items": [{}, {"type": "strin"}]}'), "at /items/1: "),
        (
            StructuredOutput("json", '{"anyOf": [{}, {"properties": {"a": {"$ref": "#/b"}}}]}'),
            "at /anyOf/1/properties/a: ",
        ),
        (
            StructuredOutput("json", '{"$defs": {"a": {"not": 1}}, "$ref": "#/$defs/a"}'),
            "/$defs/a",
        ),
        (StructuredOutput("json", '{"minimum": 2, "maximum": 1, "type": "integer"}'), "Unsatis"),
        (StructuredOutput("json", '{"$ref": "#"}'), ""),
        (StructuredOutput("regex", "(a"), "unclosed"),
        (StructuredOutput("regex", "(?=a)"), "look-a"),
        (StructuredOutput("choice", "[]"), "empty"),
        (StructuredOutput("choice", "[1]"), "strings"),
        (StructuredOutput("choice", '{"a": 1}'), "list"),
        (StructuredOutput("grammar", "start: a"), '"a"'),
        (StructuredOutput("grammar", "root ::= ("), ""),
    ],
    ids=range(15),
)
def test_what_cannot_be_compiled_says_why_and_where(output: StructuredOutput, message: str) -> None:
    with pytest.raises(InvalidRequestError, match="structured_output cannot be compiled") as error:
        all_grammars().compile(output)
    assert message in str(error.value)
    assert error.value.param == "structured_output"


@pytest.mark.parametrize("fields", [{"kind": "xml"}, {"text": "\ud800"}, {"begin_after": ""}])
def test_a_wrong_structured_output_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        StructuredOutput(**{"kind": "regex", "text": "a", **fields})
    assert error.value.param == "structured_output"


def test_a_process_tries_grammars_first_and_another_one_follows_when_it_is_lost() -> None:
    sandbox, known = Sandbox(), all_grammars()
    try:
        assert known.compile(StructuredOutput("regex", "a"), sandbox).num_bytes > 0
        with pytest.raises(InvalidRequestError, match="too complex"):
            known.compile(StructuredOutput("regex", "a{1000000}"), sandbox)
        assert sandbox._process is not None
        sandbox._process.kill()
        with pytest.raises(QueueFullError, match="no time"):
            known.compile(StructuredOutput("regex", "b"), sandbox)
        assert known.compile(StructuredOutput("regex", "b"), sandbox).num_bytes > 0
    finally:
        sandbox.close()


HARD = StructuredOutput("json", '{"type": "integer", "multipleOf": 10000019}')


def test_a_quick_trial_is_soon_over_and_a_cancelled_one_too() -> None:
    sandboxes, known, cancelled = Sandboxes(), all_grammars(), threading.Event()
    try:
        with pytest.raises(SlowGrammarError):
            known.compile(HARD, sandboxes.quick)
        assert known.compile(StructuredOutput("regex", "a"), sandboxes.quick).num_bytes > 0
        cancelled.set()
        with pytest.raises(CancelledError):
            known.compile(HARD, sandboxes.thorough, cancelled)
        process = sandboxes.thorough._process
        assert known.compile(StructuredOutput("regex", "b"), sandboxes.thorough).num_bytes > 0
        assert sandboxes.thorough._process is process, "the process outlives what is cancelled"
    finally:
        sandboxes.close()


@contextmanager
def sandbox_whose_child_is_killed(at: str, folder: Path) -> Iterator[Sandbox]:
    script = folder / "sandbox"
    script.write_text(
        f"#!{sys.executable}\n"
        "import os, signal\n"
        "from prefixcache.text.grammar import sandbox\n"
        f"{at} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sandbox.main()\n"
    )
    script.chmod(0o755)
    with mock.patch.object(sys, "executable", str(script)), closing(Sandbox()) as sandbox:
        yield sandbox


def test_a_child_that_is_killed_behind_its_answer_gives_no_second_one(tmp_path: Path) -> None:
    """As by a client that leaves then: the next grammar was refused, for ever."""
    known = all_grammars()
    with sandbox_whose_child_is_killed("sandbox.os._exit", tmp_path) as sandbox:
        for pattern in "ab":
            assert known.compile(StructuredOutput("regex", pattern), sandbox).num_bytes > 0


def test_a_grammar_whose_child_was_killed_is_not_refused_again(tmp_path: Path) -> None:
    """As by a system that is out of memory, whatever the grammar is."""
    output, known = StructuredOutput("regex", "a"), all_grammars()
    with (
        sandbox_whose_child_is_killed("sandbox._tried", tmp_path) as sandbox,
        pytest.raises(QueueFullError, match="no time"),
    ):
        known.compile(output, sandbox)
    with closing(Sandbox()) as sandbox:
        assert known.compile(output, sandbox).num_bytes > 0


@pytest.mark.parametrize("executable", ["/bin/false", "/there-is-none"])
def test_a_process_that_does_not_start_is_tried_again(executable: str) -> None:
    tokens = tuple(str(number).encode() for number in range(50_000))  # more than a pipe holds
    vocabulary = Vocabulary(tokens, (), (EOS,), encode=list)
    with closing(Sandbox()) as sandbox:
        with (
            mock.patch.object(sys, "executable", executable),
            pytest.raises(QueueFullError, match="no time"),
        ):
            sandbox.run(StructuredOutput("regex", "a"), vocabulary)
        known = all_grammars()
        assert known.compile(StructuredOutput("regex", "a"), sandbox).num_bytes > 0


def test_a_process_that_is_lost_within_its_answer_has_given_none(monkeypatch) -> None:
    def start() -> subprocess.Popen[bytes]:
        code = "import sys; sys.stdin.buffer.read(1); sys.stdout.write('[12, nu')"
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)

    monkeypatch.setattr("prefixcache.text.grammar.sandbox._start", start)
    with pytest.raises(QueueFullError, match="no time"):
        all_grammars().compile(StructuredOutput("regex", "a"), Sandbox())


def test_a_refused_grammar_is_not_tried_again() -> None:
    sandbox, known = mock.Mock(is_quick=False), all_grammars()
    sandbox.run.side_effect = GrammarError("x" * 10**6)
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as error:
            known.compile(StructuredOutput("regex", "a"), sandbox)
        assert len(str(error.value)) < 1000
    sandbox.run.assert_called_once()
    sandbox.run.side_effect = SlowGrammarError("later")
    for _ in range(2):
        with pytest.raises(SlowGrammarError):
            known.compile(StructuredOutput("regex", "b"), sandbox)
    assert sandbox.run.call_count == 3


@pytest.mark.long
@pytest.mark.parametrize(
    "output",
    [
        HARD,
        StructuredOutput("grammar", "start: A\nA: /(.*a.{30})/ & /(.*b.{29})/ & ~/(.*c.{28})/"),
        StructuredOutput(
            "json",
            '{"type": "integer", "allOf": [{"multipleOf": 97}, {"multipleOf": 101}, '
            '{"multipleOf": 103}, {"multipleOf": 107}]}',
        ),
    ],
    ids=["multiple", "operators", "multiples"],
)
def test_what_would_take_minutes_is_given_up(output: StructuredOutput) -> None:
    sandbox, known = Sandbox(), all_grammars()
    try:
        with pytest.raises(InvalidRequestError, match="it takes more than"):
            known.compile(output, sandbox)
        assert known.compile(StructuredOutput("regex", "a"), sandbox).num_bytes > 0
    finally:
        sandbox.close()


_ENDS_IN_A_JOB = """
import atexit, threading, time
from prefixcache.text.grammar.mask_workers import MaskWorkers, Latency
names = lambda: [t.name for t in threading.enumerate() if t.name.startswith("prefixcache-grammar")]
atexit.register(lambda: print(names()))  # the first one registered is called last
workers, begun = MaskWorkers(), threading.Event()
workers.put(lambda: (begun.set(), time.sleep(0.2)), Latency())
begun.wait()
assert names()
"""


def test_no_thread_outlives_the_interpreter_in_a_job() -> None:
    """One that returns from the grammar library while the interpreter ends is a crash."""
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_IN_A_JOB], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"


class SlowWorkers(MaskWorkers):
    """Computes a mask on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Callable[[], None]] = []

    def put(self, function: Callable[[], None], latency: object) -> None:
        self.jobs.append(function)

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop()()


def tiny_engine(checkpoint: Checkpoint, **flags: Any) -> Engine:
    config = EngineConfig.from_flags(
        model=str(checkpoint("qwen3")), dtype="float32", device="cpu", num_blocks=100, **flags
    )
    return build(config).engine


def request(name: str, output: StructuredOutput | None, **params: Any) -> Request:
    params = {"max_tokens": 24, "seed": 5, "logprobs": 1, **params}
    sampling = SamplingParams(structured_output=output, **params)
    return Request(request_id=name, prompt_token_ids=[*range(20, 50)], params=sampling)


def test_one_late_mask_keeps_nobody_else_from_steps(tiny_checkpoint: Checkpoint) -> None:
    engine, workers = tiny_engine(tiny_checkpoint), SlowWorkers()
    assert engine.rules._grammars is not None
    engine.rules._grammars._workers = workers
    engine.add_request(request("late", StructuredOutput("regex", "[a-z]{30}")))
    engine.add_request(request("free", None))
    tokens: dict[str, list[int]] = {"late": [], "free": []}

    def step() -> None:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids

    for _ in range(10):
        step()
    assert len(tokens["late"]) == 1
    assert len(tokens["free"]) == 9, "the first step was that of the prompt they share"
    while engine.has_unfinished():
        workers.work()
        step()
    alone = tiny_engine(tiny_checkpoint)
    alone.add_request(request("late", StructuredOutput("regex", "[a-z]{30}")))
    expected = list[int]()
    while alone.has_unfinished():
        expected += [token for output in alone.step() for token in output.token_ids]
    assert tokens["late"] == expected


def test_answers_with_a_grammar_stay_out_of_steps_ahead(tiny_checkpoint: Checkpoint) -> None:
    """There a step is submitted before the tokens of the one before are read."""
    grammars = [
        StructuredOutput("regex", "x[a-f]{12}y"),
        StructuredOutput("choice", '["no"]'),
        None,
    ]
    answers = []
    for runs_ahead in (False, True):
        engine = tiny_engine(tiny_checkpoint, attention="torch")
        engine._steps._runner.steps.runs_ahead = runs_ahead
        for number, output in enumerate(grammars):
            engine.add_request(request(f"{number}", output, logprobs=None))
        tokens: dict[str, list[int]] = {f"{number}": [] for number in range(3)}
        together = 0
        while engine.has_unfinished():
            outputs = engine.step()
            together += len(outputs) == 3
            for output in outputs:
                assert output.error is None
                tokens[output.request_id] += output.token_ids
        answers.append(tokens)
        assert runs_ahead or together
    assert answers[0] == answers[1]


def test_an_answer_that_restarts_restarts_its_grammar(tiny_checkpoint: Checkpoint) -> None:
    engine = tiny_engine(tiny_checkpoint)
    engine.add_request(request("a", StructuredOutput("regex", "x[a-f]{8}y[0-9]{2}")))
    text = ""
    for _ in range(5):
        text += "".join(output.text for output in engine.step())
    assert text.startswith("x")
    engine.requests.restart_all()
    restarted = engine.take_outputs()
    assert [output.restarted for output in restarted] == [True]
    text = ""
    while engine.has_unfinished():
        outputs = engine.step()
        text += "".join(output.text for output in outputs)
    assert regex.fullmatch("x[a-f]{8}y[0-9]{2}", text)
    assert outputs[-1].finish_reason == "stop"


def test_other_options_hold_with_a_grammar(tiny_checkpoint: Checkpoint) -> None:
    llm = LLM(str(tiny_checkpoint("qwen3")), dtype="float32", device="cpu", num_blocks=100)

    def answer(output: StructuredOutput, **params: Any) -> Any:
        params = {"max_tokens": 40, "seed": 3, **params}
        sampling = SamplingParams(structured_output=output, **params)
        return llm.generate("The", sampling, use_tqdm=False)[0].outputs[0]

    abc = StructuredOutput("regex", "[abc]{3,}")
    short = answer(StructuredOutput("choice", '["a"]'), min_tokens=9, ignore_eos=True)
    assert (short.text, short.finish_reason) == ("a", "stop")
    assert len(answer(abc, min_tokens=20).token_ids) >= 20
    assert answer(abc, ignore_eos=True).finish_reason == "length"
    stopped = answer(abc, stop=("b",))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "b")
    biased = answer(abc, logit_bias={llm._tokenizer.encode("q").item(): 100.0}, temperature=0)
    assert not biased.text.strip("abc")
    free = answer(StructuredOutput("choice", '["zebra"]'), logprobs=2, temperature=0)
    model = llm.generate("The", SamplingParams(max_tokens=1, logprobs=2, temperature=0))
    expected = model[0].outputs[0].logprobs[0]
    top = sorted(one.logprob for one in free.logprobs[0].values())[-2:]
    assert top == sorted(one.logprob for one in expected.values()), "of the model's own logits"


ADDRESS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["home", "work"]},
        "number": {"type": "integer", "minimum": 1, "maximum": 999},
        "tags": {
            "type": "array",
            "maxItems": 3,
            "items": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 8}]},
        },
    },
    "required": ["name", "kind", "number", "tags"],
    "additionalProperties": False,
}


@pytest.mark.model
@pytest.mark.skipif(not is_downloaded(DEFAULT_MODEL), reason="prefixcache download was not run")
def test_answers_of_the_default_model_validate_against_their_schema() -> None:
    llm = LLM(max_model_len=512, num_blocks=600)
    output = StructuredOutput("json", json.dumps(ADDRESS))
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=400, structured_output=output)
        for seed in range(bounded(3, 200))
    ]
    for result in llm.generate(["An address as JSON:"] * len(params), params, use_tqdm=False):
        answer = result.outputs[0]
        assert answer.finish_reason == "stop"
        assert not [*Draft202012Validator(ADDRESS).iter_errors(json.loads(answer.text))]
