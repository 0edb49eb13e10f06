"""What activations of eight bits change in answers: log probabilities and greedy tokens.

`python benches/serving/int8_quality.py [--chats 20] [--tokens 512]`, on the default model and
recorded chats (tau-bench, `tests/support/dialogues.py`), the turns after the policy. All read the
same tokens; each tells the log probability of the token that follows and its own favourite. Then
each goes on by itself, greedily, from half of the text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from prefixcache._core import Cpu
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.models.hub import resolve_model
from prefixcache.runner.cpu.model import CpuModel
from prefixcache.text.tokenization.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.dialogues import read_dialogues
from support.loaded import cpu_model
from support.paged_driver import CpuDriver

GREEDY = 32


def texts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    chats = read_dialogues()[:count]
    spoken = ["\n".join(str(m["content"]) for m in chat[1:] if m["content"]) for chat in chats]
    return [tokenizer.encode(text).tolist()[:length] for text in spoken]


def logits_of(model: CpuModel, cpu: Cpu, tokens: list[int]) -> Tensor:
    driver = CpuDriver(model, cpu=cpu, max_tokens=len(tokens))
    return driver.forward([(0, 0, tokens)])


def greedy(model: CpuModel, cpu: Cpu, tokens: list[int]) -> list[int]:
    length = len(tokens) + GREEDY
    driver = CpuDriver(model, cpu=cpu, max_tokens=length)
    answer = [int(driver.forward([(0, 0, tokens)])[-1].argmax())]
    while len(answer) < GREEDY:
        work = [(0, len(tokens) + len(answer) - 1, answer[-1:])]
        answer.append(int(driver.forward(work)[-1].argmax()))
    return answer


def common(a: list[int], b: list[int]) -> int:
    """Tokens up to the first that differs."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    folder, cpu = resolve_model(arguments.model), Cpu(arguments.threads)

    models = {
        "exact": cpu_model(folder, "bfloat16", cpu),
        "int8": cpu_model(folder, "bfloat16", cpu, "int8"),
        "exact, float32": cpu_model(folder, "float32", cpu),
    }
    reported: dict[str, list[Tensor]] = {way: [] for way in models}
    favourites: dict[str, list[Tensor]] = {way: [] for way in models}
    followed: dict[str, int] = dict.fromkeys(models, 0)
    equal: dict[str, int] = dict.fromkeys(models, 0)
    all_tokens = texts(Tokenizer.from_folder(folder), arguments.chats, arguments.tokens)
    for tokens in all_tokens:
        half = tokens[: len(tokens) // 2]
        answers = {way: greedy(model, cpu, half) for way, model in models.items()}
        for way, model in models.items():
            logits = logits_of(model, cpu, tokens)[:-1].float()
            following = torch.tensor(tokens[1:])[:, None]
            reported[way].append(logits.log_softmax(-1).gather(1, following)[:, 0])
            favourites[way].append(logits.argmax(-1))
            same = [a == b for a, b in zip(answers[way], answers["exact"], strict=True)]
            equal[way] += sum(same)
            followed[way] += common(answers[way], answers["exact"])
    rows = sum(map(len, reported["exact"]))
    print(f"{arguments.model}: {len(all_tokens)} texts, {rows} tokens, bfloat16")
    exact, best = torch.cat(reported["exact"]), torch.cat(favourites["exact"])
    for way in models:
        mine, favourite = torch.cat(reported[way]), torch.cat(favourites[way])
        difference = mine - exact
        print(
            f"{way}: mean log probability {mine.mean():.4f} ({difference.mean():+.5f}, mean of "
            f"absolute differences {difference.abs().mean():.4f}), favourite equal in "
            f"{(favourite == best).float().mean():.2%}; of {GREEDY} greedy tokens of each "
            f"{equal[way] / GREEDY / len(all_tokens):.1%} equal, "
            f"{followed[way] / len(all_tokens):.1f} before the first other one"
        )


if __name__ == "__main__":
    main()
