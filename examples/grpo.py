"""GRPO on two cores: the KL between rollouts and trainer is 0.0 in each step, with the cache on.

    python examples/grpo.py

A tiny random transformer learns to write odd digits. Each step generates
eight answers to each prompt, scores them, and takes one step of the optimizer. The answers of a
prompt share its KV; all prompts share their first tokens. `kl` is the mean difference between the
log probabilities that the engine generated with and those that the loss is made of. `cached` is the
share of prompt tokens that were hits. `--model` trains a model of your own, a folder of safetensors
in float32, on prompts of the same kind; a quantized one is converted by `prefixcache convert`.

Group relative policy optimization: Shao et al., 2024.
"""

import argparse
import random
import tempfile
import time
from argparse import RawTextHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from prefixcache import LLM, SamplingParams
from prefixcache.training import Policy, Rollout

INSTRUCTIONS = "write odd digits, and nothing else, after this one: "
DIGITS = "0123456789"


def tiny_model(folder: Path) -> None:
    """A random Llama over characters, with its tokenizer."""
    letters = sorted({*INSTRUCTIONS, *DIGITS})
    tokenizer = Tokenizer(WordLevel({one: i for i, one in enumerate([*letters, "?"])}, "?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split(Regex("."), "isolated"), Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(letters) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def reward(rollout: Rollout) -> float:
    """The share of the answer that is odd digits."""
    return sum(one in "13579" for one in rollout.text) / max(len(rollout.text), 1)


def advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """How much better each answer is than its group, in standard deviations."""
    groups = rewards.view(-1, group)
    spread = groups.std(dim=1, keepdim=True)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (spread + 1e-4)).flatten()


class Trainer:
    """One step of GRPO after the other."""

    def __init__(
        self, policy: Policy, model: PreTrainedModel, instructions: str, rate: float, group: int
    ) -> None:
        self._policy = policy
        self._instructions = instructions
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        self._group = group
        self._random = random.Random(0)

    def step(self, number: int, num_prompts: int, num_tokens: int) -> float:
        """Generates, scores and learns; prints a line, and returns the KL."""
        begun = time.perf_counter()
        prompts = [self._instructions + self._random.choice(DIGITS) for _ in range(num_prompts)]
        params = SamplingParams(
            n=self._group, seed=1000 * number, max_tokens=num_tokens, ignore_eos=True
        )
        rollouts = self._policy.generate(prompts, params)
        generated = time.perf_counter() - begun
        rewards = torch.tensor([reward(one) for one in rollouts])
        kl = self._learn(rollouts, advantages(rewards, self._group))
        cached = sum(one.num_cached_tokens for one in rollouts)
        read = sum(len(one.prompt_token_ids) for one in rollouts)
        speed = sum(len(one.token_ids) for one in rollouts) / generated
        print(
            f"step {number:3}  reward {rewards.mean():.3f}  kl={kl}  cached {cached / read:.2f}  "
            f"{speed:.1f} tokens/s  {time.perf_counter() - begun:.2f} s",
            flush=True,
        )
        return kl

    def _learn(self, rollouts: Sequence[Rollout], advantages: torch.Tensor) -> float:
        old = [torch.tensor(one.logprobs, dtype=torch.float64) for one in rollouts]
        new = self._policy.logprobs(rollouts)
        ratios = [(now - before).exp() for now, before in zip(new, old, strict=True)]
        gains = [ratio.mean() * by for ratio, by in zip(ratios, advantages, strict=True)]
        self._optimizer.zero_grad()
        (-torch.stack(gains).mean()).backward()
        self._optimizer.step()
        return float((torch.cat(old) - torch.cat(new).detach()).mean())


def main() -> None:
    """Trains, and fails where a KL is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder of safetensors in float32")
    parser.add_argument("--instructions", default=INSTRUCTIONS, help="before a prompt's digit")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--rate", type=float, default=3e-3, help="of learning")
    parser.add_argument("--no-cache", action="store_true", help="to compare the speed")
    given = parser.parse_args()
    torch.set_num_threads(1)  # those of the engine's kernels run next to it
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or Path(scratch)
        if given.model is None:
            tiny_model(folder)
        llm = LLM(str(folder), dtype="float32", enable_prefix_caching=not given.no_cache)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    trainer = Trainer(Policy(llm, model), model, given.instructions, given.rate, given.group)
    kls = [trainer.step(i, given.prompts, given.tokens) for i in range(given.steps)]
    raise SystemExit(any(kls))


if __name__ == "__main__":
    main()
