"""The shapes of the bench's workloads, how their texts are drawn, and when sessions begin."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from prefixcache.exceptions import ConfigError
from prefixcache.tools.bench.arrivals import LoadConfig
from prefixcache.tools.bench.prompts import ChatForm, Message, Prompt, TextForm, TokenForm
from prefixcache.tools.bench.records import BenchmarkError
from prefixcache.tools.bench.sessions import Session, Text, Turn
from prefixcache.tools.bench.traces import trace_sessions
from prefixcache.tools.bench.workloads import WorkloadConfig, make_sessions

POOL = list(range(100, 220))


def first_prompt(session: Session, seed: str = "0") -> list[int]:
    texts = (*session.opening, *session.turns[0].adds)
    return np.asarray(TokenForm(POOL).draw(texts, seed)).tolist()


def test_prompts_share_exactly_the_prefix() -> None:
    config = WorkloadConfig(num_requests=5, prefix_len=48, suffix_len=16, output_len=7)
    sessions = make_sessions(config)
    prompts = [first_prompt(session) for session in sessions]
    assert {tuple(prompt[:48]) for prompt in prompts} == {tuple(prompts[0][:48])}
    assert len({tuple(prompt[48:]) for prompt in prompts}) == 5
    assert all(len(prompt) == 64 for prompt in prompts)
    assert {session.turns[0].output_len for session in sessions} == {7}
    assert {token for prompt in prompts for token in prompt} <= set(POOL)


def test_draws_depend_on_key_and_seed_alone() -> None:
    (session,) = make_sessions(WorkloadConfig(num_requests=1))
    assert first_prompt(session) == first_prompt(session)
    assert first_prompt(session)[:16] != first_prompt(session, "1")[:16]


def test_documents_are_asked_about_in_turn_and_hold_nothing_in_common() -> None:
    config = WorkloadConfig(workload="documents", num_requests=12, num_documents=3)
    sessions = make_sessions(config)
    asked = [session.turns[0].adds[0] for session in sessions]
    for begin in range(0, 12, 3):
        assert len(set(asked[begin : begin + 3])) == 3
    assert len(set(asked)) == 3
    assert len({tuple(first_prompt(session)[:16]) for session in sessions}) == 3


def test_dialogues_grow_by_their_turns() -> None:
    config = WorkloadConfig(
        workload="multi-turn", num_sessions=2, turns=3, prefix_len=50, suffix_len=10, output_len=4
    )
    one, other = make_sessions(config)
    assert [len(session.turns) for session in (one, other)] == [3, 3]
    assert one.longest == 50 + 3 * (10 + 4)
    assert one.opening == other.opening
    assert not {turn.adds for turn in one.turns} & {turn.adds for turn in other.turns}


def test_agents_have_the_reported_shape() -> None:
    sessions = make_sessions(WorkloadConfig(workload="agents", num_sessions=1000))
    assert statistics.median(len(one.turns) for one in sessions) == pytest.approx(43, abs=2)
    counts = [sum(len(turn.sub_sessions) for turn in one.turns) for one in sessions]
    assert sum(map(bool, counts)) / len(counts) == pytest.approx(0.44, abs=0.03)
    assert statistics.median(count for count in counts if count) == 4
    lengths, outputs = list[int](), list[int]()
    for one in sessions:
        length = one.opening[0].length
        for turn in one.turns:
            lengths.append(length + turn.adds[0].length)
            outputs.append(turn.output_len)
            length += turn.grows_by
    assert statistics.median(lengths) == pytest.approx(142_000, rel=0.05)
    assert statistics.median(outputs) == pytest.approx(444, rel=0.05)


def test_lengths_are_scaled_and_shapes_are_not() -> None:
    whole, scaled = (
        make_sessions(WorkloadConfig(workload="agents", num_sessions=30, scale_lengths=scale))
        for scale in (1.0, 0.01)
    )
    assert [one.num_requests for one in whole] == [one.num_requests for one in scaled]
    ratio = sum(one.longest for one in scaled) / sum(one.longest for one in whole)
    assert ratio == pytest.approx(0.01, rel=0.02)


def test_a_session_counts_what_its_sub_sessions_ask_and_answer() -> None:
    sub = Session(name="0.0", turns=(Turn(adds=(Text("b", 5),), output_len=3),))
    turns = (
        Turn(adds=(Text("a", 10),), output_len=2),
        Turn(adds=(Text("c", 1),), output_len=2, sub_sessions=(sub, sub)),
    )
    session = Session(name="0", opening=(Text("o", 100),), turns=turns)
    assert session.num_requests == 4
    assert session.longest == 100 + 10 + 2 + 3 + 3 + 1 + 2
    assert session.family() == [session, sub, sub]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_requests", 0),
        ("prefix_len", -1),
        ("suffix_len", -1),
        ("output_len", 0),
        ("scale_lengths", 0.0),
        ("workload", "chat"),
        ("trace", Path("x")),
    ],
)
def test_a_wrong_workload_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        WorkloadConfig(**{"workload": "documents", field: value})


def test_a_workload_needs_a_prompt() -> None:
    with pytest.raises(ConfigError, match="must not both be 0"):
        WorkloadConfig(prefix_len=0, suffix_len=0)


def test_a_trace_needs_its_file() -> None:
    with pytest.raises(ConfigError, match="trace must be given"):
        WorkloadConfig(workload="trace")
    assert WorkloadConfig(trace=Path("x")).workload == "trace"


@pytest.mark.parametrize(
    "fields",
    [
        {"concurrency": -1},
        {"request_rate": -1.0},
        {"request_rate": float("inf")},
        {"time_scale": -1.0},
    ],
)
def test_a_wrong_load_names_the_field(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        LoadConfig(**fields)


def test_arrivals_are_poisson_or_recorded() -> None:
    turn = Turn(adds=(Text("a", 1),), output_len=1)
    sessions = [Session(name=str(n), turns=(turn,), due=n / 2) for n in range(2000)]
    arrivals = [due for due, _ in LoadConfig(request_rate=20.0).schedule(sessions)]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert 2000 / arrivals[-1] == pytest.approx(20.0, rel=0.1)
    gaps = np.diff(arrivals)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1)
    faster = LoadConfig(time_scale=0.1).schedule(sessions[:3])
    assert [due for due, _ in faster] == pytest.approx([0.0, 0.05, 0.1])


@pytest.mark.parametrize(
    ("fields", "is_recorded", "limit"),
    [
        ({}, False, 4),
        ({}, True, 0),
        ({"time_scale": 0.0}, True, 4),
        ({"request_rate": 2.0}, False, 0),
        ({"request_rate": 2.0, "concurrency": 9}, False, 9),
        ({"concurrency": 0}, False, 0),
    ],
    ids=["closed loop", "recorded", "as fast as others end", "Poisson", "bounded", "all at once"],
)
def test_only_a_closed_loop_is_bounded_unless_asked(
    fields: dict[str, float], is_recorded: bool, limit: int
) -> None:
    assert LoadConfig(**fields).limit(is_recorded=is_recorded) == limit


def test_text_has_about_as_many_tokens_as_asked() -> None:
    form = TextForm(tokens_per_word=1.25)
    text = form.draw((Text("a", 100), Text("b", 25)), "0")
    assert len(text.split()) == 100
    assert form.count([Message("user", text)]) == 125
    assert text.startswith(form.draw((Text("a", 100),), "0"))


def test_a_chat_is_sent_as_json() -> None:
    messages = (Message("system", " a b"), Message("user", " c"))
    assert json.loads(json.dumps(ChatForm().body(Prompt(messages, 1)))) == {
        "messages": [{"role": "system", "content": " a b"}, {"role": "user", "content": " c"}]
    }


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def test_a_trace_is_sent_with_its_sharing_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = (5000, 1100, 8, [7, 8, 9]), (5500, 1030, 0, [7, 8, 1]), (9000, 10, 3, [4])
    path.write_text(mooncake(*rows))
    whole = list(trace_sessions(WorkloadConfig(trace=path)))
    assert [session.due for session in whole] == [0.0, 0.5, 4.0]
    assert [session.first_prompt for session in whole] == [1100, 1030, 10]
    assert [session.turns[0].output_len for session in whole] == [8, 1, 3]
    one, other, _ = (first_prompt(session) for session in whole)
    assert one[:1024] == other[:1024]
    assert one[1024:1030] != other[1024:]
    scaled = trace_sessions(WorkloadConfig(trace=path, scale_lengths=1 / 16, num_requests=2))
    assert [session.first_prompt for session in scaled] == [64 + 5, 64 + 1]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "t.jsonl"),
        ("never\n", "t.jsonl, line 1"),
        (mooncake((5, 512, 1, [1]), (4, 512, 1, [1])), "t.jsonl, line 2"),
        (mooncake((5, 512, 1, [1])) + '{"timestamp": 9, "inp', "t.jsonl, line 2"),
    ],
    ids=["empty", "unknown", "unsorted", "truncated"],
)
def test_a_broken_trace_is_reported_by_file_and_line(
    tmp_path: Path, text: str, reported: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match=reported):
        list(trace_sessions(WorkloadConfig(trace=path)))


def test_a_trace_is_read_no_further_than_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [(number, 512, 1, [number]) for number in range(300)]
    path.write_text(mooncake(*rows) + "broken\n")
    sessions = trace_sessions(WorkloadConfig(trace=path))
    assert [next(sessions).name for _ in range(256)] == [str(number) for number in range(256)]
    with pytest.raises(BenchmarkError, match="line 301"):
        list(sessions)
