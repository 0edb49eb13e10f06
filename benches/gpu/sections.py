"""The parts of a run. Each is a process of its own, since matmuls are pinned before CUDA starts.

`python sections.py NAME[+NAME...] OPTIONS RECORD`, OPTIONS in JSON. A section is made of parts, of
which one that fails does not end the others; their rows are added to the record as they come.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import compiled
import details
import peers
import torch
from progress import LOST, Progress, device_is_lost
from record import Part, Row, append_row
from shapes import SHAPES
from system import Setup, System, mixed_batch, random_model, random_prompts, reference_attention

from prefixcache.config.rope_config import RopeConfig
from prefixcache.kv.specs import KVGroup
from prefixcache.runner.torch.attention.base import AttentionGroup, AttentionSpec, kv_shape_nhd
from prefixcache.runner.torch.attention.registry import AttentionOptions, make_attention
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.ops import activation, norm, rope
from prefixcache.runner.torch.ops.cuda import is_hopper, pin_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the workloads are."""

    requests: int
    shared: int
    own: int
    outputs: tuple[int, int]
    batches: tuple[int, ...]
    context: int
    decode_steps: int
    step_tokens: int
    chunk: int
    matmul_rows: int

    @property
    def max_model_len(self) -> int:
        """Room for the longest sequence of any section."""
        whole = self.shared + self.own + max(self.outputs)
        return max(whole, self.context + self.decode_steps) + 16


SCALES = {
    "full": Scale(
        requests=64,
        shared=1024,
        own=64,
        outputs=(128, 8),
        batches=(1, 64, 256),
        context=1024,
        decode_steps=32,
        step_tokens=8192,
        chunk=300,
        matmul_rows=512,
    ),
    "dry": Scale(
        requests=4,
        shared=48,
        own=16,
        outputs=(8, 4),
        batches=(1, 4),
        context=32,
        decode_steps=4,
        step_tokens=64,
        chunk=30,
        matmul_rows=8,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a section is given."""

    device: str
    scale: str
    shape: str = ""
    peer: str = ""
    folder: str = ""
    progress: str = ""
    begun: int = 0

    @property
    def torch_device(self) -> torch.device:
        """The device, with its index where it has one."""
        if self.device == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device)


RELATIVE_ERROR = 0.02
_REPEATS = 3
ABSOLUTE_ERROR = {"cuda": 0.02, "cpu": 1e-4}


def smoke(options: Options) -> Iterator[Part]:
    """Each fused op once, then each mode: a few steps, eagerly and from graphs."""
    device = options.torch_device
    for name, check in _fused_ops(device):
        yield name, partial(_checked, name, check)
    scale = SCALES["dry"]
    prompts = random_prompts(4, 0, scale.context, _vocab(options), seed=6)
    for attention, invariant in _modes(device):
        answers: list[Any] = []

        def answered(setup: Setup, answers: list[Any] = answers) -> bool:
            system = System(_model(options, scale), setup)
            answers.append(system.answer(prompts, 4, logprobs=True))
            # Graphs add rows to a batch: bits are kept only where they are promised.
            return not setup.batch_invariant or answers[0] == answers[-1]

        for eager in (True, False) if device.type == "cuda" else (True,):
            setup = _setup(scale, attention=attention, batch_invariant=invariant, eager=eager)
            what = f"{_mode_name(attention, invariant)}, {'eager' if eager else 'graphs'}"
            yield what, partial(_checked, what, partial(answered, setup))


def _fused_ops(device: torch.device) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Ops whose device form is one Triton kernel, against their plain forms."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(33, 12, 128, generator=generator).to(dtype)
    weight = torch.randn(12, 128, generator=generator).to(dtype)

    def same(op: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> bool:
        there = op(*(tensor.to(device) for tensor in inputs)).cpu()
        return torch.allclose(there, op(*inputs), atol=2**-7, rtol=2**-7)

    table = rope.RotaryEmbedding(RopeConfig(), 128, 64, torch.device("cpu")).at(torch.arange(33))
    yield "rms_norm", partial(same, partial(norm.rms_norm, eps=1e-6), heads, weight)
    offset = partial(norm.rms_norm, eps=1e-6, offset=1.0)
    yield "rms_norm with an offset", partial(same, offset, heads, weight)
    yield "silu_and_mul", partial(same, activation.silu_and_mul, heads.flatten(1))
    yield "gelu_tanh_and_mul", partial(same, activation.gelu_tanh_and_mul, heads.flatten(1))
    yield "apply_rope", partial(same, rope.apply_rope, heads, *table)


def _checked(what: str, check: Callable[[], bool]) -> Iterator[Row]:
    """Seconds of a check, and whether it holds."""
    begun = time.perf_counter()
    ok = check()
    seconds = time.perf_counter() - begun
    yield {"section": "smoke", "what": what, "value": seconds, "unit": "s", "ok": ok}


def jit_build(options: Options) -> Iterator[Part]:
    """All kernels that FlashInfer must compile, at once."""
    if options.device == "cuda":
        yield "", partial(compiled.build_all, hopper=is_hopper(options.torch_device))


def jit_keep(options: Options) -> Iterator[Part]:
    """The kernels that are there by now, for the next machine."""
    if options.device == "cuda":
        yield "", partial(compiled.keep_all, Path(options.folder))


def _kernels(cases: tuple[dict[str, Any], ...], options: Options) -> Iterator[Part]:
    """FlashInfer against its torch reference, one layer, a mixed step."""
    for case in cases:
        what = ", ".join(f"{key} {value}" for key, value in case.items())
        yield what, partial(_kernel_rows, what, compiled.spec_of(case), options.torch_device)


def _kernel_rows(what: str, spec: AttentionSpec, device: torch.device) -> Iterator[Row]:
    error = _attention_error(spec, device)
    yield {
        "section": "kernels",
        "what": what,
        "value": error,
        "unit": f"largest error beyond {RELATIVE_ERROR:.0%}",
        "ok": error < ABSOLUTE_ERROR[device.type],
    }


def equality(options: Options) -> Iterator[Part]:
    """Answers of the same prompts: cold and alone, hit, chunked, in a batch. Bits are compared."""
    for attention, invariant in _modes(options.torch_device):
        name = _mode_name(attention, invariant)
        yield name, partial(_equality_rows, options, name, attention, invariant)


def _equality_rows(options: Options, name: str, attention: str, invariant: bool) -> Iterator[Row]:
    scale = SCALES[options.scale]
    model = _model(options, scale)
    count = min(scale.requests, 8)
    prompts = random_prompts(count, scale.shared, scale.own, _vocab(options), seed=1)
    base = _setup(scale, attention=attention, batch_invariant=invariant)
    system = System(model, base)
    alone = []
    for prompt in prompts:
        system.engine.control.reset_prefix_cache()
        alone += system.answer([prompt], scale.outputs[1], logprobs=True)
    kept = system.attention.batch_invariant

    def row(what: str, answers: list[Any], hits: int) -> Row:
        differing = sum(a != b for a, b in zip(alone, answers, strict=True))
        return {
            "section": "equality",
            "what": f"{options.shape}, {name}, {what}",
            "value": differing,
            "unit": f"of {count} answers differ; {hits} hit tokens",
            # Where nothing is promised, the number alone is shown.
            **({"ok": differing == 0} if kept else {}),
            "setting": f"{options.shape}: {what}, answers of {count} that differ",
            "contender": "default" if kept else "fastest",
        }

    before = system.hit_tokens
    answers = system.answer(prompts, scale.outputs[1], logprobs=True)
    yield row("hit and batch", answers, system.hit_tokens - before)
    del system
    chunked = System(model, dataclasses.replace(base, max_tokens=scale.chunk, max_seqs=8))
    answers = chunked.answer(prompts, scale.outputs[1], logprobs=True)
    yield row("chunks and batch", answers, chunked.hit_tokens)


def workload(options: Options, *, batch_invariant: bool = True) -> Iterator[Part]:
    """Requests that share a long beginning, with the cache off and on; outputs long and short."""
    for output in SCALES[options.scale].outputs:
        rates: dict[bool, float] = {}
        for cached in (False, True):
            what = f"output {output}, cache {'on' if cached else 'off'}"
            yield what, partial(_workload_rows, options, output, cached, batch_invariant, rates)


def _workload_rows(
    options: Options, output: int, cached: bool, batch_invariant: bool, rates: dict[bool, float]
) -> Iterator[Row]:
    device, scale, vocab = options.torch_device, SCALES[options.scale], _vocab(options)
    setup = _setup(
        scale, attention=_fast(device), prefix_caching=cached, batch_invariant=batch_invariant
    )
    system = System(_model(options, scale), setup)
    system.answer(random_prompts(scale.requests, 0, scale.own, vocab, seed=2), 4)
    prompts = random_prompts(scale.requests, scale.shared, scale.own, vocab, seed=3)
    before = system.hit_tokens

    def burst() -> float:
        system.engine.control.reset_prefix_cache()
        return system.seconds(prompts, output)

    rates[cached] = scale.requests / _median_of_repeats(burst)
    hit_tokens = (system.hit_tokens - before) // _REPEATS
    kind = "cache on" if cached else "cache off"
    if not batch_invariant:
        kind = f"fastest, {kind}"
    yield {
        "section": "workload",
        "what": f"{options.shape}, output {output}, {kind}",
        "value": rates[cached],
        "unit": f"requests/s; {hit_tokens} hit tokens",
        "setting": f"{options.shape}: output {output} (requests/s)",
        "contender": kind,
    }
    if len(rates) == 2:
        yield {
            "section": "workload",
            "what": f"{options.shape}, output {output}, on / off",
            "value": rates[True] / rates[False],
            "unit": "times",
        }


def _median_of_repeats(seconds: Callable[[], float]) -> float:
    return statistics.median(seconds() for _ in range(_REPEATS))


def steps(options: Options) -> Iterator[Part]:
    """A prefill, and decode steps of several batches, against the least they can take."""
    for eager in _step_kinds(options.torch_device):
        kind = "eager" if eager else "graphs"
        yield kind, partial(_steps_rows, options, eager, kind)
        yield f"first token, {kind}", partial(_first_token_rows, options, eager, kind)


def _steps_rows(options: Options, eager: bool, kind: str) -> Iterator[Row]:
    scale, vocab = SCALES[options.scale], _vocab(options)
    attention = _fast(options.torch_device)
    setup = _setup(scale, attention=attention, prefix_caching=False, eager=eager)
    system = System(_model(options, scale), dataclasses.replace(setup, max_seqs=max(scale.batches)))
    first = random_prompts(3, 0, scale.context, vocab, seed=4)
    times = [1000 * system.seconds([prompt], 1) for prompt in first]
    yield _step_row(options, f"prefill of {scale.context}, {kind}", min(times), "prefill")
    for batch in scale.batches:
        prompts = random_prompts(batch, 0, scale.context, vocab, seed=batch)
        ms = system.decode_ms(prompts, scale.decode_steps)
        yield _decode_row(options, batch, ms, "default" if kind == "graphs" else kind)


def _first_token_rows(options: Options, eager: bool, kind: str) -> Iterator[Row]:
    """Of a prompt alone, on a miss and on a hit of its shared beginning."""
    scale, vocab = SCALES[options.scale], _vocab(options)
    setup = _setup(scale, attention=_fast(options.torch_device), eager=eager)
    system = System(_model(options, scale), setup)
    first, *others = random_prompts(6, scale.shared, scale.own, vocab, seed=6)
    misses: list[float] = []
    for _ in others:
        system.engine.control.reset_prefix_cache()
        misses.append(system.seconds([first], 1))
    hits = [system.seconds([prompt], 1) for prompt in others]
    for contender, seconds in (("miss", misses), ("hit", hits)):
        what = f"first token of {scale.shared} + {scale.own}"
        row = _step_row(options, f"{what}, {contender}, {kind}", 1000 * statistics.median(seconds))
        where = {"setting": f"{options.shape}: {what}, {kind} (ms)", "contender": contender}
        yield row | where


def fast_steps(options: Options) -> Iterator[Part]:
    """Decode steps that keep no bits, next to those of `steps`."""
    yield "", partial(_fast_rows, options)


def _fast_rows(options: Options) -> Iterator[Row]:
    scale, attention = SCALES[options.scale], _fast(options.torch_device)
    setup = _setup(scale, attention=attention, batch_invariant=False, prefix_caching=False)
    system = System(_model(options, scale), setup)
    for batch in (1, scale.requests):
        prompts = random_prompts(batch, 0, scale.context, _vocab(options), seed=batch)
        ms = system.decode_ms(prompts, scale.decode_steps)
        yield _decode_row(options, batch, ms, "fastest")


def peer(options: Options) -> Iterator[Part]:
    """The same workload by another engine, where it is installed."""
    yield "", partial(_peer_rows, options)


def _peer_rows(options: Options) -> Iterator[Row]:
    scale = SCALES[options.scale]
    shape = SHAPES[options.shape]
    prompts = random_prompts(scale.requests, scale.shared, scale.own, _vocab(options), seed=3)
    engine = peers.PEERS[options.peer].make(shape, options.torch_device, scale.max_model_len)
    for output in scale.outputs:
        yield {
            "section": "peers",
            "what": f"{options.shape}, output {output}, {options.peer}",
            "value": scale.requests / _median_of_repeats(partial(engine, prompts, output)),
            "unit": "requests/s",
            "setting": f"{options.shape}: output {output} (requests/s)",
            "contender": options.peer,
        }


def _explained(rows: Callable[..., Iterator[Row]], options: Options) -> Iterator[Part]:
    """What a step's time is made of, as `rows` of details tell."""
    scale, shape = SCALES[options.scale], SHAPES[options.shape]
    setup = _setup(scale, attention=_fast(options.torch_device), prefix_caching=False)
    yield "", lambda: rows(shape, _model(options, scale), setup, scale.context)


def attention(options: Options) -> Iterator[Part]:
    """FA2 and FA3 side by side, one layer."""
    scale = SCALES[options.scale]
    shape, device = SHAPES[options.shape], options.torch_device
    batches = sorted({scale.requests, max(scale.batches)})
    return details.attention(shape, device, batches, scale.context)


def _matmuls(kind: str, options: Options) -> Iterator[Part]:
    """Each linear, as torch or as batch-invariant mode runs it."""
    rows = SCALES[options.scale].matmul_rows
    return details.matmuls(SHAPES[options.shape], options.torch_device, rows, kind)


# Where matmuls may depend on the batch. A peer chooses its own.
UNPINNED = ("fast_steps", "fast_workload", "matmuls", "peer")
SECTIONS: dict[str, Callable[[Options], Iterator[Part]]] = {
    "smoke": smoke,
    "kernels": partial(_kernels, compiled.PREBUILT_CASES),
    "jit_build": jit_build,
    "jit_keep": jit_keep,
    "compiled_kernels": partial(_kernels, compiled.COMPILED_CASES),
    "equality": equality,
    "workload": workload,
    "fast_workload": partial(workload, batch_invariant=False),
    "steps": steps,
    "fast_steps": fast_steps,
    "peer": peer,
    "profiles": partial(_explained, details.profiles),
    "sampling": partial(_explained, details.sampling),
    "attention": attention,
    "matmuls": partial(_matmuls, "as they come"),
    "pinned_matmuls": partial(_matmuls, "pinned"),
}


@lru_cache(1)
def _random_model(shape: str, device: torch.device, longest: int) -> DecoderModel:
    return random_model(SHAPES[shape], device, longest)


def _model(options: Options, scale: Scale) -> DecoderModel:
    """The model that the parts of a section share."""
    return _random_model(options.shape, options.torch_device, scale.max_model_len)


def _vocab(options: Options) -> int:
    return SHAPES[options.shape].hf_config["vocab_size"]


def _setup(scale: Scale, **changes: Any) -> Setup:
    longest, step = scale.max_model_len, scale.step_tokens
    setup = Setup(max_seqs=scale.requests, max_tokens=step, max_model_len=longest)
    return dataclasses.replace(setup, **changes)


def _fast(device: torch.device) -> str:
    return "flashinfer" if device.type == "cuda" else "reference"


def _modes(device: torch.device) -> tuple[tuple[str, bool], ...]:
    """The invariant mode, and the fast one for contrast."""
    if device.type != "cuda":
        return (("reference", False),)
    return (("flashinfer", True), ("flashinfer", False))


def _mode_name(attention: str, invariant: bool) -> str:
    return f"{attention}{' invariant' if invariant else ''}"


def _step_kinds(device: torch.device) -> tuple[bool, ...]:
    """Graphs, then eager steps; a CPU has those alone."""
    return (False, True) if device.type == "cuda" else (True,)


def _decode_row(options: Options, batch: int, ms: float, contender: str) -> Row:
    row = _step_row(options, f"decode of {batch}, {contender}", ms, str(batch))
    return row | {"setting": f"{options.shape}: decode of {batch} (ms)", "contender": contender}


def _step_row(options: Options, what: str, ms: float, floor: str = "") -> Row:
    shape = SHAPES[options.shape]
    row: Row = {"section": "steps", "what": f"{shape.name}, {what}", "value": ms, "unit": "ms"}
    if floor in shape.floors_ms:
        row |= {"floor": shape.floors_ms[floor], "ratio": ms / shape.floors_ms[floor]}
    return row


def _attention_error(spec: AttentionSpec, device: torch.device) -> float:
    """Largest difference over a step of decodes and chunks, in a pool in no order.

    What lies within `RELATIVE_ERROR` of the reference does not count.
    """
    lengths = [(700, 1), (33, 1), (16, 1), (0, 130), (250, 77), (15, 1)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch, num_blocks = mixed_batch(lengths, 3, device, spec.sliding_window)
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    pool = noise(*kv_shape_nhd(num_blocks, 16, spec.num_kv_heads, spec.head_dim))
    total = len(batch.slot_mapping)
    q = noise(total, spec.num_heads, spec.head_dim)
    k, v = noise(2, total, spec.num_kv_heads, spec.head_dim)
    outputs = []
    options = AttentionOptions(device=device, dtype=dtype, batch_invariant=False)
    name = "flashinfer" if device.type == "cuda" else "torch"
    (ours,) = make_attention(name, [AttentionGroup(spec, KVGroup((0,)))], options).backends
    for attention in (ours, reference_attention(spec, device)):
        copy = pool.clone()
        attention.bind([copy])
        attention.plan(batch)
        outputs.append((attention.run(0, q, k, v).float(), copy.float()))
    (ours, our_pool), (plain, plain_pool) = outputs
    if not torch.equal(our_pool, plain_pool):
        return float("inf")
    return float(((ours - plain).abs() - RELATIVE_ERROR * plain.abs()).clamp(min=0).max())


def run_sections(names: str, options: Options, record: Path, progress: Progress) -> None:
    """Runs sections and writes their rows as they come.

    A part that fails gives a row after those that it measured. Where it loses the device, the
    process ends with `LOST`, and `progress` tells where another one goes on.
    """
    for name in names.split("+"):
        _run_section(name, options, record, progress)
    progress.end()


def _run_section(name: str, options: Options, record: Path, progress: Progress) -> None:
    try:
        for what, rows in SECTIONS[name](options):
            if progress.is_left():
                progress.begin()
                _run_part(name, what, rows, options, record)
    except Exception as failure:  # noqa: BLE001 - what its parts have in common
        append_row(record, _failure_row(name, "", failure, options))


def _run_part(
    name: str, what: str, rows: Callable[[], Iterator[Row]], options: Options, record: Path
) -> None:
    try:
        for row in rows():
            append_row(record, row)
    except Exception as failure:  # noqa: BLE001 - whatever a kernel or another engine raises
        append_row(record, _failure_row(name, what, failure, options))
        if device_is_lost():
            print("The device is lost. What is left wants another process.", flush=True)
            os._exit(LOST)  # what is torn down would wait for the device
    gc.collect()


def _failure_row(name: str, part: str, failure: Exception, options: Options) -> Row:
    traceback.print_exception(failure)
    what = " ".join(word for word in (name, options.shape, options.peer) if word)
    reason = f"failed: {str(failure).strip() or repr(failure)}".splitlines()[0]
    row: Row = {"section": name, "what": f"{what}, {part}" if part else what, "unit": reason}
    return row if options.peer else row | {"ok": False}


def main() -> None:
    """One process of a run."""
    names, options_json, record = sys.argv[1:]
    options = Options(**json.loads(options_json))
    if options.device == "cpu":
        # Tiny models gain nothing from more, and lose much to waiting.
        os.environ["OMP_NUM_THREADS"] = "1"
    if names not in UNPINNED and options.device == "cuda":
        pin_matmul()
    progress = Progress(Path(options.progress), options.begun)
    run_sections(names, options, Path(record), progress)


if __name__ == "__main__":
    main()
