"""What requests read and write, and what usage tells of it, against the obvious rule.

Prompts come one after another with limits on what they write. Under full attention a set of the
prefixes written says what the next one hits; with windows a prompt written up to a point can be
read up to that point. Answers are those of a lone run in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import answer_alone
from prefixcache.kv.specs import GroupKind
from prefixcache.types.request import CacheOptions, RequestOutput
from support.repeatable import bounded

BLOCK = 4


@dataclass(frozen=True)
class Ask:
    """A prompt of two parts, and how much of it is written; `clears` forgets all before it."""

    shared: int
    own: int
    tail: int
    write_upto: int | None
    write: bool
    clears: bool

    @property
    def prompt(self) -> list[int]:
        return [*range(self.shared), *(50 + (self.tail * 7 + i) % 40 for i in range(self.own))]

    @property
    def limit(self) -> int:
        """Tokens in full blocks of the prompt that may be written."""
        most = len(self.prompt) if self.write_upto is None else self.write_upto
        return min(most, len(self.prompt)) // BLOCK * BLOCK if self.write else 0


asks = st.builds(
    Ask,
    shared=st.integers(1, 40) | st.sampled_from([8, 16, 24]),
    own=st.just(0) | st.integers(0, 20),
    tail=st.integers(0, 1),
    write_upto=st.none() | st.integers(0, 60),
    write=st.sampled_from([True, True, True, False]),
    clears=st.sampled_from([False] * 7 + [True]),
)
layouts: st.SearchStrategy[tuple[GroupKind, ...]] = st.sampled_from(
    [("full",), ("full",), ("full", ("sliding_window", 9)), (("sliding_window", 6),)]
)


@settings(max_examples=bounded(usual=60, long=2_000), deadline=None)
@given(work=st.lists(asks, min_size=1, max_size=6), groups=layouts, chunk=st.integers(8, 64))
def test_what_is_read_and_written_is_what_the_rule_says(
    work: list[Ask], groups: tuple[GroupKind, ...], chunk: int
) -> None:
    engine, _, cache = make_engine(
        num_blocks=401, groups=groups, max_num_batched_tokens=chunk, merge_twins=True
    )
    written: set[tuple[int, ...]] = set()
    for number, ask in enumerate(work):
        if ask.clears:
            engine.control.reset_prefix_cache()
            written.clear()
        options = CacheOptions(write=ask.write, write_upto=ask.write_upto)
        request = replace(make_request(str(number), ask.prompt, max_tokens=3), cache=options)
        engine.add_request(request)
        outputs: list[RequestOutput] = []
        while engine.has_unfinished():
            outputs += engine.step()
        cache.core.validate()
        reported = [(output.num_cached_tokens, output.num_written_tokens) for output in outputs]
        assert reported == reported[:1] * len(reported), "usage is known with the first token"
        read, wrote = reported[0]
        prompt = tuple(ask.prompt)
        if groups == ("full",):
            assert (read, wrote) == expected(prompt, ask.limit, written)
        assert read + wrote <= len(prompt)
        assert engine.probe(request) >= min(ask.limit, (len(prompt) - 1) // BLOCK * BLOCK)
        written |= {prompt[:end] for end in range(BLOCK, ask.limit + 1, BLOCK)}
        answer = [token for output in outputs for token in output.token_ids]
        assert answer == answer_alone(ask.prompt, 3, groups=groups)
        if ask.write and ask.write_upto is None:
            whole = (*prompt, *answer[:-1])
            written |= {whole[:end] for end in range(BLOCK, len(whole) + 1, BLOCK)}


def expected(prompt: tuple[int, ...], limit: int, written: set[tuple[int, ...]]) -> tuple[int, int]:
    """Tokens read and written of a prompt under full attention."""
    blocks = [prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)]
    hits = next((i for i, block in enumerate(blocks) if block not in written), len(blocks))
    read = min(hits * BLOCK, (len(prompt) - 1) // BLOCK * BLOCK)
    new = [block for block in blocks if read < len(block) <= limit and block not in written]
    return read, len(new) * BLOCK


def test_what_a_reset_takes_before_it_is_published_counts_as_unwritten() -> None:
    engine, _, _ = make_engine(max_num_batched_tokens=8)
    engine.add_request(make_request("a", range(40), max_tokens=1))
    engine.step()
    engine.control.reset_prefix_cache()
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [output.num_written_tokens for output in outputs] == [8]
