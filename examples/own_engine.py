"""A tiny engine of its own around the cache: a model of random weights, paged KV, a loop of steps.

Needs `prefixcache.core`, numpy and torch. A warm prompt must give the tokens and the bits of a cold
one, and with a wrong block table it must not. docs/tutorials/library.md explains each call.
"""

import numpy as np
import torch
from torch.nn.functional import layer_norm

from prefixcache.core import PrefixCache, Sequence

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 16, 64, 512
VOCABULARY, WIDTH, LAYERS = 256, 64, 2
# Hit tokens and new tokens of each prompt, and logits [new tokens, prompts, VOCABULARY].
Answers = tuple[list[int], list[list[int]], torch.Tensor]


class Model:
    """Decoder layers of random weights. KV lies in slots: block * BLOCK_SIZE + offset."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, WIDTH)
        self.positions = torch.randn(MAX_TOKENS, WIDTH)
        # Of each layer: query, key, value, output, up, down.
        self.layers = torch.randn(LAYERS, 6, WIDTH, WIDTH) / WIDTH**0.5
        self.kv = torch.zeros(LAYERS, 2, NUM_BLOCKS * BLOCK_SIZE, WIDTH)

    def compute_row(self, token: int, position: int, slot: int, pages: np.ndarray) -> torch.Tensor:
        """Writes the KV of one token to its slot; the logits [VOCABULARY] after it.

        One row at a time: so its bits cannot depend on the rows that a step computes with it.
        """
        before = np.arange(position + 1)
        slots = torch.from_numpy(pages[before // BLOCK_SIZE] * BLOCK_SIZE + before % BLOCK_SIZE)
        x = self.embedding[token] + self.positions[position]
        for (query, key, value, out, up, down), kv in zip(self.layers, self.kv, strict=True):
            normed = layer_norm(x, (WIDTH,))
            kv[0, slot], kv[1, slot] = key @ normed, value @ normed
            scores = kv[0, slots] @ (query @ normed) / WIDTH**0.5
            x = x + out @ (scores.softmax(0) @ kv[1, slots])
            x = x + down @ (up @ layer_norm(x, (WIDTH,))).relu()
        return self.embedding @ layer_norm(x, (WIDTH,))


class Engine:
    """Answers batches of prompts greedily."""

    def __init__(self) -> None:
        self.model = Model()
        self.wrong_table = False
        self.cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE, model="two layers", kv_dtype="float32")

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Answers:
        """Appends `num_tokens` greedy tokens to each prompt."""
        texts, logits = [list(prompt) for prompt in prompts], []
        sequences = [self.cache.new_sequence(prompt) for prompt in prompts]
        try:
            hits = [self._admit(sequence) for sequence in sequences]
            for _ in range(num_tokens):
                logits.append(self._step(sequences, texts))
                for text, token in zip(texts, logits[-1].argmax(-1).tolist(), strict=True):
                    text.append(token)
                self.cache.append_tokens(sequences, [text[-1] for text in texts])
                if self.cache.append_slots(sequences, [1] * len(texts)) < len(texts):
                    raise MemoryError("no free block: a larger engine preempts a request here")
        finally:
            self.cache.release([sequence for sequence in sequences if sequence.is_committed])
        new = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
        return hits, new, torch.stack(logits)

    def _admit(self, sequence: Sequence) -> int:
        # The last token is computed even where it hits: its logits choose the next one.
        most = (sequence.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        hits = min(self.cache.count_prefix_hits(sequence), most)
        taken = self.cache.commit_prefix_plan(sequence, hits, sequence.num_tokens - hits)
        if taken is None:
            raise MemoryError("no free blocks: a larger engine lets the request wait here")
        return taken

    def _step(self, sequences: list[Sequence], texts: list[list[int]]) -> torch.Tensor:
        """Computes all tokens without KV; the logits after the last token of each sequence."""
        starts = [sequence.num_filled for sequence in sequences]
        counts = [len(text) - start for text, start in zip(texts, starts, strict=True)]
        indptr, last_page_len = np.zeros((2, len(texts) + 1), np.int32)
        indices = np.zeros(len(texts) * MAX_TOKENS // BLOCK_SIZE, np.int32)
        slots = np.zeros(sum(counts), np.int64)
        tables = (indptr, indices, last_page_len, slots)
        self.cache.fill_block_tables(sequences, starts, counts, 0, *tables)
        rows, next_slot = [], iter(slots.tolist())
        for text, start, begin, end in zip(texts, starts, indptr, indptr[1:], strict=False):
            pages = np.roll(indices[begin:end], int(self.wrong_table))
            for position in range(start, len(text)):
                row = self.model.compute_row(text[position], position, next(next_slot), pages)
            rows.append(row)
        self.cache.mark_blocks_filled(sequences, [len(text) for text in texts])
        return torch.stack(rows)


def main() -> None:
    """Compares cold answers with warm ones, and with those through wrong block tables."""
    prompt = [7 * token % VOCABULARY for token in range(100)]
    prompts = [prompt, [*prompt[:60], 1, 2, 3]]
    cold = [Engine().generate([prompt], 20) for prompt in prompts]

    engine = Engine()
    engine.generate([prompt], 20)
    hits, *warm = engine.generate(prompts, 20)
    print(f"{hits} of {[len(prompt) for prompt in prompts]} prompt tokens were hits")
    if [hits for [hits], *_ in cold] != [0, 0] or hits != [96, 48]:
        raise SystemExit("other blocks hit than those that the prompts share")
    if not same_bits(cold, *warm):
        raise SystemExit("the cache changed an answer")
    print("tokens and logits have the bits of a cold run")

    engine.wrong_table = True
    _, *wrong = engine.generate(prompts, 20)
    if same_bits(cold, *wrong):
        raise SystemExit("no answer depended on the block table")
    print("with a wrong block table they do not")


def same_bits(cold: list[Answers], tokens: list[list[int]], logits: torch.Tensor) -> bool:
    """Whether each prompt's tokens, and every bit of its logits, are those of its cold run."""
    alone = torch.cat([logits for _, _, logits in cold], dim=1)
    return tokens == [tokens[0] for _, tokens, _ in cold] and torch.equal(logits, alone)


if __name__ == "__main__":
    main()
