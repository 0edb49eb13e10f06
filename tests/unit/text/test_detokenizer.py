"""Streams of text: whole characters, stop strings, and nothing lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from prefixcache.text.tokenization.detokenizer import Detokenizers, IncrementalDetokenizer
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.sampling_params import SamplingParams
from support.tiny_models import EOS, train_tokenizer

_BROKEN = "\ufffd"


def _byte_level() -> Tokenizer:
    return Tokenizer(train_tokenizer(), special_tokens={"eos_token": EOS})


def _byte_fallback() -> Tokenizer:
    """The layout of Llama 2's vocabulary: words with a leading bar, and a token for each byte."""
    words = ["<unk>", "▁", "▁a", "b", "▁the", "ä", "天"]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend, special_tokens={"unk_token": "<unk>"})


BYTE_LEVEL = _byte_level()
BYTE_FALLBACK = _byte_fallback()
BYTE_IDS = [i for i in range(BYTE_LEVEL.vocab_size) if len(BYTE_LEVEL.token_bytes(i)) == 1]


def _pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:stop] for start, stop in pairwise(edges)]


def _deltas(tokenizer: Tokenizer, pieces: list[list[int]], **params: object) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, SamplingParams(**params))
    return [*(stream.push(piece) for piece in pieces), stream.finish()]


def _continuation(tokenizer: Tokenizer, ids: list[int]) -> str:
    anchor = tokenizer.encode("b", add_special_tokens=False).tolist()
    whole = tokenizer.decode(anchor + ids, skip_special_tokens=False)
    return whole.removeprefix(tokenizer.decode(anchor))


_ids = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=60)
_bytes = st.lists(st.sampled_from(BYTE_IDS), max_size=60)
_characters = st.characters(codec="utf-8", exclude_characters="▁")
_cuts = st.lists(st.integers(0, 60), max_size=8)


@given(ids=st.one_of(_ids, _bytes), cuts=_cuts, skip=st.booleans())
@settings(max_examples=300)
def test_deltas_join_to_the_decoded_text(ids, cuts, skip):
    deltas = _deltas(BYTE_LEVEL, _pieces(ids, cuts), skip_special_tokens=skip)
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    joined = "".join(deltas)
    assert whole.startswith(joined)
    assert whole.rstrip(_BROKEN) == joined.rstrip(_BROKEN)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@given(text=st.text(st.one_of(_characters, st.just(_BROKEN))), cuts=_cuts)
@example(text=f"a{_BROKEN}", cuts=[])
def test_text_comes_back_in_whole_characters(tokenizer, text, cuts):
    """A genuine U+FFFD is a character like any other."""
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    deltas = _deltas(tokenizer, _pieces(ids, cuts), skip_special_tokens=False)
    assert "".join(deltas) == _continuation(tokenizer, ids)
    assert sum(delta.count(_BROKEN) for delta in deltas) == text.count(_BROKEN)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@given(data=st.data(), cuts=_cuts)
def test_the_split_over_calls_makes_no_difference(tokenizer, data, cuts):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    whole = "".join(_deltas(tokenizer, [ids]))
    assert "".join(_deltas(tokenizer, _pieces(ids, cuts))) == whole
    assert "".join(_deltas(tokenizer, [[i] for i in ids])) == whole


def test_an_unfinished_character_waits_and_is_dropped_at_the_end():
    llama = BYTE_LEVEL.encode("🦙").tolist()
    assert len(llama) > 1
    stream = IncrementalDetokenizer(BYTE_LEVEL)
    assert [stream.push([i]) for i in llama] == [*[""] * (len(llama) - 1), "🦙"]
    assert stream.push(llama[:-1]) == ""
    assert stream.finish() == ""


def test_broken_bytes_do_not_wait_for_ever():
    lead = next(i for i in BYTE_IDS if BYTE_LEVEL.token_bytes(i) == b"\xe4")
    stream = IncrementalDetokenizer(BYTE_LEVEL)
    shown = "".join(stream.push([lead]) for _ in range(100))
    assert len(shown) > 80
    assert stream.push(BYTE_LEVEL.encode("x").tolist()).endswith("x")


@pytest.mark.parametrize("run", ["e4e4e4e4e4bde4e4", "e4e4e4e4e4e4e4bd", "f09ff09ff09ff09ff0"])
def test_a_long_broken_run_is_cut_between_characters(run):
    id_of = {BYTE_LEVEL.token_bytes(i): i for i in BYTE_IDS}
    ids = [id_of[bytes([byte])] for byte in bytes.fromhex(run + "78")]
    assert "".join(_deltas(BYTE_LEVEL, [[i] for i in ids])) == BYTE_LEVEL.decode(ids)


@given(
    text=st.text(alphabet="abc🦙", max_size=30),
    stops=st.lists(st.text(alphabet="abc🦙", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=_cuts,
    include=st.booleans(),
)
@settings(max_examples=300)
def test_stop_strings_end_the_text_exactly(text, stops, cuts, include):
    """Against the plain search: token by token, the first prefix that holds a stop string."""
    ids = BYTE_LEVEL.encode(text).tolist()
    options = {"stop": tuple(stops), "include_stop_str_in_output": include}
    stream = IncrementalDetokenizer(BYTE_LEVEL, SamplingParams(**options))
    deltas = [stream.push(piece) for piece in _pieces(ids, cuts)] + [stream.finish()]
    expected, stop = _cut_at_stop(_prefixes(ids), text, stops, include)
    assert ("".join(deltas), stream.stopped_by) == (expected, stop)


def _prefixes(ids: list[int]) -> list[str]:
    texts = [BYTE_LEVEL.decode(ids[: n + 1]) for n in range(len(ids))]
    return [text.rstrip(_BROKEN) for text in texts]


def _cut_at_stop(
    prefixes: list[str], text: str, stops: list[str], include: bool
) -> tuple[str, str | None]:
    for prefix in prefixes:
        hits = sorted(
            (prefix.find(stop), order) for order, stop in enumerate(stops) if stop in prefix
        )
        if hits:
            start, order = hits[0]
            stop = stops[order]
            return prefix[: start + len(stop) * include], stop
    return text, None


def test_a_thousand_stop_strings_are_looked_for_as_one():
    stops = tuple(f"stop number {number}!" for number in range(1000))
    make = Detokenizers(BYTE_LEVEL)
    streams = [make(SamplingParams(stop=stops)) for _ in range(3)]
    assert len({id(stream._automaton) for stream in streams}) == 1
    shown = streams[0].push(BYTE_LEVEL.encode("go on, stop number 99").tolist())
    assert shown == "go on, "
    assert (
        streams[0].push(BYTE_LEVEL.encode("9, stop number 42! and on").tolist())
        == "stop number 999, "
    )
    assert streams[0].stopped_by == "stop number 42!"
    assert [stream.stopped_by for stream in streams[1:]] == [None, None]


def test_no_part_of_a_stop_string_is_streamed():
    stream = IncrementalDetokenizer(BYTE_LEVEL, SamplingParams(stop=("STOP",)))
    shown = [
        stream.push(BYTE_LEVEL.encode(piece).tolist())
        for piece in ("xS", "TO", "S", "T", "OP", "y")
    ]
    assert shown == ["x", "", "STO", "", "", ""]
    assert stream.stopped_by == "STOP"
    assert stream.finish() == ""


def test_held_back_text_comes_at_the_end():
    stream = IncrementalDetokenizer(BYTE_LEVEL, SamplingParams(stop=("STOP",)))
    assert stream.push(BYTE_LEVEL.encode("xST").tolist()) == "x"
    assert stream.finish() == "ST"


def test_stop_strings_wait_for_min_tokens():
    ids = BYTE_LEVEL.encode("zzzzzz", add_special_tokens=False).tolist()
    params = SamplingParams(stop=("z",), min_tokens=len(ids) - 1, max_tokens=99)
    stream = IncrementalDetokenizer(BYTE_LEVEL, params)
    shown = stream.push(ids[:-1])
    assert stream.stopped_by is None
    assert shown + stream.push(ids[-1:]) == BYTE_LEVEL.decode(ids[:-1])
    assert stream.stopped_by == "z"


def test_a_stop_string_may_begin_within_min_tokens():
    first, last = (BYTE_LEVEL.encode(text, add_special_tokens=False).tolist() for text in "zy")
    params = SamplingParams(stop=("zy",), min_tokens=2 * len(first) + len(last), max_tokens=99)
    stream = IncrementalDetokenizer(BYTE_LEVEL, params)
    assert stream.push([*first, *last, *first]) == "zy"
    assert stream.push(last) == ""
    assert stream.stopped_by == "zy"


@pytest.mark.parametrize(("include", "shown"), [(False, "hi"), (True, f"hi{EOS}")])
def test_the_token_that_ends_the_answer_is_shown_only_when_asked(include, shown):
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
    stream = IncrementalDetokenizer(BYTE_LEVEL, params)
    assert stream.push([*BYTE_LEVEL.encode("hi").tolist(), 2], ended_by_token=True) == shown


@pytest.mark.parametrize("make", [_byte_level, _byte_fallback])
def test_text_goes_on_behind_the_prompt_with_its_space(make: Callable[[], Tokenizer]):
    tokenizer = make()
    prompt = tokenizer.encode("the b", add_special_tokens=False).tolist()
    answer = tokenizer.encode("the b a the b", add_special_tokens=False).tolist()[len(prompt) :]
    assert "".join(_deltas(tokenizer, [[i] for i in answer])) == " a the b"
