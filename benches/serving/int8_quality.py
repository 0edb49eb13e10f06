"""What activations, or keys and values, of eight bits change in answers.

    python benches/serving/int8_quality.py questions
    python benches/serving/int8_quality.py texts --chats 40 --tokens 400
    python benches/serving/int8_quality.py keys --chats 40 --tokens 400
    python benches/serving/int8_quality.py recall --chats 20
    python benches/serving/int8_quality.py formats MODEL.gguf ... --llama-python VENV/bin/python

The rule, written before the numbers were seen: int8 is what `--cpu-activations auto` takes, unless
with the default model it answers more than 3 of 100 questions fewer than exact activations do, in
bfloat16 or in float32; and a format of weights stays exact if in float32 the mean absolute
difference of its log probabilities from float64 is more than 1.05 times that of llama.cpp, whose
activations are int8 too, in the same file. (Two ways to round the same products differ by some
per cent in this mean, in whichever direction.)

`texts` are recorded chats (tau-bench, `tests/support/dialogues.py`), the turns after the policy:
all read the same tokens, and each tells the log probability of the token that follows and its own
favourite. Then each goes on by itself, greedily, from half of the text. `keys` does the same with
keys and values in eight bits, and llama.cpp with `q8_0` ones is compared with itself, in float32
weights. `recall` puts a locker's number into the middle of a recorded chat and asks for it.
`formats` reads GGUF files of the Llama family, with random tokens where the file's
own vocabulary has no text.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from compare import Entry, started
from gguf_bf16 import convert
from questions import QUESTIONS
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from prefixcache import LLM, SamplingParams
from prefixcache._core import Cpu
from prefixcache.config.engine_config import DEFAULT_MODEL, Activations
from prefixcache.models.conversion import dequantize_folder
from prefixcache.models.hub import resolve_model
from prefixcache.runner.cpu.linear import KernelDType
from prefixcache.runner.cpu.model import CpuModel
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.tools.bench.machine import usable_cores, write_record

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.dialogues import read_dialogues
from support.loaded import cpu_model
from support.paged_driver import CpuDriver

GREEDY = 32
# ggml's type 8, with flash attention, without which llama.cpp refuses it for values.
_Q8_0 = "context.type_k=8,context.type_v=8,context.flash_attn_type=1"
_ANSWER_TOKENS = 32
_WAYS: dict[str, tuple[KernelDType, Activations]] = {
    "exact, bfloat16": ("bfloat16", "exact"),
    "int8, bfloat16": ("bfloat16", "int8"),
    "exact, float32": ("float32", "exact"),
    "int8, float32": ("float32", "int8"),
}
app = typer.Typer(help=__doc__)

# A model, and whether its keys and values are kept in eight bits.
_Way = tuple[CpuModel, bool]


@app.command()
def questions(model: str = DEFAULT_MODEL, output: Path | None = None) -> None:
    """How many of 100 questions are answered rightly."""
    chats = [[{"role": "user", "content": question.text}] for question in QUESTIONS]
    right: dict[str, list[str]] = {}
    for way, (dtype, activations) in _WAYS.items():
        llm = LLM(model, device="cpu", dtype=dtype, cpu_activations=activations)
        greedy = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS)
        answers = [each.outputs[0].text for each in llm.chat(chats, greedy, use_tqdm=False)]
        asked = zip(QUESTIONS, answers, strict=True)
        right[way] = [question.text for question, answer in asked if question.is_right(answer)]
        print(f"{way}: {len(right[way])} of {len(QUESTIONS)} are right", flush=True)
    write_record(output, right=right)


@app.command()
def texts(
    model: str = DEFAULT_MODEL,
    chats: int = 20,
    tokens: int = 512,
    threads: int = usable_cores(),
    output: Path | None = None,
) -> None:
    """Log probabilities and greedy tokens, against exact bfloat16."""
    folder, cpu = resolve_model(model), Cpu(threads)
    models = {way: cpu_model(folder, dtype, cpu, kind) for way, (dtype, kind) in _WAYS.items()}
    drawn = _texts(Tokenizer.from_folder(folder), chats, tokens)
    ways = _said({way: (each, False) for way, each in models.items()}, cpu, drawn)
    write_record(output, ways=_compared(ways, next(iter(ways))))


@app.command()
def keys(
    model: str = DEFAULT_MODEL,
    chats: int = 20,
    tokens: int = 512,
    threads: int = usable_cores(),
    llama_python: Annotated[
        str | None, typer.Option(help="Interpreter that has llama-cpp-python.")
    ] = None,
    output: Path | None = None,
) -> None:
    """The same with keys and values in eight bits, against each type's own."""
    folder, cpu = resolve_model(model), Cpu(threads)
    drawn = _texts(Tokenizer.from_folder(folder), chats, tokens)
    dtypes: list[KernelDType] = ["bfloat16", "float32"]
    models = dict[str, _Way]()
    for dtype in dtypes:
        exact = cpu_model(folder, dtype, cpu)
        models |= {dtype: (exact, False), f"{dtype}, int8 keys and values": (exact, True)}
    ways = _said(models, cpu, drawn)
    found = {dtype: _compared(ways, dtype) for dtype in dtypes}
    llama = None if llama_python is None else _llama_keys(folder, drawn, llama_python, threads)
    write_record(output, ways=found, llama=llama)


def _llama_keys(
    folder: Path, texts: Sequence[list[int]], python: str, threads: int
) -> dict[str, float]:
    """What q8_0 keys and values change in llama.cpp, whose default they are not."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "float32.gguf"
        convert(next(folder.glob("*.gguf")), file, "F32")
        exact, rounded = (
            _theirs(file, texts, python, threads, settings=settings)
            for settings in ("context.flash_attn_type=1", _Q8_0)
        )
    found = _differences(rounded, exact)
    print(f"llama.cpp, q8_0 keys and values: {found}", flush=True)
    return found


@app.command()
def recall(
    model: str = DEFAULT_MODEL,
    chats: int = 20,
    lengths: Annotated[
        list[int] | None, typer.Option(help="Tokens of the chats before and after it.")
    ] = None,
    output: Path | None = None,
) -> None:
    """In how many chats of each length a number in the middle is recalled."""
    tokenizer = Tokenizer.from_folder(resolve_model(model))
    lengths = lengths or [256, 1024, 4096]
    stream = [token for text in _texts(tokenizer, 40, max(lengths)) for token in text]
    starts = range(0, len(stream) - max(lengths), (len(stream) - max(lengths)) // chats)[:chats]
    spoken = [stream[start : start + max(lengths)] for start in starts]
    recalled: dict[str, dict[int, list[int]]] = {}
    for dtype, kv_dtype in itertools.product(["float32", "bfloat16"], ["auto", "int8"]):
        llm = LLM(model, device="cpu", dtype=dtype, kv_cache_dtype=kv_dtype)
        greedy = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS)
        way = recalled[f"{dtype}, {kv_dtype} keys and values"] = {}
        for length in lengths:
            prompts = [_with_number(tokenizer, text[:length], i) for i, text in enumerate(spoken)]
            answers = [each.outputs[0].text for each in llm.chat(prompts, greedy, use_tqdm=False)]
            way[length] = [i for i, answer in enumerate(answers) if _number(i) in answer]
        print(f"{dtype}, {kv_dtype}: { {n: len(of) for n, of in way.items()} }", flush=True)
    write_record(output, chats=chats, recalled=recalled)


def _with_number(tokenizer: Tokenizer, tokens: list[int], index: int) -> list[dict[str, str]]:
    half = len(tokens) // 2
    before, after = tokenizer.decode(tokens[:half]), tokenizer.decode(tokens[half:])
    text = f"{before}\nThe number of my locker is {_number(index)}.\n{after}"
    return [{"role": "user", "content": f"{text}\n\nWhat is the number of my locker?"}]


def _number(index: int) -> str:
    return str(random.Random(index).randint(1000, 9999))


@dataclass(frozen=True)
class _Said:
    """Of all texts: log probabilities of their tokens, the likeliest ones, and greedy tokens."""

    reported: Tensor
    favourites: Tensor
    greedy: Tensor


def _said(ways: dict[str, _Way], cpu: Cpu, texts: Sequence[list[int]]) -> dict[str, _Said]:
    said = dict[str, _Said]()
    for name, way in ways.items():
        reported, favourites, greedy = list[Tensor](), list[Tensor](), list[Tensor]()
        for text in tqdm(texts, desc=name):
            logits = _logits_of(way, cpu, text)[:-1]
            reported.append(_of_following(logits, text))
            favourites.append(logits.argmax(-1))
            greedy.append(torch.tensor(_greedy(way, cpu, text[: len(text) // 2])))
        said[name] = _Said(torch.cat(reported), torch.cat(favourites), torch.cat(greedy))
    return said


def _compared(said: dict[str, _Said], with_: str) -> dict[str, dict[str, float]]:
    base = said[with_]
    print(f"against {with_}, {len(base.reported)} tokens:")
    found = dict[str, dict[str, float]]()
    for way, each in said.items():
        found[way] = _differences(each.reported, base.reported) | {
            "same favourite": float((each.favourites == base.favourites).double().mean()),
            "greedy tokens equal": float((each.greedy == base.greedy).double().mean()),
        }
        print(f"{way}: {found[way]}", flush=True)
    return found


@app.command()
def formats(
    files: list[Path],
    llama_python: Annotated[str, typer.Option(help="Interpreter that has llama-cpp-python.")],
    texts: int = 8,
    tokens: int = 128,
    threads: int = usable_cores(),
    output: Path | None = None,
) -> None:
    """Differences of log probabilities from float64, ours and llama.cpp's, of each file."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for file in files:
        folder = resolve_model(str(file))
        drawn = _drawn(folder, texts, tokens)
        expected = _in_float64(folder, drawn)
        ways = {way: torch.cat(list(_ours(folder, drawn, threads, way))) for way in _WAYS}
        ways["llama.cpp"] = _theirs(file, drawn, llama_python, threads)
        found[file.stem] = {way: _differences(mine, expected) for way, mine in ways.items()}
        for way, numbers in found[file.stem].items():
            print(f"{file.stem}, {way}: {numbers}", flush=True)
    write_record(output, formats=found)


def _texts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    chats = read_dialogues()[:count]
    spoken = ["\n".join(str(m["content"]) for m in chat[1:] if m["content"]) for chat in chats]
    return [tokenizer.encode(text).tolist()[:length] for text in spoken]


def _drawn(folder: Path, count: int, length: int) -> list[list[int]]:
    """Texts of the recorded chats; random tokens of a vocabulary of bytes alone."""
    tokenizer = Tokenizer.from_folder(folder)
    if len(tokenizer.encode("What is the capital?")) < 10:
        return _texts(tokenizer, count, length)
    draw = torch.Generator().manual_seed(0)
    return torch.randint(300, 32_000, (count, length), generator=draw).tolist()


def _ours(folder: Path, texts: Sequence[list[int]], threads: int, way: str) -> Iterator[Tensor]:
    dtype, activations = _WAYS[way]
    cpu = Cpu(threads)
    model = cpu_model(folder, dtype, cpu, activations)
    for text in texts:
        yield _of_following(_logits_of((model, False), cpu, text)[:-1], text)


def _in_float64(folder: Path, texts: Sequence[list[int]]) -> Tensor:
    """By transformers, of the weights dequantized in float32."""
    with tempfile.TemporaryDirectory() as place:
        dequantize_folder(folder, Path(place), "float32")
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
    with torch.inference_mode():
        rows = [model(torch.tensor([text])).logits[0, :-1] for text in texts]
    return torch.cat([_of_following(row, text) for row, text in zip(rows, texts, strict=True)])


def _theirs(
    file: Path, texts: Sequence[list[int]], python: str, threads: int, settings: str = ""
) -> Tensor:
    options = {"model": str(file.resolve()), "settings": settings}
    entry = Entry("llama.cpp", "with_llama_cpp", options, python)
    shared = {"threads": threads, "max_tokens": max(map(len, texts)), "max_seqs": 1}
    with started(entry, shared, limit=600) as worker:
        return torch.tensor(
            [each for text in texts for each in worker("log_probabilities", tokens=text)],
            dtype=torch.float64,
        )


def _logits_of(way: _Way, cpu: Cpu, tokens: list[int]) -> Tensor:
    driver = CpuDriver(way[0], cpu=cpu, max_tokens=len(tokens), has_codes=way[1])
    return driver.forward([(0, 0, tokens)])


def _of_following(logits: Tensor, tokens: list[int]) -> Tensor:
    """Log probabilities of each token after the first."""
    following = torch.tensor(tokens[1:])[:, None]
    return logits.double().log_softmax(-1).gather(1, following)[:, 0]


def _greedy(way: _Way, cpu: Cpu, tokens: list[int]) -> list[int]:
    length = len(tokens) + GREEDY
    driver = CpuDriver(way[0], cpu=cpu, max_tokens=length, has_codes=way[1])
    return driver.generate(tokens, GREEDY)


def _differences(mine: Tensor, expected: Tensor) -> dict[str, float]:
    difference = mine - expected
    return {
        "mean log probability": float(mine.mean()),
        "mean difference": float(difference.mean()),
        "mean absolute difference": float(difference.abs().mean()),
    }


if __name__ == "__main__":
    app()
