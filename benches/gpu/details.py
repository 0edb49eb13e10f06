"""What explains a step's time: its kernels, matmuls, attention, sampling, and its host work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from record import Part, Row
from shapes import Shape
from system import Setup, System, mixed_batch, random_prompts
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from prefixcache.runner.torch.attention.base import AttentionSpec, kv_shape_nhd
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention, load_kernels
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.ops.linear import TorchLinear
from reference import flashinfer_reference

_SHOWN_KERNELS = 14
_STEPS = 4
_REPEATS = 20
# About 10 ms: longer than the host takes to launch the repeats.
_SLEEP_CYCLES = 20_000_000


def profiles(shape: Shape, model: DecoderModel, setup: Setup, context: int) -> Iterator[Row]:
    """The kernels of a prefill and of a decode step that take longest, and the whole tables."""
    device = model.device
    system = System(model, setup)
    vocab = model.config.vocab_size
    prefills = -(-setup.max_seqs * context // setup.max_tokens)
    for what, batch, skipped, steps in (
        (f"prefill of {context}", 1, 0, 1),
        (f"decode of {setup.max_seqs}", setup.max_seqs, prefills + 4, _STEPS),
    ):
        # The first of two, to warm up.
        for seed in (7, 8):
            prompts = random_prompts(batch, 0, context, vocab, seed=seed)
            step = system.stepper(prompts, max_tokens=skipped + steps + 4)
            for _ in range(skipped):
                step()
            averages = _profiled(step, steps, device)
            system.finish()
        print(averages.table(row_limit=40), flush=True)
        longest = _longest(averages, device)
        total = ("all kernels", sum(us for _, us, _ in longest), sum(n for _, _, n in longest))
        for name, us, calls in [total, *longest[:_SHOWN_KERNELS]]:
            yield {
                "section": "profiles",
                "what": f"{shape.name}, {what}: {name[:70]}",
                "value": us / steps,
                "unit": f"us a step, {calls / steps:g} launches",
            }


def _profiled(step: Callable[[], Any], steps: int, device: torch.device) -> Any:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        _wait(device)
    return profiler.key_averages()


def _longest(averages: Any, device: torch.device) -> list[tuple[str, float, int]]:
    if device.type == "cuda":
        found = [
            (event.key, event.self_device_time_total, event.count)
            for event in averages
            if event.device_type == DeviceType.CUDA
        ]
    else:
        found = [(event.key, event.self_cpu_time_total, event.count) for event in averages]
    return sorted(found, key=lambda kernel: -kernel[1])


def matmuls(shape: Shape, device: torch.device, most_rows: int, kind: str) -> Iterator[Part]:
    """Microseconds of each linear, and whether a row's bits depend on the number of rows."""
    for name, (width, out) in _linears(shape).items():
        what = f"{shape.name} {name} {width}x{out}, {kind}"
        yield name, partial(_matmul_rows, what, (width, out), device, most_rows)


def _matmul_rows(
    what: str, sizes: tuple[int, int], device: torch.device, most_rows: int
) -> Iterator[Row]:
    width, out = sizes
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(out, width, generator=generator, device=device).to(dtype)
    x = torch.randn(most_rows, width, generator=generator, device=device).to(dtype)
    linear = TorchLinear(weight)
    rows = 1
    while rows <= most_rows:
        us = _microseconds(lambda m=rows: linear(x[:m]), device)
        yield {"section": "matmuls", "what": f"{what}, {rows} rows", "value": us, "unit": "us"}
        rows *= 2
    whole = linear(x)
    differing = [
        count for count in range(1, most_rows) if not torch.equal(linear(x[:count]), whole[:count])
    ]
    some = f", as {differing[0]} and {differing[-1]}" if differing else ""
    unit = f"row counts below {most_rows} give other bits{some}"
    yield {"section": "matmuls", "what": what, "value": len(differing), "unit": unit}


def _linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """Width in and out of a layer's linears, fused as ours are."""
    config = shape.hf_config
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config["num_key_value_heads"]
    return {
        "qkv": (hidden, (heads + 2 * kv_heads) * head_dim),
        "o": (heads * head_dim, hidden),
        "gate_up": (hidden, 2 * config["intermediate_size"]),
        "down": (config["intermediate_size"], hidden),
        "lm_head": (hidden, config["vocab_size"]),
    }


_CHUNKS: dict[str, dict[str, Any]] = {"FA2": {"hopper": False}, "FA3": {}}
_DECODES: dict[str, dict[str, Any]] = {
    "FA2": {},
    "FA3, packed heads": {"batch_invariant": True},
}


def attention(
    shape: Shape, device: torch.device, batches: Sequence[int], context: int
) -> Iterator[Part]:
    """One layer by each kernel: a chunk of `context` tokens, and decodes of some batch sizes.

    Decodes are planned as for a graph.
    """
    config = shape.hf_config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    own = (heads, kv_heads, head_dim)
    chunk = f"{shape.name}, chunk of {context}"
    yield from _layer_parts(chunk, own, device, [(0, context)], _CHUNKS)
    for batch in batches:
        name = f"{shape.name}, decode of {batch} at context {context}"
        yield from _layer_parts(name, own, device, [(context, 1)] * batch, _DECODES)


def _layer_parts(
    what: str,
    heads: tuple[int, int, int],
    device: torch.device,
    lengths: list[tuple[int, int]],
    kinds: dict[str, dict[str, Any]],
) -> Iterator[Part]:
    """The same layer by each kind of kernel."""
    layer = cache(lambda: _Layer(heads, device, lengths))

    def rows(name: str, options: dict[str, Any]) -> Iterator[Row]:
        us = _microseconds(layer().runs(options), device)
        yield {"section": "attention", "what": name, "value": us, "unit": "us a layer"}

    for kind, options in kinds.items():
        name = f"{what}, {kind}"
        yield name, partial(rows, name, options)


class _Layer:
    """Random queries, keys and values of one step, and a pool."""

    def __init__(
        self, heads: tuple[int, int, int], device: torch.device, lengths: list[tuple[int, int]]
    ) -> None:
        """`heads` are those of queries and of keys, and their size."""
        num_heads, kv_heads, head_dim = heads
        self.device = device
        self._spec = AttentionSpec(
            num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5
        )
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        decodes = sum(count == 1 for _, count in lengths)
        self._step, num_blocks = mixed_batch(lengths, num_decodes=decodes, device=device)
        total = len(self._step.slot_mapping)
        noise = torch.randn(total, num_heads + 2 * kv_heads, head_dim, device=device).to(
            self._dtype
        )
        parts = noise.split([num_heads, kv_heads, kv_heads], dim=1)
        self._qkv = tuple(part.contiguous() for part in parts)
        pool = torch.randn(kv_shape_nhd(num_blocks, 16, kv_heads, head_dim), device=device)
        self._pool = pool.to(self._dtype)

    def runs(self, options: dict[str, Any]) -> Callable[[], torch.Tensor]:
        """The layer, planned; each call computes it."""
        on_cuda = self.device.type == "cuda"
        backend = FlashInferAttention(
            self._spec,
            dtype=self._dtype,
            device=self.device,
            kernels=load_kernels(self.device) if on_cuda else flashinfer_reference,
            workspace_bytes=None if on_cuda else 1 << 24,
            **options,
        )
        backend.bind([self._pool])
        if self._step.num_decodes:
            size = self._step.num_decodes
            backend.reserve_graphs([size], len(self._step.kv_indices))
            backend.plan_graph(self._step, size)
        else:
            backend.plan(self._step)
        return lambda: backend.run(0, *self._qkv)


def sampling(shape: Shape, model: DecoderModel, setup: Setup, context: int) -> Iterator[Row]:
    """A decode step with a temperature against a greedy one, and the host's time to plan."""
    system = System(model, setup)
    prompts = random_prompts(setup.max_seqs, 0, context, model.config.vocab_size, seed=9)
    times = {
        temperature: system.decode_ms(prompts, 16, temperature=temperature)
        for temperature in (0.0, 1.0)
    }
    what = f"{shape.name}, decode of {setup.max_seqs}"
    for temperature, ms in times.items():
        name = f"{what}, temperature {temperature:g}"
        yield {"section": "sampling", "what": name, "value": ms, "unit": "ms"}
    ratio = times[1.0] / times[0.0]
    yield {"section": "sampling", "what": f"{what}, sampled / greedy", "value": ratio, "unit": ""}
    plans = _timed_plans(system.attention)
    system.decode_ms(prompts, 16)
    us = 1e6 * sorted(plans)[len(plans) // 2]
    yield {"section": "sampling", "what": f"{what}, plan", "value": us, "unit": "us of the host"}


def _timed_plans(backend: Any) -> list[float]:
    """Seconds of each plan of the backend from now on."""
    seconds: list[float] = []

    def timed(plan: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return plan(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begun)

        return call

    backend.plan, backend.plan_graph = timed(backend.plan), timed(backend.plan_graph)
    return seconds


def _microseconds(work: Callable[[], Any], device: torch.device) -> float:
    """Mean of some calls in a row, warm; on a GPU of the device alone."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(_REPEATS):
            work()
        return 1e6 * (time.perf_counter() - begun) / _REPEATS
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - so that the host has launched all calls
    begin.record()
    for _ in range(_REPEATS):
        work()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / _REPEATS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
