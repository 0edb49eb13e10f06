"""Tiny models served step by step through scheduler, cache and runner, for checks of backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fakes.fake_cache import make_cache
from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.kv.specs import kv_layout
from prefixcache.models.replaceable import ReplaceableModel
from prefixcache.runner.torch.attention.base import AttentionBackend, AttentionSpec
from prefixcache.runner.torch.attention.grouped import GroupedAttention
from prefixcache.runner.torch.attention.torch_attention import TorchAttention
from prefixcache.runner.torch.cuda_graph import DecodeGraphs, graph_sizes
from prefixcache.runner.torch.decoder_model import DecoderModel
from prefixcache.runner.torch.kv_tensors import attention_groups
from prefixcache.runner.torch.model_runner import ModelRunner
from prefixcache.runner.torch.piecewise_graphs import Graphs, PiecewiseGraphs
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SequenceOutput, StepPlan

CPU = torch.device("cpu")
MakeAttention = Callable[[AttentionSpec], AttentionBackend]


def grouped_attention(model: DecoderModel, make_attention: MakeAttention) -> GroupedAttention:
    """A backend for each group of the model's layers."""
    groups = attention_groups(kv_layout(model.config), model.attention_spec)
    return GroupedAttention(groups, [make_attention(group.spec) for group in groups])


class PagedServer:
    """One model behind one attention backend, with a scheduler and a cache of its own."""

    def __init__(
        self,
        model: DecoderModel,
        make_attention: MakeAttention = TorchAttention,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_seqs: int = 8,
        max_tokens: int = 32,
        max_model_len: int = 128,
        capture: Any = None,
        step_sizes: Sequence[int] = (),
    ) -> None:
        layout = kv_layout(model.config)
        self.cache = make_cache(num_blocks, block_size, groups=layout.kinds, model="m")
        config = SchedulerConfig(max_num_seqs=max_seqs, max_num_batched_tokens=max_tokens)
        self.scheduler = Scheduler(config, self.cache, max_model_len=max_model_len)
        self.attention = grouped_attention(model, make_attention)
        shape = self.attention.kv_shape(
            num_blocks, block_size, layout.num_kv_heads, layout.head_dim
        )
        layers = range(layout.num_tensors)
        self.kv = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in layers]
        self.attention.bind(self.kv)
        graphs = None
        if capture is not None:
            decodes = DecodeGraphs(
                model,
                self.attention,
                sizes=graph_sizes(max_seqs),
                max_page_indices=[
                    max_seqs * most for most in layout.most_pages(max_model_len, 1, block_size)
                ],
                device=model.device,
                capture=capture,
            )
            steps = step_sizes and PiecewiseGraphs(
                model,
                self.attention,
                sizes=step_sizes,
                device=model.device,
                capture=capture,
            )
            graphs = Graphs(decodes, steps or None)
        self.runner = ModelRunner(
            ReplaceableModel(model, lambda: model, None),
            self.attention,
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            max_pages=layout.most_pages(max_model_len, max_tokens, block_size),
            block_size=block_size,
            device=model.device,
            graphs=graphs,
        )
        self.plans: list[StepPlan] = []
        self._limits: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int = 6, **params: Any
    ) -> list[list[int]]:
        """Answers of `num_tokens` tokens each, all requests arriving together; greedy if unsaid."""
        first = len(self._limits)
        names = [f"request-{first + i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            options = SamplingParams(max_tokens=num_tokens, **{"temperature": 0.0} | params)
            self._limits[name] = num_tokens
            self.answers[name], self.logprobs[name] = [], []
            self.scheduler.add(
                Request(request_id=name, prompt_token_ids=list(prompt), params=options), seed=7
            )
        while self.scheduler.has_unfinished():
            self.step()
        return [self.answers[name] for name in names]

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.cache.fill(plan, self.runner.block_tables)
        self.take(plan, self.results(plan))

    def results(self, plan: StepPlan) -> Sequence[SequenceOutput]:
        return self.runner.results(self.runner.submit(plan)).outputs

    def take(self, plan: StepPlan, outputs: Sequence[SequenceOutput]) -> None:
        self.scheduler.complete(plan, outputs)
        for scheduled, output in zip(plan.sequences, outputs, strict=True):
            if output.token_id is not None:
                self.answers[scheduled.request_id] += output.token_ids
                for one in (output, *output.after_drafts):
                    if one.logprobs is not None:
                        self.logprobs[scheduled.request_id].append(one.logprobs.logprob)
        ended = [name for name, tokens in self.answers.items() if len(tokens) == self._limits[name]]
        self.scheduler.finish(ended)
