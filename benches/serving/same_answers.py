"""Does a reused prefix change the answer? Greedy answers, cold and on a cached prefix, compared.

    python benches/serving/same_answers.py --chats 8 --tokens 32

Each contender answers the first question of recorded chats that begin with one system prompt of
about 1,300 tokens: once from nothing, once on the KV of that system prompt, which it has kept from
another chat. transformers keeps it in a `DynamicCache` that is cut back; ours finds it by itself.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from prefixcache import LLM, SamplingParams
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.models.conversion import dequantize_folder
from prefixcache.models.hub import resolve_model
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.tools.bench.machine import write_record
from prefixcache.types.request import CacheOptions

CHATS = Path(__file__).parents[2] / "tests" / "data" / "taubench_airline.jsonl.gz"
Scored = list[tuple[int, float]]
"""Token ids of an answer with their log probabilities."""


@dataclass(frozen=True)
class Pair:
    """One question's answer from nothing, and on a cached prefix."""

    cold: Scored
    warm: Scored

    @property
    def same_tokens(self) -> bool:
        """Whether both say the same."""
        return [token for token, _ in self.cold] == [token for token, _ in self.warm]

    def first_change(self) -> int | None:
        """The first place where token or log probability differ."""
        places = range(len(self.cold))
        return next((i for i in places if self.cold[i] != self.warm[i]), None)


class Ours:
    """The whole engine, as `LLM` gives it."""

    def __init__(self, dtype: str) -> None:
        self._llm = LLM(DEFAULT_MODEL, dtype=dtype, max_model_len=4096)

    def answer(self, prompts: list[list[int]], tokens: int) -> list[Pair]:
        self._ask(prompts[:1], tokens, CacheOptions())
        cold = self._ask(prompts[1:], tokens, CacheOptions(read=False, write=False))
        return [Pair(*both) for both in zip(cold, self._warm(prompts[1:], tokens), strict=True)]

    def _warm(self, prompts: list[list[int]], tokens: int) -> list[Scored]:
        return self._ask(prompts, tokens, CacheOptions(write=False))

    def _ask(self, prompts: list[list[int]], tokens: int, options: CacheOptions) -> list[Scored]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        results = [
            self._llm.generate(p, params, use_tqdm=False, cache_options=options)[0] for p in prompts
        ]
        assert all((r.num_cached_tokens > 1000) == options.read for r in results[1:])
        return [
            [
                (token, by_id[token].logprob)
                for token, by_id in zip(o.token_ids, o.logprobs or (), strict=True)
            ]
            for o in (result.outputs[0] for result in results)
        ]


class Transformers:
    """Its own model with SDPA attention."""

    def __init__(self, dtype: str) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch_dtype = getattr(torch, dtype)
        with TemporaryDirectory() as dequantized:
            dequantize_folder(resolve_model(DEFAULT_MODEL), Path(dequantized), dtype)
            self._model = AutoModelForCausalLM.from_pretrained(
                dequantized, dtype=torch_dtype, attn_implementation="sdpa"
            ).eval()

    def answer(self, prompts: list[list[int]], tokens: int) -> list[Pair]:
        kept = DynamicCache()
        self._decode(prompts[0], 1, kept)
        kept.crop(num_shared(prompts) - kept.get_seq_length())
        return [
            Pair(
                self._decode(prompt, tokens, DynamicCache()),
                self._decode(prompt, tokens, copy.deepcopy(kept)),
            )
            for prompt in prompts[1:]
        ]

    @torch.inference_mode()
    def _decode(self, prompt: list[int], count: int, cache: DynamicCache) -> Scored:
        answer: Scored = []
        tokens = prompt[cache.get_seq_length() :]
        while len(answer) < count:
            ids = torch.tensor([tokens])
            logits = self._model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
            logprobs = logits.float().log_softmax(-1)
            token = int(logprobs.argmax())
            answer.append((token, float(logprobs[token])))
            tokens = [token]
        return answer


def num_shared(prompts: list[list[int]]) -> int:
    """How many leading tokens all prompts share."""
    columns = enumerate(zip(*prompts, strict=False))
    return next(place for place, tokens in columns if len(set(tokens)) > 1)


def read_prompts(chats: int) -> list[list[int]]:
    """The rendered first turns of the chats, and of one more."""
    tokenizer = Tokenizer.from_folder(resolve_model(DEFAULT_MODEL))
    template = tokenizer.chat_template
    assert template is not None
    with gzip.open(CHATS, "rt", encoding="utf-8") as lines:
        turns = [json.loads(line)["messages"][:2] for line in lines][: chats + 1]
    texts = [template.render(turn, add_generation_prompt=True) for turn in turns]
    return [tokenizer.encode(text, add_special_tokens=False).tolist() for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    prompts = read_prompts(options.chats)
    values: dict[str, dict[str, int]] = {}
    answers: dict[str, list[dict[str, Scored]]] = {}
    print(
        "| contender | answers with other tokens | log probabilities that differ | first change |"
    )
    print("|---|---|---|---|")
    for name, contender in (("transformers", Transformers), ("prefixcache", Ours)):
        pairs = contender(options.dtype).answer(prompts, options.tokens)
        values[name] = counts(pairs)
        answers[name] = [asdict(pair) for pair in pairs]
        print(row(name, values[name], pairs), flush=True)
    write_record(options.output, values=values, answers=answers)


def counts(pairs: list[Pair]) -> dict[str, int]:
    """Only places before the first other token are compared: after it the texts part."""
    compared = [both for pair in pairs for both in until_they_part(pair)]
    return {
        "answers": len(pairs),
        "other_tokens": sum(not pair.same_tokens for pair in pairs),
        "compared": len(compared),
        "other_log_probabilities": sum(cold != warm for cold, warm in compared),
    }


def row(name: str, found: dict[str, int], pairs: list[Pair]) -> str:
    changes = [(p, i) for p in pairs if (i := p.first_change()) is not None]
    first = "none"
    if changes:
        pair, place = changes[0]
        first = f"token {place}: {pair.cold[place][1]:.6f} became {pair.warm[place][1]:.6f}"
    tokens = f"{found['other_tokens']} of {found['answers']}"
    scores = f"{found['other_log_probabilities']} of {found['compared']}"
    return f"| {name} | {tokens} | {scores} | {first} |"


def until_they_part(pair: Pair) -> list[tuple[float, float]]:
    """Log probabilities of the tokens that both chose after the same context."""
    kept: list[tuple[float, float]] = []
    for (token, cold), (other, warm) in zip(pair.cold, pair.warm, strict=True):
        if token != other:
            break
        kept.append((cold, warm))
    return kept


if __name__ == "__main__":
    main()
