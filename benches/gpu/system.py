"""An engine around a model of random weights, made on the device: no download, no tokenizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from shapes import Shape

from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.engine.engine import Engine
from prefixcache.engine.request_rules import RequestRules
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_settings import CacheSettings
from prefixcache.kv.specs import kv_layout
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.torch.attention.base import AttentionBackend, AttentionBatch, AttentionSpec
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention
from prefixcache.runner.torch.attention.grouped import GroupedAttention
from prefixcache.runner.torch.attention.registry import AttentionOptions, make_attention
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.device import device_memory, make_graphs, profile_blocks
from prefixcache.runner.torch.kv_tensors import KVTensors, attention_groups
from prefixcache.runner.torch.model_memory import TorchModelMemory
from prefixcache.runner.torch.model_runner import ModelRunner
from prefixcache.runner.torch.ops.sets import Ops
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from reference import flashinfer_reference

BLOCK_SIZE = 16
CPU_BLOCKS = 512


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a system is made. `attention` names a backend; "reference" is FlashInfer's stand-in."""

    attention: str = "flashinfer"
    batch_invariant: bool = True
    prefix_caching: bool = True
    eager: bool = False
    max_seqs: int = 64
    max_tokens: int = 8192
    max_model_len: int = 2048


@dataclass
class Answer:
    """What came of one request: token ids, and their log probabilities where asked for."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class NoText:
    """A detokenizer for models without a vocabulary."""

    stopped_by: str | None = None

    def push(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> str:
        """No text."""
        del token_ids, ended_by_token
        return ""

    def finish(self) -> str:
        """No text."""
        return ""


def random_model(shape: Shape, device: torch.device, max_positions: int) -> DecoderModel:
    """The shape's decoder; the same weights on every call. Linears keep activations in range."""
    config = ModelConfig.from_hf(shape.hf_config)
    model = _empty_model(config, device, max_positions)
    generator = torch.Generator(device).manual_seed(0)
    for name, slot in model.slots.items():
        values = torch.randn(slot.shape, generator=generator, device=device)
        if name.endswith("norm.weight"):
            slot.write(1 - config.norm_offset + values * 0.02)
        else:
            slot.write(values * (0.02 if len(slot.shape) == 1 else slot.shape[-1] ** -0.5))
    return model


class System:
    """Scheduler, cache, runner and engine around a model."""

    def __init__(self, model: DecoderModel, setup: Setup) -> None:
        config = _engine_config(setup)
        self.setup = setup
        self.attention = _attention(model, setup)
        num_blocks = _num_blocks(config, model, self.attention, setup)
        weights = ReplaceableModel(
            model, partial(_empty_model, model.config, model.device, setup.max_model_len), None
        )
        layout = kv_layout(model.config)
        cache = CacheManager(
            CacheSettings(
                num_blocks=num_blocks, block_size=BLOCK_SIZE, groups=layout.kinds, model="m"
            )
        )
        scheduler = Scheduler(
            config.scheduler,
            cache,
            max_model_len=setup.max_model_len,
            enable_prefix_caching=setup.prefix_caching,
        )
        runner = ModelRunner(
            weights,
            self.attention,
            max_tokens=setup.max_tokens,
            max_seqs=setup.max_seqs,
            max_pages=layout.most_pages(setup.max_model_len, setup.max_tokens, BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            device=model.device,
        )
        memory = TorchModelMemory(
            weights,
            _kv_tensors(model, self.attention, num_blocks),
            runner,
            lambda: make_graphs(config, weights.loaded, self.attention, setup.max_model_len),
        )
        memory.make_kv()
        memory.settle()
        self.engine = Engine(
            scheduler=scheduler,
            cache=cache,
            runner=runner,
            rules=RequestRules(model.config.vocab_size),
            make_detokenizer=lambda _params: NoText(),
            memory=memory,
        )
        self._scheduler = scheduler
        self._served = 0

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens found in the cache so far."""
        return self._scheduler.admission.counter.hit_tokens

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, logprobs: bool = False
    ) -> list[Answer]:
        """Greedy answers to prompts that arrive together."""
        names = self._add(prompts, max_tokens, logprobs=logprobs)
        answers = {name: Answer() for name in names}
        while self.engine.has_unfinished():
            for output in self.engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                answers[output.request_id].token_ids += output.token_ids
                answers[output.request_id].logprobs += [p.logprob for p in output.logprobs]
        return [answers[name] for name in names]

    def seconds(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Wall time until all answers are there."""
        begun = time.perf_counter()
        self.answer(prompts, max_tokens)
        return time.perf_counter() - begun

    def stepper(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Callable[[], object]:
        """Adds prompts; each call is one step of the engine."""
        self._add(prompts, max_tokens)
        return self.engine.step

    def finish(self) -> None:
        """Steps until every request is answered."""
        while self.engine.has_unfinished():
            self.engine.step()

    def decode_ms(
        self, prompts: Sequence[Sequence[int]], num_steps: int, *, temperature: float = 0.0
    ) -> float:
        """Median wall time of a step in which every prompt is answered by one more token."""
        # The first prompts are answered by a token in each step that computes the last ones.
        prefills = -(-sum(map(len, prompts)) // self.setup.max_tokens)
        self._add(prompts, num_steps + prefills + 2, temperature=temperature)
        times: list[float] = []
        while self.engine.has_unfinished():
            begun = time.perf_counter()
            outputs = self.engine.step()
            if len(outputs) == len(prompts) and not any(o.finished for o in outputs):
                times.append(time.perf_counter() - begun)
        return 1000 * statistics.median(times[-num_steps:])

    def _add(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        logprobs: bool = False,
        temperature: float = 0.0,
    ) -> list[str]:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            ignore_eos=True,
            logprobs=0 if logprobs else None,
        )
        names = [f"{self._served + i}" for i in range(len(prompts))]
        self._served += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(
                Request(request_id=name, prompt_token_ids=list(prompt), params=params)
            )
        return names


def random_prompts(
    count: int, shared: int, own: int, vocab_size: int, seed: int = 0
) -> list[list[int]]:
    """`shared` tokens that all begin with, then `own` of each."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(3, vocab_size, (shared,), generator=generator).tolist()
    suffixes = torch.randint(3, vocab_size, (count, own), generator=generator).tolist()
    return [common + suffix for suffix in suffixes]


def reference_attention(spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    """FlashInfer's semantics in torch, behind the same backend class."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return FlashInferAttention(
        spec,
        dtype=dtype,
        device=device,
        kernels=flashinfer_reference,
        hopper=False,
        workspace_bytes=16,
    )


def mixed_batch(
    lengths: list[tuple[int, int]],
    num_decodes: int,
    device: torch.device,
    window: int | None = None,
) -> tuple[AttentionBatch, int]:
    """A step of (tokens before it, tokens in it) each, in pages in no order, and a pool's size.

    Pages behind the window are left out.
    """
    pages = [-(-(start + count) // 16) for start, count in lengths]
    behind = [0 if window is None else max(0, start - window + 1) // 16 for start, _ in lengths]
    table = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)) + 1
    parts = table.split(pages)
    slots = [
        int(part[p // 16]) * 16 + p % 16
        for (start, count), part in zip(lengths, parts, strict=True)
        for p in range(start, start + count)
    ]
    listed = [part[first:] for part, first in zip(parts, behind, strict=True)]
    batch = AttentionBatch(
        qo_indptr=_indptr([count for _, count in lengths]),
        kv_indptr=_indptr([len(part) for part in listed]),
        kv_indices=torch.cat(listed).to(torch.int32),
        last_page_len=torch.tensor(
            [s + c - (n - 1) * 16 for (s, c), n in zip(lengths, pages, strict=True)],
            dtype=torch.int32,
        ),
        slot_mapping=torch.tensor(slots, device=device),
        num_decodes=num_decodes,
        first_pages=torch.tensor(behind, dtype=torch.int32),
    )
    return batch, sum(pages) + 1


def _indptr(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def _empty_model(config: ModelConfig, device: torch.device, max_positions: int) -> DecoderModel:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return DecoderModel(config, Ops(dtype, device), max_positions)


def _kv_tensors(model: DecoderModel, attention: GroupedAttention, num_blocks: int) -> KVTensors:
    return KVTensors(
        layout=kv_layout(model.config),
        attention=attention,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        itemsize=model.dtype.itemsize,
        free_memory=lambda: device_memory(model.device).free,
        dtype=model.dtype,
        device=model.device,
    )


def _attention(model: DecoderModel, setup: Setup) -> GroupedAttention:
    groups = attention_groups(kv_layout(model.config), model.attention_spec)
    if setup.attention == "reference":
        backends = [reference_attention(group.spec, model.device) for group in groups]
        return GroupedAttention(groups, backends)
    options = AttentionOptions(
        device=model.device, dtype=model.dtype, batch_invariant=setup.batch_invariant
    )
    return make_attention(setup.attention, groups, options)


def _engine_config(setup: Setup) -> EngineConfig:
    return EngineConfig(
        enforce_eager=setup.eager or setup.attention == "reference",
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(
            max_num_seqs=setup.max_seqs, max_num_batched_tokens=setup.max_tokens
        ),
    )


def _num_blocks(
    config: EngineConfig, model: DecoderModel, attention: GroupedAttention, setup: Setup
) -> int:
    """On a GPU what the runs can need at most, if that fits."""
    if model.device.type != "cuda":
        return CPU_BLOCKS
    wanted = 2 * setup.max_seqs * -(-setup.max_model_len // BLOCK_SIZE) + 1
    return min(wanted, profile_blocks(config, model, attention, setup.max_model_len))
