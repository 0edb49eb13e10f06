"""The parts of a run. Each is a process of its own, since matmuls are pinned before CUDA starts.

`python sections.py NAME[+NAME...] OPTIONS RECORD`, OPTIONS in JSON; a section gives rows, which are
added to the record as they come.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import details
import peers
import torch
from record import Row, append_row
from shapes import SHAPES, Shape
from system import Setup, System, mixed_batch, random_model, random_prompts, reference_attention

from prefixcache.attention.base import AttentionGroup, AttentionSpec, kv_shape_nhd
from prefixcache.attention.registry import AttentionOptions, make_attention
from prefixcache.config.model_config import RopeConfig
from prefixcache.ops import activation, norm, rope
from prefixcache.ops.cuda import pin_matmul
from prefixcache.ops.linear import TorchLinear


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
        return (
            max(self.shared + self.own + max(self.outputs), self.context + self.decode_steps) + 16
        )


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
    """What a section is told."""

    device: str
    scale: str
    shape: str = ""
    peer: str = ""

    @property
    def torch_device(self) -> torch.device:
        """The device, with its index where it has one."""
        if self.device == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device)


PREBUILT_CASES: tuple[dict[str, Any], ...] = (
    {"num_heads": 28, "num_kv_heads": 4, "head_dim": 128},
    {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
)
# FlashInfer compiles these, for minutes.
COMPILED_CASES: tuple[dict[str, Any], ...] = (
    {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64},
    {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "sliding_window": 37},
    {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "softcap": 30.0},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "sliding_window": 512},
)
# Rows, weight and residual.
_LINEAR_SHAPES = ((70, 3584), (4608, 3584), (70, 4608))
RELATIVE_ERROR = 0.02
ABSOLUTE_ERROR = {"cuda": 0.02, "cpu": 1e-4}


def smoke(options: Options) -> Iterator[Row]:
    """Each fused op once, then each mode: a few steps, eagerly and from graphs."""
    device = options.torch_device
    for name, check in _fused_ops(device):
        yield _tried(name, check)
    scale = SCALES["dry"]
    model = random_model(SHAPES[options.shape], device, scale.max_model_len)
    prompts = random_prompts(4, 0, scale.context, model.config.vocab_size, seed=6)
    for attention, invariant in _modes(device):
        answers: list[Any] = []

        def answered(setup: Setup, answers: list[Any] = answers) -> bool:
            answers.append(System(model, setup).answer(prompts, 4, logprobs=True))
            # Graphs add rows to a batch: bits are kept only where they are promised.
            return not setup.batch_invariant or answers[0] == answers[-1]

        for eager in (True, False) if device.type == "cuda" else (True,):
            setup = _setup(scale, attention=attention, batch_invariant=invariant, eager=eager)
            mode = f"{attention}{' invariant' if invariant else ''}"
            how = "eager" if eager else "graphs"
            yield _tried(f"{mode}, {how}", partial(answered, setup))


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

    def linear(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return _fixed_tiles(x.device)(weight / 64)(x, residual.clone())

    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in _LINEAR_SHAPES]
    yield "linear in fixed tiles", partial(same, linear, *inputs)


def _tried(what: str, check: Callable[[], bool]) -> Row:
    """Seconds of a check; that it fails is its row, so that the others are still tried."""
    row: Row = {"section": "smoke", "what": what}
    begun = time.perf_counter()
    try:
        ok = check()
    except Exception as failure:  # noqa: BLE001 - whatever a kernel raises
        traceback.print_exc()
        return row | {"unit": _first_line(failure), "ok": False}
    return row | {"value": time.perf_counter() - begun, "unit": "s", "ok": ok}


def _first_line(failure: Exception) -> str:
    return f"failed: {str(failure).strip() or repr(failure)}".splitlines()[0]


def kernels(options: Options) -> Iterator[Row]:
    """FlashInfer against its torch reference, one layer, a mixed step; prebuilt kernels."""
    for case in PREBUILT_CASES:
        yield _kernel_row(case, options.torch_device)


def compiled_kernels(options: Options) -> Iterator[Row]:
    """The same with kernels that FlashInfer must compile first."""
    for case in COMPILED_CASES:
        yield _kernel_row(case, options.torch_device)


def _kernel_row(case: dict[str, Any], device: torch.device) -> Row:
    """One shape; that it fails is its row, so that the others are still tried."""
    row: Row = {
        "section": "kernels",
        "what": ", ".join(f"{key} {value}" for key, value in case.items()),
    }
    try:
        error = _attention_error(AttentionSpec(scale=case["head_dim"] ** -0.5, **case), device)
    except Exception as failure:  # noqa: BLE001 - whatever a kernel raises
        traceback.print_exc()
        return row | {"unit": _first_line(failure), "ok": False}
    return row | {
        "value": error,
        "unit": f"largest error beyond {RELATIVE_ERROR:.0%}",
        "ok": error < ABSOLUTE_ERROR[device.type],
    }


def equality(options: Options) -> Iterator[Row]:
    """Answers of the same prompts: cold and alone, hit, chunked, in a batch. Bits are compared."""
    device = options.torch_device
    scale = SCALES[options.scale]
    model = random_model(SHAPES[options.shape], device, scale.max_model_len)
    vocab = model.config.vocab_size
    prompts = random_prompts(min(scale.requests, 8), scale.shared, scale.own, vocab, seed=1)
    for attention, invariant in _modes(device):
        base = _setup(scale, attention=attention, batch_invariant=invariant)
        system = System(model, base)
        alone = []
        for prompt in prompts:
            system.engine.control.reset_prefix_cache()
            alone += system.answer([prompt], scale.outputs[1], logprobs=True)
        before = system.hit_tokens
        hit = system.answer(prompts, scale.outputs[1], logprobs=True)
        hits = system.hit_tokens - before
        kept = {
            name: getattr(system.attention, name, False)
            for name in ("batch_invariant", "decode_matches_prefill")
        }
        del system
        chunked = System(model, dataclasses.replace(base, max_tokens=scale.chunk, max_seqs=8))
        chunks = chunked.answer(prompts, scale.outputs[1], logprobs=True)
        del chunked
        for name, answers in (("hit and batch", hit), ("chunks and batch", chunks)):
            differing = sum(a != b for a, b in zip(alone, answers, strict=True))
            label = f"{options.shape}, {attention}{' invariant' if invariant else ''}, {name}"
            yield {
                "section": "equality",
                "what": label,
                "value": differing,
                "unit": f"of {len(prompts)} answers differ; {hits} hit tokens",
                # Where nothing is promised, the number alone is shown.
                **({"ok": differing == 0} if kept["batch_invariant"] else {}),
                **kept,
            }


def workload(options: Options) -> Iterator[Row]:
    """Requests that share a long beginning, with the cache off and on; outputs long and short."""
    device = options.torch_device
    scale = SCALES[options.scale]
    model = random_model(SHAPES[options.shape], device, scale.max_model_len)
    vocab = model.config.vocab_size
    for output in scale.outputs:
        rates = {}
        for cached in (False, True):
            system = System(model, _setup(scale, attention=_fast(device), prefix_caching=cached))
            system.answer(random_prompts(scale.requests, 0, scale.own, vocab, seed=2), 4)
            prompts = random_prompts(scale.requests, scale.shared, scale.own, vocab, seed=3)
            before = system.hit_tokens
            rates[cached] = scale.requests / system.seconds(prompts, output)
            yield {
                "section": "workload",
                "what": f"{options.shape}, output {output}, cache {'on' if cached else 'off'}",
                "value": rates[cached],
                "unit": f"requests/s; {system.hit_tokens - before} hit tokens",
            }
            del system
            gc.collect()
        yield {
            "section": "workload",
            "what": f"{options.shape}, output {output}, on / off",
            "value": rates[True] / rates[False],
            "unit": "times",
        }


def steps(options: Options) -> Iterator[Row]:
    """A prefill, and decode steps of several batches, against the least they can take."""
    device = options.torch_device
    scale = SCALES[options.scale]
    shape = SHAPES[options.shape]
    model = random_model(shape, device, scale.max_model_len)
    vocab = model.config.vocab_size
    for eager in (False, True) if device.type == "cuda" else (False,):
        setup = _setup(scale, attention=_fast(device), prefix_caching=False, eager=eager)
        system = System(model, dataclasses.replace(setup, max_seqs=max(scale.batches)))
        kind = "eager" if eager or device.type != "cuda" else "graphs"
        first = random_prompts(3, 0, scale.context, vocab, seed=4)
        times = [1000 * system.seconds([prompt], 1) for prompt in first]
        yield _step_row(shape, f"prefill of {scale.context}", min(times), "prefill")
        for batch in scale.batches:
            prompts = random_prompts(batch, 0, scale.context, vocab, seed=batch)
            ms = system.decode_ms(prompts, scale.decode_steps)
            yield _step_row(shape, f"decode of {batch}, {kind}", ms, str(batch))
        del system
        gc.collect()


def pdl_steps(options: Options) -> Iterator[Row]:
    """A decode step whose Triton kernels are launched before the ones before them end."""
    os.environ["PREFIXCACHE_PDL"] = "1"  # is read when the kernels are imported
    device, scale, shape = options.torch_device, SCALES[options.scale], SHAPES[options.shape]
    model = random_model(shape, device, scale.max_model_len)
    system = System(model, _setup(scale, attention=_fast(device), prefix_caching=False))
    prompts = random_prompts(scale.requests, 0, scale.context, model.config.vocab_size, seed=5)
    ms = system.decode_ms(prompts, scale.decode_steps)
    yield _step_row(shape, f"decode of {scale.requests}, early launches", ms, str(scale.requests))


def invariant_steps(options: Options) -> Iterator[Row]:
    """Decode steps by each way to keep bits, and their equality where tiles are fixed.

    What they cost is the ratio to the same step of the section before.
    """
    device, scale, shape = options.torch_device, SCALES[options.scale], SHAPES[options.shape]
    prompts = random_prompts(scale.requests, 0, scale.context, shape.hf_config["vocab_size"], 5)
    for fixed_tiles in (False, True) if device.type == "cuda" else (False,):
        model = random_model(shape, device, scale.max_model_len, fixed_tiles=fixed_tiles)
        for attention, invariant in _modes(device):
            if device.type == "cuda" and not invariant:
                continue
            system = System(
                model,
                _setup(scale, attention=attention, batch_invariant=invariant, prefix_caching=False),
            )
            ms = system.decode_ms(prompts, scale.decode_steps)
            kind = f"{attention}{', fixed tiles' if fixed_tiles else ', pinned'}"
            what = f"invariant decode of {scale.requests}, {kind}"
            yield _step_row(shape, what, ms, str(scale.requests))
            if fixed_tiles:
                differing = _differing(system, prompts[:8], scale.outputs[1])
                yield {
                    "section": "equality",
                    "what": f"{shape.name}, {kind}, in a batch",
                    "value": differing,
                    "unit": "of 8 answers differ",
                    "ok": differing == 0,
                }
            del system
            gc.collect()


def _differing(system: System, prompts: list[list[int]], num_tokens: int) -> int:
    """Answers that are others in a batch than alone, bit for bit."""
    alone = [system.answer([prompt], num_tokens, logprobs=True)[0] for prompt in prompts]
    together = system.answer(prompts, num_tokens, logprobs=True)
    return sum(a != b for a, b in zip(alone, together, strict=True))


def peer(options: Options) -> Iterator[Row]:
    """The same workload by another engine, where it is installed."""
    scale = SCALES[options.scale]
    shape = SHAPES[options.shape]
    vocab = shape.hf_config["vocab_size"]
    prompts = random_prompts(scale.requests, scale.shared, scale.own, vocab, seed=3)
    engine = peers.PEERS[options.peer].make(shape, options.torch_device, scale.max_model_len)
    for output in scale.outputs:
        seconds = engine(prompts, output)
        yield {
            "section": "peers",
            "what": f"{options.shape}, output {output}, {options.peer}",
            "value": scale.requests / seconds,
            "unit": "requests/s",
        }


def profiles(options: Options) -> Iterator[Row]:
    """The longest kernels of a prefill and of a decode step."""
    scale = SCALES[options.scale]
    setup = _setup(scale, attention=_fast(options.torch_device), prefix_caching=False)
    yield from details.profiles(SHAPES[options.shape], setup, options.torch_device, scale.context)


def sampling(options: Options) -> Iterator[Row]:
    """Sampled against greedy steps, and the host's time to plan one."""
    scale = SCALES[options.scale]
    setup = _setup(scale, attention=_fast(options.torch_device))
    yield from details.sampling(SHAPES[options.shape], setup, options.torch_device, scale.context)


def attention(options: Options) -> Iterator[Row]:
    """FA2 and FA3 side by side, one layer."""
    scale = SCALES[options.scale]
    shape, device = SHAPES[options.shape], options.torch_device
    batches = sorted({scale.requests, max(scale.batches)})
    yield from details.attention(shape, device, batches, scale.context)


def matmuls(options: Options) -> Iterator[Row]:
    """Each linear as torch runs it."""
    yield from _matmuls(options, "as they come", TorchLinear)


def pinned_matmuls(options: Options) -> Iterator[Row]:
    """Each linear as batch-invariant mode runs it."""
    yield from _matmuls(options, "pinned", TorchLinear)


def fixed_matmuls(options: Options) -> Iterator[Row]:
    """Each linear in fixed tiles."""
    yield from _matmuls(options, "fixed tiles", _fixed_tiles(options.torch_device))


def _matmuls(options: Options, kind: str, make: type[TorchLinear]) -> Iterator[Row]:
    rows = SCALES[options.scale].matmul_rows
    yield from details.matmuls(SHAPES[options.shape], options.torch_device, rows, kind, make)


def _fixed_tiles(device: torch.device) -> type[TorchLinear]:
    """The kernel, or on a CPU what it stands in for."""
    if device.type != "cuda":
        return TorchLinear
    from prefixcache.ops.triton_matmul import FixedTileLinear

    return FixedTileLinear


# Their matmuls must not depend on the batch.
PINNED = ("smoke", "equality", "invariant_steps", "pinned_matmuls")
SECTIONS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "smoke": smoke,
    "kernels": kernels,
    "compiled_kernels": compiled_kernels,
    "equality": equality,
    "workload": workload,
    "steps": steps,
    "pdl_steps": pdl_steps,
    "invariant_steps": invariant_steps,
    "peer": peer,
    "profiles": profiles,
    "sampling": sampling,
    "attention": attention,
    "matmuls": matmuls,
    "pinned_matmuls": pinned_matmuls,
    "fixed_matmuls": fixed_matmuls,
}


def _setup(scale: Scale, **changes: Any) -> Setup:
    return dataclasses.replace(
        Setup(
            max_seqs=scale.requests,
            max_tokens=scale.step_tokens,
            max_model_len=scale.max_model_len,
        ),
        **changes,
    )


def _fast(device: torch.device) -> str:
    return "flashinfer" if device.type == "cuda" else "reference"


def _modes(device: torch.device) -> tuple[tuple[str, bool], ...]:
    """The invariant modes, and the fast one for contrast."""
    if device.type != "cuda":
        return (("reference", False),)
    return (
        ("flashinfer", True),
        ("flashinfer-packed", True),
        ("flashinfer-split", True),
        ("flashinfer", False),
    )


def _step_row(shape: Shape, what: str, ms: float, floor: str) -> Row:
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
    (ours,) = make_attention(name, [AttentionGroup(spec, (0,))], options).backends
    for attention in (ours, reference_attention(spec, device)):
        copy = pool.clone()
        attention.bind([copy])
        attention.plan(batch)
        outputs.append((attention.run(0, q, k, v).float(), copy.float()))
    (ours, our_pool), (plain, plain_pool) = outputs
    if not torch.equal(our_pool, plain_pool):
        return float("inf")
    return float(((ours - plain).abs() - RELATIVE_ERROR * plain.abs()).clamp(min=0).max())


def _rows(name: str, options: Options) -> Iterator[Row]:
    """A section's rows, those before a failure included; the failure is the last one."""
    try:
        yield from SECTIONS[name](options)
    except Exception as failure:  # noqa: BLE001 - whatever a kernel or another engine raises
        traceback.print_exc()
        what = " ".join(part for part in (name, options.shape, options.peer) if part)
        row: Row = {"section": name, "what": what, "unit": _first_line(failure)}
        yield row if options.peer else row | {"ok": False}


def main() -> None:
    """Runs sections and writes their rows as they come."""
    names, options_json, record = sys.argv[1:]
    options = Options(**json.loads(options_json))
    if options.device == "cpu":
        torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much to waiting
    if names in PINNED and options.device == "cuda":
        pin_matmul()
    for name in names.split("+"):
        for row in _rows(name, options):
            append_row(Path(record), row)


if __name__ == "__main__":
    main()
