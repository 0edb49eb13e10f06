"""Random schedules of requests, each answer and each KV block compared bit for bit.

`python tests/equality.py --schedules 50` runs many and prints what was compared. The right answer
is that of a lone run without the prefix cache; the right bytes of a full block are those of whoever
wrote it first: a prefill, a chunk or a decode, before or after a preemption, with the cache or
without. Where the model's weights are kept in blocks, lone runs compute with them dequantized,
unless activations have eight bits: those give other numbers, which no schedule may change either.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from fakes.fake_engine import RandomChunks
from fakes.fake_runner import tokens_of_plan
from fakes.plain_drafts import HostileDrafter, plain_drafter
from prefixcache.config.engine_config import Activations, EngineConfig
from prefixcache.config.engine_parts.cache_config import LEAST_CODE_BLOCK, CacheConfig, KVCacheDType
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.config.engine_parts.speculation_config import SpeculationConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.engine.build import _make_drafter, build
from prefixcache.engine.engine import Engine
from prefixcache.kv.specs import KVGroup, kv_layout
from prefixcache.models.conversion import dequantize_folder, quantize_folder
from prefixcache.runner.cpu.kv_memory import KVMemory
from prefixcache.runner.torch.kv_tensors import KVTensors
from prefixcache.scheduler.drafts import Drafter
from prefixcache.text.grammar.answer_matcher import AnswerMatcher
from prefixcache.text.grammar.vocabulary import Words
from prefixcache.types.request import (
    CacheOptions,
    FinishReason,
    Request,
    RequestOutput,
    TokenLogprobs,
)
from prefixcache.types.retention_range import RetentionRange
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import InFlightStep, ScheduledSequence, StepPlan
from prefixcache.types.structured_output import StructuredOutput
from support.tiny_models import VOCAB_SIZE, make_checkpoint

# Widths for which torch's own linears round differently with the number of rows.
WIDE = {
    "hidden_size": 192,
    "intermediate_size": 352,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def with_windows(window: int, *, num_full: int = 1) -> dict[str, Any]:
    """Arguments of a Qwen model of three layers whose last ones have a window."""
    return WIDE | {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": num_full,
    }


# Blocks of 16 tokens hold the convolutions of two layers in a tensor, those of 8 one.
LFM2 = {name: size for name, size in WIDE.items() if name != "head_dim"}

# Heads of two sizes, which share blocks.
GEMMA4 = WIDE | {"global_head_dim": 64}

BLOCK = 16
MAX_ANSWER = 64
GRAMMARS = (
    StructuredOutput("json", '{"type": "array", "items": {"type": "integer"}, "maxItems": 9}'),
    StructuredOutput("regex", "([a-e]{2,9}[.] )+"),
    StructuredOutput("choice", '["yes", "no", "nobody knows"]', begin_after="e"),
)

Interruption = Literal["reset", "recompute", "sleep", "abort"]

# The format of weights, None for dense ones, and what they are multiplied with.
WEIGHTS: tuple[tuple[str | None, Activations], ...] = (
    (None, "exact"),
    ("Q4_1", "exact"),
    ("Q8_0", "exact"),
    ("Q4_1", "int8"),
    ("Q8_0", "int8"),
)

INTERRUPTIONS: tuple[Interruption, ...] = ("reset", "recompute", "sleep", "abort")


@dataclass
class Counts:
    """What was compared, and what really happened meanwhile."""

    outputs: int = 0
    blocks: int = 0
    differences: int = 0
    block_differences: int = 0
    hit_tokens: int = 0
    disk_tokens: int = 0
    restored: int = 0
    chunks: int = 0
    preemptions: int = 0
    evictions: int = 0
    waits_in_flight: int = 0
    merged_blocks: int = 0
    interruptions: int = 0
    guided: int = 0
    late_masks: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Counts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def __str__(self) -> str:
        return ", ".join(
            f"{getattr(self, f.name)} {f.name.replace('_', ' ')}" for f in fields(self)
        )


@dataclass
class Answer:
    """All that came of one request."""

    tokens: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    text: str = ""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None

    def push(self, output: RequestOutput) -> None:
        assert output.error is None, output.error
        self.tokens += zip(output.token_ids, output.logprobs, strict=True)
        self.text += output.text
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = output.finish_reason

    def agrees(self, expected: Answer) -> bool:
        """Equal, or the beginning of it where the request was aborted."""
        if self.finish_reason != "abort":
            return self == expected
        return self.tokens == expected.tokens[: len(self.tokens)]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How requests meet: how many, when each arrives (in steps), and what the engine allows.

    `num_blocks` counts blocks of `BLOCK` tokens for each KV cache group, whatever `block_size` is.
    Interruptions come before the step they name.
    """

    seed: int
    arrivals: tuple[int, ...]
    max_prompt: int = 256
    num_blocks: int = 200
    block_size: int = BLOCK
    max_num_batched_tokens: int = 64
    random_chunks: bool = False
    max_num_seqs: int = 8
    enable_prefix_caching: bool = True
    share_in_flight: bool = True
    merge_duplicate_blocks: bool = True
    interruptions: tuple[tuple[int, Interruption], ...] = ()
    speculates: bool = False
    disk: Path | None = None
    kept: Path | None = None


def random_schedule(seed: int, *, speculates: bool = False) -> Schedule:
    """Half of them crowded: a burst of requests, and a pool that their answers outgrow."""
    choose = random.Random(seed)
    crowded = choose.random() < 0.5
    span = choose.choice([1, 4] if crowded else [4, 12, 60])
    return Schedule(
        seed=seed,
        arrivals=tuple(choose.randrange(span) for _ in range(choose.randrange(4, 10))),
        max_prompt=80 if crowded else 256,
        num_blocks=choose.choice([12, 14, 18] if crowded else [26, 48, 200]),
        block_size=choose.choice([16, 16, 16, 8, 32]),
        max_num_batched_tokens=choose.choice([8, 17, 50, 64, 256, 1024]),
        random_chunks=choose.random() < 0.5,
        max_num_seqs=choose.choice([4, 8] if crowded else [2, 4, 8]),
        enable_prefix_caching=choose.random() < 0.9,
        share_in_flight=choose.random() < 0.6,
        merge_duplicate_blocks=choose.random() < 0.6,
        interruptions=tuple(
            (choose.randrange(1, 60), choose.choice(INTERRUPTIONS))
            for _ in range(choose.choice([0, 0, 1, 3]))
        ),
        speculates=speculates,
    )


def schedule_on_disk(seed: int, disk: Path, kept: Path | None = None) -> Schedule:
    """More requests over a longer time than memory has room for, which lies in `kept` if given."""
    choose, schedule = random.Random(seed), random_schedule(seed)
    arrivals = tuple(choose.randrange(200) for _ in range(16))
    return replace(
        schedule,
        arrivals=arrivals,
        max_prompt=160,
        num_blocks=16,
        block_size=16,
        enable_prefix_caching=True,
        disk=disk,
        kept=kept,
    )


class Author:
    """Writes requests that share and branch: after a stem, after earlier prompts and answers."""

    def __init__(self, schedule: Schedule) -> None:
        self._choose = random.Random(schedule.seed)
        self._controls = random.Random(schedule.seed)  # the other choices do not depend on these
        self._name = str(schedule.seed)
        self._speculates = schedule.speculates
        self._max_prompt = schedule.max_prompt
        self._stem = self._tokens(160)
        self._requests: list[Request] = []
        self._histories: list[list[int]] = []

    def write(self) -> Request:
        """The next request; `remember` its answer before the one after it."""
        request_id = f"{self._name}-{len(self._requests)}"
        if self._requests and self._choose.random() < 0.15:
            return self._another_choice(request_id)
        prompt = self._prompt()
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=self._with_ends(self._params()),
            cache=self._cache_options(len(prompt)),
            priority=self._choose.choice([0, 0, 0, -1, 1]),
        )

    def remember(self, request: Request, answer: Answer) -> None:
        self._requests.append(request)
        self._histories.append([*request.prompt_token_ids, *(token for token, _ in answer.tokens)])

    def _another_choice(self, request_id: str) -> Request:
        """What `n` above 1 makes of an earlier request."""
        first = self._choose.choice(self._requests)
        return replace(first, request_id=request_id, params=first.params.for_choice(1))

    def _prompt(self) -> list[int]:
        choose = self._choose
        prompt = self._stem[: choose.choice([0, 16, 31, 96, 144, 149, 160])]
        if self._histories and choose.random() < 0.5:
            history = choose.choice(self._histories)
            prompt = history[: choose.choice([len(history), choose.randrange(len(history))])]
        tail = choose.choice([0, choose.randrange(1, 40)])
        prompt = prompt[: self._max_prompt] + self._tokens(tail)
        if choose.random() < 0.3:
            prompt += self._tokens(-len(prompt) % BLOCK)
        return prompt[: self._max_prompt] or self._tokens(1)

    def _params(self) -> SamplingParams:
        choose = self._choose
        return SamplingParams(
            temperature=choose.choice([0.0, 0.9]),
            seed=choose.randrange(1 << 32),
            top_p=choose.choice([1.0, 0.9]),
            top_k=choose.choice([0, 0, 20]),
            min_p=choose.choice([0.0, 0.0, 0.05]),
            presence_penalty=choose.choice([0.0, 0.0, 0.7]),
            frequency_penalty=choose.choice([0.0, 0.0, 0.4]),
            repetition_penalty=choose.choice([1.0, 1.0, 1.3]),
            logit_bias=choose.choice([{}, {}, {choose.randrange(3, VOCAB_SIZE): 4.0}]),
            max_tokens=choose.randrange(1, choose.choice([20, MAX_ANSWER])),
            min_tokens=choose.choice([0, 1]),
            logprobs=3,
            prompt_logprobs=choose.choice([None, None, None, None, 2]),
            logprob_start_len=choose.choice([0, choose.randrange(40)]),
            stop_token_ids=tuple(self._tokens(choose.choice([0, 0, 3]))),
            ignore_eos=choose.random() < 0.7,
            structured_output=choose.choice([None, None, None, *GRAMMARS]),
        )

    def _with_ends(self, params: SamplingParams) -> SamplingParams:
        """With drafts: more that depends on the tokens before, or ends an answer within a step."""
        if not self._speculates:
            return params
        controls = self._controls
        words = tuple(
            (t, controls.randrange(3, VOCAB_SIZE)) for t in controls.sample(range(3, 9), 3)
        )
        return replace(
            params,
            stop=controls.choice([(), (), ("e",), ("ab", "th")]),
            min_tokens=min(controls.choice([0, 1, 9]), params.max_tokens or 0),
            bad_words_token_ids=controls.choice([(), words]),
            frequency_penalty=max(params.frequency_penalty, controls.choice([0.0, 1.0])),
        )

    def _cache_options(self, length: int) -> CacheOptions:
        """Of a prompt of that length; a third of them have hints or write up to a token alone."""
        choose, controls = self._choose, self._controls
        cut = controls.randrange(length)
        hints = (RetentionRange(0, cut + 1, ttl_s=60), RetentionRange(cut + 1, priority=20))
        return CacheOptions(
            salt=choose.choice([None, None, None, None, "tenant"]),
            read=choose.random() < 0.9,
            write=choose.random() < 0.9,
            retention=hints if controls.random() < 0.2 else (),
            write_upto=cut if controls.random() < 0.2 else None,
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._choose.randrange(3, VOCAB_SIZE) for _ in range(count)]


class Witness:
    """Remembers the bytes of each layer in every full block by all tokens up to its end.

    Compares who writes it again.
    """

    def __init__(self) -> None:
        self._digests: dict[bytes, bytes] = {}
        self._tokens: dict[str, list[int]] = {}
        self.compared = 0
        self.differences = 0

    def meet(self, request: Request) -> None:
        """Learns the prompt, whose beginning a step need not compute."""
        self._tokens[request.request_id] = list(request.prompt_token_ids)

    def see(self, engine: Engine, plan: StepPlan, step: InFlightStep) -> None:
        """Looks at the blocks that a step has filled with tokens that count."""
        size = engine._cache.block_size
        outputs = engine._steps._runner.results(step).outputs if plan.drafts else ()
        refused = {
            row: len(guesses) - len(outputs[row].after_drafts) for row, guesses in plan.drafts
        }
        for row, (sequence, found) in enumerate(tokens_of_plan(plan)):
            tokens = self._tokens[sequence.request_id]
            tokens[sequence.start : sequence.start + sequence.num_tokens] = found
            for index in _filled_blocks(sequence, refused.get(row, 0), size):
                name = np.asarray([size, *tokens[: (index + 1) * size]]).tobytes()
                for layer, content in _bytes_of_layers(engine, row, index).items():
                    self._compare(name + layer.to_bytes(2, "little"), content)

    def _compare(self, name: bytes, content: bytes) -> None:
        digest = hashlib.sha256(content).digest()
        self.compared += name in self._digests
        self.differences += self._digests.setdefault(name, digest) != digest


def _filled_blocks(sequence: ScheduledSequence, refused: int, size: int) -> range:
    stop = sequence.start + sequence.num_tokens - refused
    return range(sequence.start // size, stop // size)


def _bytes_of_layers(engine: Engine, row: int, index: int) -> dict[int, bytes]:
    """What each layer keeps in a sequence's block; states are not kept in null blocks."""
    kv = engine._steps._runner.kv  # type: ignore[attr-defined]
    rows = kv.rows() if isinstance(kv, KVMemory) else _rows_of(kv)
    parts, blocks = dict[int, bytes](), list[int]()
    for tables, group in zip(engine._steps._runner.block_tables, kv.layout.groups, strict=True):
        page = tables.indptr[row] + index - tables.first_pages[row]
        blocks.append(block := int(tables.indices[page]))
        for number, layer in enumerate(() if group.state_tensors else group.layers):
            tensor, part = group.part(number)
            numbers = rows[tensor][block].view(f"V{kv.itemsize}")[part]
            if group.conv_width:
                numbers = _needed_inputs(numbers, group, engine._cache.block_size)
            parts[layer] = numbers.tobytes()
    for state in kv.layout.states:
        numbers = rows[state.tensor][blocks[state.group]].view(np.float32)[state.start :]
        parts[state.layer] = parts.get(state.layer, b"") + numbers[: state.numbers].tobytes()
    for state in kv.layout.states:
        if blocks[state.group] == 0:
            parts.pop(state.layer, None)
    return parts


def _needed_inputs(numbers: npt.NDArray[Any], group: KVGroup, size: int) -> npt.NDArray[Any]:
    """Those of a convolution that later blocks need; engines that guess keep more of them."""
    assert group.sliding_window is not None
    needed = range(max(0, size - group.sliding_window + 1), size)
    places = [place % group.kept_tokens for place in needed]
    return numbers.reshape(group.kept_tokens, group.conv_width)[places]


def _rows_of(kv: KVTensors) -> list[npt.NDArray[np.uint8]]:
    return [tensor.flatten(1).view(torch.uint8).numpy() for tensor in kv._tensors]


class Bench:
    """One tiny model; lone cold runs against schedules.

    `dequantized` is a folder with the same weights, dense, that lone runs then compute with, where
    `activations` are exact.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        invariant: bool = True,
        dequantized: Path | None = None,
        activations: Activations = "exact",
        threads: int = 1,
        kv: KVCacheDType = "auto",
    ) -> None:
        self._folder = folder
        self._kv: KVCacheDType = kv
        self._threads = threads
        self._activations: Activations = activations
        self._dtype = dtype
        self._invariant = invariant
        self._witness = Witness()
        self._chunks = 0
        lone = Schedule(
            seed=0, arrivals=(0,), max_num_batched_tokens=1024, enable_prefix_caching=False
        )
        self._lone = self._engine(lone, dequantized or folder)

    def compare(self, schedule: Schedule) -> Counts:
        """Runs the schedule and counts answers and blocks that differ from those before."""
        compared, differing = self._witness.compared, self._witness.differences
        expected = self._lone_answers(schedule)
        self._chunks = 0
        engine = self._engine(schedule, self._folder)
        if schedule.speculates:
            engine._scheduler.drafter = self._drafter(schedule, expected)
        states = engine._steps._runner.kv.layout.states  # type: ignore[attr-defined]
        with late_masks(schedule.seed, held=bool(states)) as late:
            answers = run(engine, [request for request, _ in expected], schedule)
        different = sum(not answers[r.request_id].agrees(right) for r, right in expected)
        engine.close()
        gauges = engine.metrics.gauges()
        if engine._cache.file is not None:
            engine._cache.file.close()
        return Counts(
            outputs=len(answers),
            blocks=self._witness.compared - compared,
            differences=different,
            block_differences=self._witness.differences - differing,
            hit_tokens=gauges.num_hit_tokens,
            disk_tokens=gauges.loads.tokens if gauges.loads else 0,
            restored=gauges.file.restored if gauges.file else 0,
            chunks=self._chunks,
            preemptions=gauges.num_preemptions,
            evictions=engine.control.stats()["evictions"],
            waits_in_flight=gauges.num_in_flight_waits,
            merged_blocks=engine._cache.num_merged_blocks,
            interruptions=len(schedule.interruptions),
            guided=sum(request.params.structured_output is not None for request, _ in expected),
            late_masks=late.call_count,
            drafted=sum(gauges.drafts.drafted.values()) if gauges.drafts else 0,
            accepted=sum(gauges.drafts.accepted.values()) if gauges.drafts else 0,
        )

    def _drafter(self, schedule: Schedule, expected: Sequence[tuple[Request, Answer]]) -> Drafter:
        """What a server has at times, or the same with short matches too; else all kinds."""
        if schedule.seed % 3 == 0:
            return plain_drafter() if schedule.seed % 2 else server_drafter()
        answers = {
            request.request_id: [*request.prompt_token_ids, *(token for token, _ in answer.tokens)]
            for request, answer in expected
        }
        return HostileDrafter(schedule.seed, answers, VOCAB_SIZE)

    def _lone_answers(self, schedule: Schedule) -> list[tuple[Request, Answer]]:
        author, answered = Author(schedule), list[tuple[Request, Answer]]()
        alone = replace(schedule, arrivals=(0,), interruptions=())
        for _ in schedule.arrivals:
            request = author.write()
            self._witness.meet(request)
            answer = run(self._lone, [request], alone)[request.request_id]
            author.remember(request, answer)
            answered.append((request, answer))
        return answered

    def _engine(self, schedule: Schedule, folder: Path) -> Engine:
        engine = make_engine(
            folder,
            self._dtype,
            self._invariant,
            schedule,
            self._activations,
            self._threads,
            self._kv,
        )
        submit = engine._steps._runner.submit

        def watched(plan: StepPlan) -> InFlightStep:
            step = submit(plan)
            self._chunks += sum(sequence.sampling is None for sequence in plan.sequences)
            self._witness.see(engine, plan, step)
            return step

        engine._steps._runner.submit = watched  # type: ignore[method-assign]
        return engine


def server_drafter() -> Drafter:
    """As `--speculate cache` makes it."""
    drafter = _make_drafter(SpeculationConfig(speculate="cache"))
    assert drafter is not None
    return drafter


def make_pair(
    scratch: Path,
    dtype: str,
    quant_format: str | None,
    architecture: str = "qwen3",
    **shape: Any,
) -> tuple[Path, Path | None]:
    """A tiny model's folder, in blocks of a format if one is given, and its weights dequantized."""
    dense = make_checkpoint(scratch / "dense", architecture, dtype=getattr(torch, dtype), **shape)
    if quant_format is None:
        return dense, None
    blocks, dequantized = scratch / "blocks", scratch / "dequantized"
    blocks.mkdir()
    dequantized.mkdir()
    quantize_folder(dense, blocks, quant_format)
    dequantize_folder(blocks, dequantized, dtype)
    return blocks, dequantized


def make_engine(
    folder: Path,
    dtype: str,
    invariant: bool,
    schedule: Schedule,
    activations: Activations = "exact",
    threads: int = 1,
    kv: KVCacheDType = "auto",
) -> Engine:
    if kv == "int8":
        schedule = replace(schedule, block_size=max(schedule.block_size, LEAST_CODE_BLOCK))
    speculation = SpeculationConfig(speculate="cache" if schedule.speculates else "off")
    most_refused = 1 + (speculation.most if schedule.speculates else 0)
    itemsize = getattr(torch, dtype).itemsize
    layout = kv_layout(
        ModelConfig.from_hf(folder),
        schedule.block_size,
        most_refused,
        itemsize,
        has_codes=kv == "int8",
    )
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,  # type: ignore[arg-type]
        device="cpu",
        cpu_activations=activations,
        cpu_threads=threads,
        batch_invariant=invariant,
        attention="auto" if invariant else "torch",
        cache=CacheConfig(
            num_blocks=len(layout.groups) * schedule.num_blocks * BLOCK // schedule.block_size,
            block_size=schedule.block_size,
            kv_cache_dtype=kv,
            state_block_size=1,
            enable_prefix_caching=schedule.enable_prefix_caching,
            merge_duplicate_blocks=schedule.merge_duplicate_blocks,
            disk_cache_memory=None if schedule.disk is None else 1 << 28,
            disk_cache_dir=schedule.disk,
            kv_cache_dir=schedule.kept,
            disk_cache_min_uses=1 if schedule.disk is None else 1 + schedule.seed % 2,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_step_ms=1 if schedule.random_chunks else 0,
            max_num_seqs=schedule.max_num_seqs,
            max_model_len=schedule.max_prompt + MAX_ANSWER,
            share_in_flight=schedule.share_in_flight,
        ),
        speculation=speculation,
    )
    with mock.patch("prefixcache.engine.build.StepTimeModel", RandomChunks):
        return build(config, folder).engine


def run(engine: Engine, requests: Sequence[Request], schedule: Schedule) -> dict[str, Answer]:
    """Serves requests that arrive, and are interrupted, at given steps."""
    answers = {request.request_id: Answer() for request in requests}
    waiting = sorted(zip(schedule.arrivals, range(len(requests)), strict=True), reverse=True)
    step = 0
    while waiting or engine.has_unfinished():
        while waiting and waiting[-1][0] <= step:
            engine.add_request(requests[waiting.pop()[1]])
        for at, kind in schedule.interruptions:
            if at == step:
                interrupt(engine, kind)
        for output in [*engine.take_outputs(), *engine.step()]:
            answers[output.request_id].push(output)
        step += 1
    return answers


@contextmanager
def late_masks(seed: int, *, held: bool) -> Generator[mock.Mock, None, None]:
    """Lets every sixth mask be late; the mock is called for each.

    Where answers are `held` until their masks are known, it is found unknown before the step.
    """
    choose, count, words = random.Random(seed), mock.Mock(), AnswerMatcher.words

    def often(matcher: AnswerMatcher, seconds: float, unwanted: tuple[int, ...]) -> Words | None:
        if choose.random() < 1 / 6:
            count()
            matcher._was_late = True
            return None
        return words(matcher, 60, unwanted)

    def unknown(matcher: AnswerMatcher) -> bool:
        if choose.random() < 1 / 6:
            count()
            return False
        return matcher._track.is_known.is_set()

    if held:
        with mock.patch.object(AnswerMatcher, "is_known", property(unknown)):
            yield count
        return
    with mock.patch.object(AnswerMatcher, "words", often):
        yield count


def interrupt(engine: Engine, kind: Interruption) -> None:
    """What an operator may do between two steps, and a client that goes away."""
    if kind == "reset":
        engine.control.reset_prefix_cache()
    elif kind == "recompute":
        engine.control.pause("recompute")
        engine.control.resume()
    elif kind == "sleep":
        engine.control.sleep()
        engine.control.wake_up()
    else:
        engine.requests._outbox += engine.abort([*engine._answers][:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=50, help="for each type and thread count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, help="of two layers of three")
    architectures = ["qwen3", "qwen3.5", "qwen3.5-moe", "qwen3-next", "granite4-h", "lfm2"]
    architectures += ["qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "gemma4", "gemma4-large"]
    parser.add_argument("--architecture", choices=architectures, default="qwen3")
    parser.add_argument("--speculate", choices=("off", "cache"), default="off")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--no-batch-invariant", action="store_true", help="to see it fail")
    arguments = parser.parse_args()
    total = Counts()
    shape = with_windows(arguments.window) if arguments.window else WIDE
    if arguments.architecture == "lfm2":
        shape = LFM2
    if arguments.architecture.startswith("gemma4"):
        shape = GEMMA4
    for dtype, (quant_format, activations) in product(("float32", "bfloat16"), WEIGHTS):
        with tempfile.TemporaryDirectory() as scratch:
            # Guesses meet experts and states too.
            architecture = arguments.architecture
            if (architecture, arguments.speculate) == ("qwen3", "cache"):
                others = {"Q4_1": "qwen2-moe", "Q8_0": "qwen3.5"}
                architecture = others.get(quant_format or "", architecture)
            folder, dequantized = make_pair(
                Path(scratch), dtype, quant_format, architecture, **shape
            )
            for threads in (1, 2):
                bench = Bench(
                    folder,
                    dtype,
                    threads=threads,
                    invariant=not arguments.no_batch_invariant,
                    dequantized=dequantized if activations == "exact" else None,
                    activations=activations,
                    kv=arguments.kv_cache_dtype,
                )
                counts = Counts()
                count = arguments.schedules // (1 if quant_format is None else 4)
                for seed in range(arguments.seed, arguments.seed + max(1, count)):
                    schedule = random_schedule(seed, speculates=arguments.speculate != "off")
                    counts.add(bench.compare(schedule))
                weights = f"{quant_format or 'dense'}, {activations}"
                print(f"{dtype}, {weights}, {threads} threads: {counts}", flush=True)
                total.add(counts)
    print(f"all: {total}")
    raise SystemExit(total.differences + total.block_differences > 0)


if __name__ == "__main__":
    main()
