"""A policy that generates and trains with the same log probabilities, bit for bit.

    policy = Policy(llm, model)  # model: a torch module, as AutoModelForCausalLM gives it
    rollouts = policy.generate(prompts, SamplingParams(n=8, max_tokens=32))
    (old, *_) = [torch.tensor(rollout.logprobs) for rollout in rollouts]
    (new, *_) = policy.logprobs(rollouts)  # equal to old, with the gradient of the model

The value of a log probability comes from the engine's kernels, whose rows do not depend on the
batch, the chunk or the cache; its gradient comes from the module. So an importance ratio is exactly
1 until the weights change.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from prefixcache.exceptions import PrefixCacheError
from prefixcache.llm import LLM, GenerationResult, Logprob, Prompt
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.weight_spans import WeightSpan

# Above the differences between two float32 computations, far below those between two policies.
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Rollout:
    """An answer, and the log probability of each of its tokens.

    `weight_version` is that of the weights that it began with, and `weight_versions` says which
    tokens came from which, where they were replaced meanwhile. `num_cached_tokens` of the prompt
    were hits. `prompt_index` is the prompt's place in the call.
    """

    prompt_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[float]
    num_cached_tokens: int
    weight_version: int
    weight_versions: list[WeightSpan] = field(default_factory=list[WeightSpan])


class Policy:
    """A torch module, and an engine that serves its weights.

    The module's parameters have the names of the checkpoint that `llm` loaded. Called with ids
    [S, T] of up to `batch_size` sequences it returns logits [S, T, V], or an object with `logits`.
    Before each call that computes, the engine gets the parameters if an optimizer has changed them;
    `push` does so at other times.
    """

    def __init__(self, llm: LLM, model: torch.nn.Module, *, batch_size: int = 16) -> None:
        self._llm = llm
        self._model = model
        self._batch_size = batch_size
        self._pushed: tuple[tuple[int, int, int], ...] | None = None

    def push(self) -> int:
        """Gives the module's parameters to the engine; returns their version.

        Raises `InvalidRequestError` where names or shapes are not those of the engine's model; the
        engine then keeps its weights.
        """
        tensors = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        version = self._llm.control.load_state_dict(tensors)
        self._pushed = self._changes()
        return version

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Rollout]:
        """All answers, `params.n` a prompt, in the order of the prompts.

        The answers to a prompt share its KV. Log probabilities are those at temperature 1, before
        anything that `params` changes. Raises what `LLM.generate` does.
        """
        self._push_changes()
        version = self._llm.control.weight_version
        asked = _with_logprobs(params)
        results = self._llm.generate(list(prompts), asked, use_tqdm=False)
        return [
            Rollout(
                prompt_index=index,
                prompt_token_ids=result.prompt_token_ids,
                token_ids=choice.token_ids,
                text=choice.text,
                logprobs=_taken(choice.token_ids, choice.logprobs),
                num_cached_tokens=result.num_cached_tokens,
                weight_version=version,
                weight_versions=choice.weight_versions,
            )
            for index, result in enumerate(results)
            for choice in result.outputs
        ]

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log probabilities of each answer's tokens under the weights of now, float64 [A].

        Their values are what the engine would generate with, their gradients the module's. Raises
        `PrefixCacheError` where the two differ by more than rounding.
        """
        self._push_changes()
        scored = self._llm.generate(
            [[*rollout.prompt_token_ids, *rollout.token_ids] for rollout in rollouts],
            [_scoring(len(rollout.prompt_token_ids)) for rollout in rollouts],
            use_tqdm=False,
        )
        values = [_answers(*pair) for pair in zip(rollouts, scored, strict=True)]
        return [
            _with_values(own_A, of_one)
            for own_A, of_one in zip(self._own_logprobs(rollouts), values, strict=True)
        ]

    def _own_logprobs(self, rollouts: Sequence[Rollout]) -> Iterator[Tensor]:
        """The module's own log probabilities of the answers' tokens, float64 [A] each."""
        for begin in range(0, len(rollouts), self._batch_size):
            batch = rollouts[begin : begin + self._batch_size]
            tokens = [
                torch.tensor([*rollout.prompt_token_ids, *rollout.token_ids]) for rollout in batch
            ]
            # Padding on the right changes nothing before it: attention is causal.
            ids_ST = pad_sequence(tokens, batch_first=True).to(self._device)
            output = self._model(ids_ST)
            logits_STV: Tensor = getattr(output, "logits", output)
            for row, rollout in enumerate(batch):
                first, count = len(rollout.prompt_token_ids), len(rollout.token_ids)
                logits_AV = logits_STV[row, first - 1 : first - 1 + count]
                taken_A = ids_ST[row, first : first + count]
                scores_AV = logits_AV.float().log_softmax(-1)
                yield scores_AV.gather(-1, taken_A[:, None])[:, 0].double()

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _push_changes(self) -> None:
        if self._pushed != self._changes():
            self.push()

    def _changes(self) -> tuple[tuple[int, int, int], ...]:
        """Where each parameter is, and how often it was written there and stepped."""
        return tuple(
            (parameter.data_ptr(), parameter._version, _STEPS.get(parameter, 0))  # noqa: SLF001
            for parameter in self._model.parameters()
        )


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _STEPS[parameter] = _STEPS.get(parameter, 0) + 1


# Fused optimizers write to parameters without a new version of the tensor.
_STEPS: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
register_optimizer_step_post_hook(_count_step)


def _with_values(own_A: Tensor, values: Sequence[float]) -> Tensor:
    exact_A = torch.tensor(values, dtype=torch.float64, device=own_A.device)
    difference = float((own_A.detach() - exact_A).abs().max()) if len(values) else 0.0
    if not difference <= _TOLERANCE:  # nor NaN
        raise PrefixCacheError(
            f"Log probabilities of the module differ from the engine's by {difference:.3g}. "
            "Both must be one model: of one type, without dropout (model.eval()), and not "
            "quantized in the engine."
        )
    return _ExactValue.apply(own_A, exact_A)  # type: ignore[no-untyped-call]


class _ExactValue(torch.autograd.Function):
    """One tensor's values with the gradient of another that stands for the same numbers."""

    @staticmethod
    def forward(_ctx: Any, _own: Tensor, exact: Tensor) -> Tensor:  # type: ignore[override]
        return exact.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _with_logprobs(params: SamplingParams) -> SamplingParams:
    return replace(params, logprobs=params.logprobs or 0)


def _scoring(start: int) -> SamplingParams:
    return SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=start)


def _answers(rollout: Rollout, result: GenerationResult) -> list[float]:
    assert result.prompt_logprobs is not None
    return _taken(rollout.token_ids, result.prompt_logprobs[len(rollout.prompt_token_ids) :])


def _taken(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob] | None] | None
) -> list[float]:
    """Of the tokens that were taken, out of all that are known at their places."""
    pairs = zip(token_ids, logprobs or (), strict=True)
    return [by_id[token].logprob for token, by_id in pairs if by_id is not None]
