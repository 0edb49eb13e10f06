"""`LLM` as vLLM's users expect it, on a tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from prefixcache import LLM, SamplingParams
from prefixcache.exceptions import ConfigError, InvalidRequestError
from prefixcache.types.request import CacheOptions
from prefixcache.types.structured_output import StructuredOutput

Checkpoint = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Checkpoint) -> LLM:
    return LLM(str(tiny_checkpoint()), dtype="float32", num_blocks=65)


def generate(llm: LLM, *args: Any, **kwargs: Any) -> Any:
    return llm.generate(*args, use_tqdm=False, **kwargs)


def test_prompts_come_in_every_form(llm: LLM) -> None:
    ids = generate(llm, "A block of the cache", GREEDY)[0].prompt_token_ids
    forms = [
        "A block of the cache",
        ids,
        {"prompt": "A block of the cache"},
        {"prompt_token_ids": ids},
        np.array(ids),
        {"prompt_token_ids": np.array(ids, np.uint32)},
    ]
    results = [generate(llm, form, GREEDY)[0] for form in forms]
    assert all(result.prompt_token_ids == ids for result in results)
    assert len({result.outputs[0].text for result in results}) == 1
    batch = generate(llm, forms, GREEDY)
    assert [result.outputs[0].text for result in batch] == [results[0].outputs[0].text] * 6
    assert [result.prompt for result in batch] == [forms[0], None, forms[0], None, None, None]


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 5) for i in range(12)]
    results = generate(llm, prompts, params)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == [
        1 + i % 5 for i in range(12)
    ]
    assert all(result.finished for result in results)
    assert all(result.outputs[0].finish_reason == "length" for result in results)


def test_a_second_run_hits_the_cache_and_answers_the_same(llm: LLM) -> None:
    prompt = [*range(100, 150)]
    first, second = (generate(llm, prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    llm.control.reset_prefix_cache()
    assert generate(llm, prompt, GREEDY)[0].num_cached_tokens == 0


def test_without_options_the_models_own_defaults_hold(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9)
    prompt = [5, 6, 7]
    defaults = [generate(llm, prompt)[0].outputs[0].token_ids for _ in range(2)]
    assert [len(tokens) for tokens in defaults] == [16, 16]
    seeded = SamplingParams(temperature=0.7, top_p=0.9, seed=3)
    expected = generate(llm, prompt, seeded)[0].outputs[0].token_ids
    with mock.patch.object(llm, "get_default_sampling_params", return_value=seeded):
        assert generate(llm, prompt)[0].outputs[0].token_ids == expected


def test_an_answer_ends_with_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, min_tokens=100, max_tokens=32_000)
    (result,) = generate(llm, [5] * 500, params)
    (choice,) = result.outputs
    assert (len(choice.token_ids), choice.finish_reason) == (12, "length")


def with_generation(source: Path, folder: Path, **fields: Any) -> str:
    """A copy of a checkpoint with these fields in its generation_config.json."""
    path = shutil.copytree(source, folder) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return str(folder)


def test_a_default_length_is_shortened_to_what_fits(tiny_checkpoint, tmp_path):
    folder = with_generation(tiny_checkpoint(), tmp_path / "model", max_new_tokens=500)
    llm = LLM(folder, dtype="float32", num_blocks=65, max_model_len=40)
    assert llm.get_default_sampling_params().max_tokens == 500
    results = generate(llm, [[5] * 30, [6] * 38])
    assert [len(result.outputs[0].token_ids) for result in results] == [10, 2]
    with pytest.raises(InvalidRequestError, match="context length is 40"):
        generate(llm, [5] * 40)


@pytest.mark.parametrize("attention", ["cpu", "torch"])
def test_tokens_that_a_model_suppresses_are_never_sampled(
    attention: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def load(**generation: Any) -> LLM:
        folder = with_generation(
            tiny_checkpoint(), tmp_path / f"{len(generation)}-model", **generation
        )
        options = {"dtype": "float32", "num_blocks": 65, "speculate": "prompt"}
        return LLM(folder, attention=attention, **options)

    prompt = [5, 6, 7, 5, 6, 7]
    free = generate(load(), prompt, SamplingParams(temperature=0, max_tokens=8))[0]
    first, *others = free.outputs[0].token_ids
    begin = next((i for i in others if i != first), others[0])
    llm = load(suppress_tokens=[first, 10**6], begin_suppress_tokens=[begin])
    bias = {first: 100.0, begin: 99.0}
    for params in (
        SamplingParams(temperature=0, max_tokens=30, logit_bias=bias, logprobs=1),
        SamplingParams(temperature=2.0, max_tokens=30, seed=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, min_tokens=5),
        SamplingParams(
            temperature=0, max_tokens=8, structured_output=StructuredOutput("regex", "[ab]{1,30}")
        ),
    ):
        output = generate(llm, prompt, params)[0].outputs[0]
        assert first not in output.token_ids
        assert output.token_ids[0] != begin
        if params.logit_bias:
            assert first in output.logprobs[0], "it stays the likeliest"
            assert output.token_ids[1] == begin, "it is next"
    with pytest.raises(InvalidRequestError, match="suppress_tokens"):
        generate(llm, prompt, SamplingParams(allowed_token_ids=[first]))


def test_fields_of_a_generation_config_that_are_not_obeyed_are_named_once(
    tiny_checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"stop_strings": ["a"], "no_repeat_ngram_size": 3, "bad_words_ids": []}
    folder = with_generation(tiny_checkpoint(), tmp_path / "model", **fields)
    LLM(folder, dtype="float32", num_blocks=65)
    warnings = [record.getMessage() for record in caplog.records if "not obeyed" in record.message]
    assert warnings == [
        "generation_config.json has fields that are not obeyed: stop_strings, no_repeat_ngram_size."
    ]


def test_priorities_count_where_the_policy_says_so(tiny_checkpoint: Checkpoint, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="scheduling_policy='priority'"):
        llm.generate([[1, 2], [3, 4]], GREEDY, use_tqdm=False, priority=[1, 0])
    folder = str(tiny_checkpoint("smollm2"))
    llm = LLM(folder, dtype="float32", num_blocks=65, scheduling_policy="priority")
    messages = [{"role": "user", "content": "one two three four five six seven eight " * 4}]

    def hits(**options: Any) -> list[int]:
        results = llm.chat([messages] * 2, GREEDY, use_tqdm=False, priority=[1, 0], **options)
        return [result.num_cached_tokens for result in results]

    llm.control.reset_prefix_cache()
    assert hits(cache_options=CacheOptions(write=False)) == [0, 0]
    assert hits(cache_options=CacheOptions(salt="a"))[0] > 0, "the first waits for the second"
    assert min(hits(cache_options=CacheOptions(salt="a"))) > 0
    assert min(hits(cache_options=[CacheOptions(salt="b"), CacheOptions(salt="a")])) == 0


def test_choices_are_seeded_one_after_another(llm: LLM) -> None:
    prompt = [5, 6, 7]
    (result,) = generate(llm, prompt, SamplingParams(n=3, seed=11, max_tokens=8))
    alone = [
        generate(llm, prompt, SamplingParams(seed=11 + i, max_tokens=8))[0].outputs[0].token_ids
        for i in range(3)
    ]
    assert [choice.token_ids for choice in result.outputs] == alone
    assert [choice.index for choice in result.outputs] == [0, 1, 2]
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_a_seed_gives_the_same_text_in_every_batch(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=8, top_p=0.9)
    alone = generate(llm, [5, 6, 7], params)[0].outputs[0].token_ids
    noise = [[9, i, 3] for i in range(20, 27)]
    batch = generate(llm, [*noise, [5, 6, 7]], [SamplingParams(max_tokens=8)] * 7 + [params])
    assert batch[-1].outputs[0].token_ids == alone


def test_logprobs_are_dicts_by_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (result,) = generate(llm, [5, 6, 7, 8], params)
    choice = result.outputs[0]
    assert len(choice.logprobs) == 3
    for token, by_id in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(by_id)) == token
        assert by_id[token].rank == 1
        assert len(by_id) == 2
        assert max(entry.logprob for entry in by_id.values()) == by_id[token].logprob
    assert result.prompt_logprobs[0] is None
    assert [next(iter(by_id)) for by_id in result.prompt_logprobs[1:]] == [6, 7, 8]
    assert generate(llm, [5], GREEDY)[0].outputs[0].logprobs is None


def test_scores_of_an_answer_are_those_it_was_generated_with(llm: LLM) -> None:
    prompt = [5, 6, 7, 8] * 9
    drawn = SamplingParams(seed=3, max_tokens=20, logprobs=0, ignore_eos=True)
    answer = generate(llm, prompt, drawn)[0].outputs[0]
    tokens = [*prompt, *answer.token_ids]
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=len(prompt))
    (scored,) = generate(llm, tokens, asked)
    assert scored.num_cached_tokens == 32  # the last token of the prompt gives the first score
    assert scored.prompt_logprobs == [None] * len(prompt) + answer.logprobs
    beyond = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=1 << 40)
    assert generate(llm, tokens, beyond)[0].prompt_logprobs == [None] * len(tokens)


def test_chats_call_tools(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=60)]
    cut, whole = llm.chat(
        [messages] * 2,
        params,
        use_tqdm=False,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = whole.outputs[0].message.tool_calls
    assert (call.name, call.arguments) == ("f", "{}")
    assert whole.outputs[0].finish_reason == "tool_calls"
    assert whole.outputs[0].message.content == ""
    assert cut.outputs[0].finish_reason == "length"
    assert whole.outputs[0].text.startswith(cut.outputs[0].message.content)
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        llm.chat(messages, GREEDY, tools=tools, tool_choice="sometimes", use_tqdm=False)


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Que sera"}]
    rendered = "<|im_start|>user\nQue sera<|im_end|>\n<|im_start|>assistant\n"
    (result,) = llm.chat(messages, GREEDY, use_tqdm=False)
    expected = generate(llm, {"prompt_token_ids": llm._tokenizer.encode(rendered)}, GREEDY)[0]
    assert result.prompt_token_ids == expected.prompt_token_ids
    assert result.outputs[0].text == expected.outputs[0].text
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": {"text": "a"}}], r"messages\[0\].content must be text or a"),
        (["a"], r"messages\[0\] must be an object, got 'a'"),
        ({"role": "user", "content": "a"}, r"messages\[0\] must be an object"),
    ],
)
def test_messages_that_are_none_are_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_the_salt_of_a_prompt_separates_it(llm: LLM) -> None:
    prompt = [*range(200, 250)]
    salted = {"prompt_token_ids": prompt, "cache_salt": "a"}
    generate(llm, salted, GREEDY)
    assert llm.probe([prompt, salted, {**salted, "cache_salt": "b"}]) == [0, 48, 0]
    assert generate(llm, salted, GREEDY)[0].num_cached_tokens == 48


def test_sampling_params_take_texts_and_lists(llm: LLM) -> None:
    """As vLLM's do; a text is one stop string, not its letters."""
    params = SamplingParams(stop="ab", bad_words="cd", stop_token_ids=None)  # type: ignore[arg-type]
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("ab",), ("cd",), ())
    listed = SamplingParams(temperature=0, stop=["ab", "cd"], stop_token_ids=[400])  # type: ignore[arg-type]
    assert generate(llm, "a", listed)[0].finished
    with pytest.raises(InvalidRequestError, match="temperature must be a number, got None"):
        SamplingParams(temperature=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "at least one token"),
        ([[1, 2], [3, 400]], GREEDY, "token id 400"),
        ([1, 2], [GREEDY, GREEDY], "2 entries for 1 prompts"),
        ([1] * 512, GREEDY, "context length is 512"),
        ("a\ud800b", GREEDY, "surrogate"),
        ({"prompt": "a", "multi_modal_data": {}}, GREEDY, "'multi_modal_data', which is not read"),
        ({"prompt": "a", "cache_salt": 1}, GREEDY, "salt"),
    ],
)
def test_wrong_input_computes_nothing(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    before = llm.control.stats()["queries"]
    with pytest.raises(InvalidRequestError, match=message):
        generate(llm, prompts, params)
    assert llm.control.stats()["queries"] == before
    assert llm.control.stats()["blocks_in_use"] == 0


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert generate(llm, [], GREEDY) == []


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm._engine.step

    def interrupted() -> Any:
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [[1, 2, 3]] * 3, GREEDY)
    monkeypatch.undo()
    assert llm.control.stats()["blocks_in_use"] == 0
    assert generate(llm, [1, 2, 3], GREEDY)[0].finished


def test_the_progress_bar_is_shown_only_when_asked(llm, capsys):
    generate(llm, [1, 2, 3], GREEDY)
    assert capsys.readouterr() == ("", "")
    llm.generate([1, 2, 3], GREEDY)


def test_flags_reach_their_rooms(tiny_checkpoint: Checkpoint) -> None:
    small = LLM(
        str(tiny_checkpoint()),
        dtype="float32",
        num_gpu_blocks_override=9,
        block_size=8,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
    )
    assert small.max_model_len == 64
    for _ in range(2):
        assert generate(small, [*range(40)], GREEDY)[0].num_cached_tokens == 0
    assert small.control.stats()["hits"] == 0


def test_a_chat_template_of_ones_own(tiny_checkpoint: Checkpoint) -> None:
    folder = str(tiny_checkpoint())
    flags = {"dtype": "float32", "num_blocks": 65}
    llm = LLM(folder, chat_template="{{ eos_token }}{{ messages[-1].content }}!", **flags)
    messages = [{"role": "user", "content": "twice"}]
    (result,) = llm.chat(messages, GREEDY, use_tqdm=False)
    text = llm._tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_end|>twice!"


def test_wrong_flags_are_named(tiny_checkpoint: Checkpoint) -> None:
    folder = str(tiny_checkpoint())
    with pytest.raises(ConfigError, match="Unknown flag tensor_size"):
        LLM(folder, tensor_size=2)
    with pytest.raises(
        ConfigError, match=r"holds 128 tokens \(8 blocks of 16\).*max_model_len 512"
    ):
        LLM(folder, num_blocks=9, max_model_len=512, dtype="float32")
    with pytest.raises(ConfigError, match="block_size"):
        LLM(folder, block_size=7)


def test_flags_of_vllm_are_taken_or_refused_by_name(tiny_checkpoint: Checkpoint) -> None:
    folder = str(tiny_checkpoint())
    done_anyway = {
        "tensor_parallel_size": 1,
        "trust_remote_code": False,
        "enable_chunked_prefill": True,
        "enable_lora": False,
        "quantization": "none",
        "load_format": "safetensors",
        "swap_space": 4,
        "tokenizer": None,
        "structured_outputs_config": {"backend": "guidance"},
    }
    assert LLM(folder, num_blocks=33, dtype="float32", **done_anyway).max_model_len == 512
    for name, value, message in (
        ("tensor_parallel_size", 2, "asks for more than one device; only 1 is supported, got 2"),
        ("structured_outputs_config", {"backend": "x"}, "asks for another engine"),
        ("enable_lora", True, "asks for LoRA, which is not supported."),
        ("enable_chunked_prefill", False, "asks for whole prompts in one step"),
        ("quantization", "awq", "must be 'auto', 'none' or 'gguf', got 'awq'"),
        ("load_format", "gguf", "gguf: the model's weights are safetensors, and are served"),
    ):
        with pytest.raises(ConfigError, match=rf"^{name}\S* {message}"):
            LLM(folder, **{name: value})


def test_unknown_names_of_the_package_are_attribute_errors() -> None:
    import prefixcache

    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        _ = prefixcache.Lama  # type: ignore[attr-defined]
