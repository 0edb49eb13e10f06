"""TRL's GRPOTrainer with prefixcache as its generator.

    pip install trl
    python examples/trl_rollout.py

The trainer calls a rollout function with the prompts of a batch. Ours gives the trainer's weights
to the engine, answers all prompts, and returns the tokens with their log probabilities. The answers
to a prompt share its KV. `kl` is the mean difference between the log probabilities of the rollouts
and those of `prefixcache.training.Policy` for the trainer's weights: 0.0 in each step. TRL computes
its loss with transformers, which rounds in another way. TRL calls its rollout functions
experimental; this was run with 1.16.
"""

import argparse
import tempfile
from argparse import RawTextHelpFormatter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo import DIGITS, INSTRUCTIONS, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from prefixcache import LLM, SamplingParams
from prefixcache.training import Policy


def odd_digits(completions: list[str], **_: object) -> list[float]:
    """The share of each answer that is odd digits."""
    return [sum(one in "13579" for one in text) / max(len(text), 1) for text in completions]


class Rollouts:
    """What `GRPOTrainer` calls in the place of its own generation."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.kls: list[float] = []

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """One answer to each prompt; TRL repeats a prompt for each answer that it wants."""
        count = trainer.num_generations
        params = SamplingParams(
            n=count,
            seed=1000 * trainer.state.global_step,
            temperature=trainer.temperature,
            max_tokens=trainer.max_completion_length,
        )
        rollouts = self._policy.generate(prompts[::count], params)
        with torch.no_grad():
            again = torch.cat(self._policy.logprobs(rollouts))
        scores = [one for rollout in rollouts for one in rollout.logprobs]
        self.kls.append(float((torch.tensor(scores, dtype=torch.float64) - again).mean()))
        cached = sum(one.num_cached_tokens for one in rollouts)
        read = sum(len(one.prompt_token_ids) for one in rollouts)
        print(f"kl={self.kls[-1]}  cached {cached / read:.2f}", flush=True)
        return {
            "prompt_ids": [one.prompt_token_ids for one in rollouts],
            "completion_ids": [one.token_ids for one in rollouts],
            "logprobs": [one.logprobs for one in rollouts],
        }


def main() -> None:
    """Trains, and fails where a KL is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)  # those of the engine's kernels run next to it
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tiny_model(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="?")
        rollouts = Rollouts(Policy(LLM(str(folder), dtype="float32"), model))
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=odd_digits,
            train_dataset=Dataset.from_list([{"prompt": INSTRUCTIONS + one} for one in DIGITS]),
            processing_class=tokenizer,
            rollout_func=rollouts,
            args=GRPOConfig(
                output_dir=scratch,
                max_steps=given.steps,
                num_generations=8,
                per_device_train_batch_size=32,
                max_completion_length=8,
                learning_rate=3e-3,
                gradient_checkpointing=False,
                logging_steps=1,
                disable_tqdm=True,
                bf16=False,
                use_cpu=True,
                report_to="none",
            ),
        )
        trainer.train()
    raise SystemExit(any(rollouts.kls))


if __name__ == "__main__":
    main()
