"""A policy's log probabilities: the engine's bits, and the gradient of the torch module."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefixcache import LLM, SamplingParams
from prefixcache.exceptions import InvalidRequestError, PrefixCacheError
from prefixcache.training import Policy, Rollout

PROMPTS = [[5, 6, 7, 8] * 9, [9, 10, 11] * 7]
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path]) -> PreTrainedModel:
    folder = tiny_checkpoint("qwen3")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def policy(tiny_checkpoint: Callable[..., Path], model: PreTrainedModel) -> Policy:
    llm = LLM(str(tiny_checkpoint("qwen3")), dtype="float32", num_blocks=64)
    return Policy(llm, model, batch_size=3)


def rollouts_of(policy: Policy) -> list[Rollout]:
    drawn = SamplingParams(n=2, seed=1, max_tokens=7, temperature=0.7, ignore_eos=True)
    return policy.generate(PROMPTS, drawn)


def change(model: PreTrainedModel, rate: float, **options: bool) -> None:
    """One step of an optimizer."""
    loss = model(torch.tensor([[5, 6, 7, 8]])).logits.square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=rate, **options).step()
    model.zero_grad()


def test_log_probabilities_have_the_bits_of_the_rollout(policy: Policy) -> None:
    rollouts = rollouts_of(policy)
    assert [one.prompt_index for one in rollouts] == [0, 0, 1, 1]
    assert [len(one.token_ids) for one in rollouts] == [7] * 4
    assert [one.tolist() for one in policy.logprobs(rollouts)] == [one.logprobs for one in rollouts]


def test_gradients_are_the_modules(policy: Policy, model: PreTrainedModel) -> None:
    rollouts = rollouts_of(policy)
    torch.cat(policy.logprobs(rollouts)).sum().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    for one in rollouts:
        ids = torch.tensor([[*one.prompt_token_ids, *one.token_ids]])
        scores = model(ids).logits[0, :-1].log_softmax(-1)
        scores.gather(-1, ids[0, 1:, None])[-len(one.token_ids) :].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizers_changes_reach_the_engine(
    policy: Policy, model: PreTrainedModel, fused: bool
) -> None:
    before = rollouts_of(policy)
    change(model, 0.05, fused=fused)
    after = [one.tolist() for one in policy.logprobs(before)]
    assert after != [one.logprobs for one in before]
    again = rollouts_of(policy)
    assert again[0].weight_version > before[0].weight_version
    assert [one.tolist() for one in policy.logprobs(again)] == [one.logprobs for one in again]


def test_parameters_in_other_memory_reach_the_engine(
    policy: Policy, model: PreTrainedModel
) -> None:
    before = rollouts_of(policy)
    norm = model.model.norm.weight
    norm.data = norm.data * 2  # counts as no write
    assert [one.tolist() for one in policy.logprobs(before)] != [one.logprobs for one in before]


def test_an_engine_with_other_weights_is_found(
    policy: Policy, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = rollouts_of(policy)
    change(model, 5.0)
    monkeypatch.setattr(policy, "_push_changes", lambda: None)
    with pytest.raises(PrefixCacheError, match=r"differ from the engine's by"):
        policy.logprobs(rollouts)


def test_a_module_of_another_shape_is_refused(policy: Policy, model: PreTrainedModel) -> None:
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(InvalidRequestError, match=r"model\.norm\.weight"):
        policy.push()


@pytest.mark.slow
def test_the_example_has_no_mismatch_and_learns() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "grpo.py"), "--steps", "12", "--prompts", "6"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = re.findall(r"reward ([\d.]+)  kl=(\S+)  cached ([\d.]+)", done.stdout)
    assert [kl for _, kl, _ in lines] == ["0.0"] * 12
    rewards = [float(reward) for reward, _, _ in lines]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    # All but the first prompt of a step and each prompt's last tokens.
    assert all(float(cached) > 0.7 for _, _, cached in lines)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed for development")
def test_trls_trainer_gets_rollouts_without_mismatch() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "trl_rollout.py"), "--steps", "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = re.findall(r"kl=(\S+)  cached ([\d.]+)", done.stdout)
    assert [kl for kl, _ in lines] == ["0.0"] * 2
    assert all(float(cached) > 0.5 for _, cached in lines)
