"""The words that docs/glossary.md refuses stand nowhere: docs, help, messages, comments, names.

A failure lists `file:line: word`; line 0 is the name of the file itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
GLOSSARY = ROOT / "docs/glossary.md"
SUFFIXES = frozenset(
    {".conf", ".css", ".html", ".in", ".ini", ".js", ".json", ".md", ".py", ".pyi", ".rs"}
    | {".service", ".sh", ".toml", ".yaml", ".yml"}
)
FOLDERS = (
    *("python", "rust", "tests", "benches", "docs", "deploy", "examples", "fuzz", "integrations"),
    "release",
)
OUT_OF_SCOPE = (
    "benches/record/",  # what a run wrote
    "benches/soak/",  # what a run wrote
    "docs/glossary.md",
    "fuzz/target/",
    "tests/data/",  # texts of others
    "tests/unit/repository/test_words.py",
)
# Public names that stay for those who use them.
PUBLIC = re.compile(
    r"""--widen\b|\("widen",\)|\b(?:take|missed|max)_losses\b|kv_block_losses|merge_twins"""
)

BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_")
# As names of variables and parameters they say nothing.
EMPTY_NAMES = frozenset({"ask", "found", "known", "one", "take", "whole"})
GAP = r"[\s-]+(?:(?://[/!]?|#+|\*|>)\s+)*"  # between the words of a phrase, over lines of comments


def refused() -> list[str]:
    """The words in the third column of the glossary's table."""
    rows = [line.split("|") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row[3])]


def pattern(words: list[str]) -> re.Pattern[str]:
    phrases = "|".join(GAP.join(word.split()) for word in sorted(words, key=len, reverse=True))
    return re.compile(rf"(?<![a-z])(?:{phrases})(?![a-z])")


REFUSED = pattern(refused())


def found(text: str) -> Iterator[tuple[int, str]]:
    """Refused words of `text`, each with its line, counted from 0; `a_b` and `aB` are two words."""
    spaced = BORDER.sub(" ", PUBLIC.sub("", text)).lower()
    for match in REFUSED.finditer(spaced):
        yield spaced.count("\n", 0, match.start()), " ".join(re.findall("[a-z]+", match[0]))


def sources() -> Iterator[tuple[str, Path]]:
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile", ROOT / ".ci/run"]
    for folder in FOLDERS:
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    for file in sorted(files):
        name = file.relative_to(ROOT).as_posix()
        if not name.startswith(OUT_OF_SCOPE):
            yield name, file


def test_no_refused_word_stands_anywhere() -> None:
    left = [
        f"{name}:{line}: {word}"
        for name, file in sources()
        for line, word in found(f"{name}\n{file.read_text()}")
    ]
    assert not left, "docs/glossary.md has the words to use:\n" + "\n".join(left)


def test_refused_words_are_found_in_every_form_and_others_are_left_alone() -> None:
    words = refused()
    assert len(words) > 20
    for word in words:
        parts = word.split()
        identifier = "_".join(parts)
        camel = "".join(part.title() for part in parts)
        texts = [
            f"A sentence, {word}.",
            f"{word.capitalize()} begins one.",
            f"def of_{identifier}(self):",
            f"_{identifier.upper()}_2 = 1",
            f"struct Plain{camel}Rows;",
            f"let map: HTTP{camel};",
            "/// A comment " + "\n    /// ".join(parts) + " goes on.",
            "# A comment " + "\n    # ".join(parts) + " goes on.",
        ]
        assert [[one for _, one in found(text)] for text in texts] == [[word]] * len(texts)
    assert list(found("name.py\nfirst\nsecond, anew\n")) == [(2, "anew")]
    others = """
        Duplicates, besides between twine and a widener: untold packet loss, a lost client.
        It is under the way; so, many put it aside: hand it over.
        prefixcache convert --widen bfloat16
        cache.take_losses(max_losses=8)
    """
    assert list(found(others)) == []


def empty_names(code: str) -> Iterator[tuple[int, str]]:
    """Names of `EMPTY_NAMES` that are bound, each with its line."""
    for node in ast.walk(ast.parse(code)):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
        if name in EMPTY_NAMES:
            yield node.lineno, name


def test_names_of_variables_say_what_they_hold() -> None:
    code = "for one in x: ask = 1\ndef f(known, *, whole): (found := 1)\n[take for take in x]"
    assert {name for _, name in empty_names(code)} == EMPTY_NAMES
    package = ROOT / "python/prefixcache"
    left = [
        f"{file.relative_to(package)}:{line}: {name}"
        for file in sorted(package.rglob("*.py"))
        for line, name in empty_names(file.read_text())
    ]
    assert left == []
