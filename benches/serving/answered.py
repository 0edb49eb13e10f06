"""Prompts with known answers, of which some can be guessed: chats, code edits, quotes, and noise.

Chats are recorded (`tests/data`), edits are this repository's own commits, quotes are of its pages.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from prefixcache.models.hub import resolve_model
from prefixcache.text.tokenization.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
CHATS = ROOT / "tests" / "data" / "taubench_airline.jsonl.gz"
_MOST_CHARS = 4000
"""Of a file that is edited, and of a page that is quoted."""


@dataclass(frozen=True)
class Turn:
    """Token ids of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]


class Texts:
    """The texts in a model's tokens; ids beyond `vocab_size` wrap around, for a smaller model."""

    def __init__(self, model: str, vocab_size: int | None = None) -> None:
        self._tokenizer = Tokenizer.from_folder(resolve_model(model))
        self._vocab_size = vocab_size or 1 << 31
        self.by_name: dict[str, Callable[[], Iterator[Turn]]] = {
            "chats": self._chats,
            "edits": lambda: self._edits(whole=False),
            "rewrites": lambda: self._edits(whole=True),
            "quotes": self._quotes,
            "noise": self._noise,
        }

    def turns(self, name: str, count: int) -> list[Turn]:
        """The first turns of the text, up to `count`."""
        return list(islice(self.by_name[name](), count))

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return [int(token) % self._vocab_size for token in ids]

    def _turn(self, messages: list[dict[str, str]], answer: str) -> Turn:
        template = self._tokenizer.chat_template
        assert template is not None
        prompt = self._encode(template.render(messages, add_generation_prompt=True))
        return Turn(prompt, self._encode(answer + "<|im_end|>"))

    def _asked(self, question: str, answer: str) -> Turn:
        system = {"role": "system", "content": "You are a helpful assistant."}
        return self._turn([system, {"role": "user", "content": question}], answer)

    def _chats(self) -> Iterator[Turn]:
        """Every answer of every chat, with all that was said before it."""
        with gzip.open(CHATS, "rt", encoding="utf-8") as lines:
            for line in lines:
                messages = json.loads(line)["messages"]
                for place, message in enumerate(messages):
                    if message["role"] == "assistant":
                        yield self._turn(messages[:place], message["content"])

    def _edits(self, *, whole: bool) -> Iterator[Turn]:
        """A file and what its next commit says; the answer is the diff, or the `whole` new file."""
        for commit, path in changed_files():
            before, after = (_git("show", f"{at}:{path}") for at in (f"{commit}~", commit))
            if len(before) > _MOST_CHARS:
                continue
            diff = _git("diff", f"{commit}~", commit, "--", path).partition("\n@@")[2]
            why = _git("log", "-1", "--format=%s", commit).strip()
            form = "whole new file" if whole else "diff"
            question = f"```python\n{before}```\n{why}\nAnswer with the {form}."
            yield self._asked(question, after if whole else f"@@{diff}")

    def _quotes(self) -> Iterator[Turn]:
        """What a page says under a heading, in its own words."""
        for page in sorted((ROOT / "docs").rglob("*.md")):
            text = page.read_text()[:_MOST_CHARS]
            for heading, body in re.findall(r"^## (.+)\n\n((?:.+\n)+)", text, re.MULTILINE):
                quoted = "".join(f"> {line}\n" for line in body.splitlines())
                question = f"{text}\n\nWhat does this page say about {heading.lower()}?"
                yield self._asked(question, f"About {heading.lower()} it says:\n\n{quoted}")

    def _noise(self) -> Iterator[Turn]:
        """Random tokens, of which nothing can be guessed."""
        draw, most = random.Random(0), min(self._vocab_size, 32000)
        while True:
            tokens = [draw.randrange(300, most) for _ in range(384)]
            yield Turn(tokens[:256], tokens[256:])


def changed_files() -> Iterator[tuple[str, str]]:
    """Late commits of this repository that change Python files, and the files."""
    log = _git("log", "-n400", "--diff-filter=M", "--name-only", "--format=commit %H")
    # Oldest first: what is to come was not said before.
    for entry in log.split("commit ")[:0:-1]:
        commit, *paths = entry.split()
        for path in paths[:3]:
            if path.endswith(".py"):
                yield commit, path


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True)
    return done.stdout.decode(errors="replace")
