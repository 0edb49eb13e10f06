"""The README's promises, links and anchors, code on every page, the pages of the site."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml
from click.testing import CliRunner

from prefixcache.cli.main import app
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.flags import leaves
from prefixcache.server.options.serve_options import ServeOptions
from support.code_blocks import Block, blocks

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
FOLDERS = ("docs", "benches", "deploy", "examples", "rust", "release")
PAGES = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))])
PAGES = [page for page in PAGES if "target" not in page.parts]
BLOCKS = [block for page in PAGES for block in blocks(page)]
OUTPUT = ("text", "json")
LINK = re.compile(r"(?:\]\(|src(?:set)?=\")([^()\s\"]+)")
QUESTIONS = ("what", "for whom", "not for whom", "how fast", "install")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, and those that are written."""
    text = page.read_text()
    body = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = set(re.findall(r'<a id="([^"]+)"', text))
    seen: Counter[str] = Counter()
    for title in re.findall(r"^#+ (.*)$", body, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def test_local_links_and_anchors_exist() -> None:
    links = [
        (page, link) for page in PAGES for link in LINK.findall(without_code(page.read_text()))
    ]
    assert len(links) > 300
    broken = []
    for page, target in links:
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = (page.parent / path) if path else page
        is_page = file.suffix == ".md"
        if not file.exists() or (anchor and is_page and anchor not in anchors(file)):
            broken.append((page.relative_to(ROOT), target))
    assert broken == []


def test_paths_of_pages_in_code_exist() -> None:
    """Messages and comments that name a page, and its anchor."""
    suffixes = (".py", ".pyi", ".rs", ".yaml", ".toml", ".service")
    roots = [ROOT / name for name in ("python", "rust", "examples", "deploy", "benches", "tests")]
    files = [f for root in roots for f in root.rglob("*") if f.suffix in suffixes]
    named_page = re.compile(r"(?<![\w/])(docs/[\w/-]+\.md)(?:#([\w-]+))?")
    broken = []
    for file in files:
        for name, anchor in named_page.findall(file.read_text()):
            page = ROOT / name
            if not page.exists() or (anchor and anchor not in anchors(page)):
                broken.append(f"{file.relative_to(ROOT)}: {name}#{anchor}")
    assert broken == []


def sentence(name: str) -> str:
    """What follows the marker, up to the first full stop before white space."""
    head = "\n".join(README.read_text().splitlines()[:50])
    (text,) = re.findall(rf"<!-- {name} --> (.+?[.:])(?=\s)", head, re.DOTALL)
    return " ".join(text.split())


def test_the_readme_is_short_and_answers_five_questions_first() -> None:
    assert len(README.read_text().splitlines()) <= 120
    answers = {name: sentence(name) for name in QUESTIONS}
    assert all(20 < len(answer) < 200 for answer in answers.values()), answers
    assert "server" in answers["what"]
    assert "GPU" in answers["not for whom"]
    assert re.search(r"\d\.\d\d .* llama\.cpp", answers["how fast"])
    (target,) = re.findall(r"`make (\w+)`", answers["install"])
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_numbers_of_pages_are_those_of_their_rows(page: ModuleType) -> None:
    rows = {row.id: row for row in page.settings()[0]}
    pages = (README, ROOT / "docs/guides/several-tokens.md")
    # Bullets and rows of tables, with what follows them.
    claims = re.findall(
        r"^[-|]((?:(?!^[-|]).)*?)<!-- rows: ([\w ]+) -->",
        "\n".join(path.read_text() for path in pages),
        re.MULTILINE | re.DOTALL,
    )
    assert len(claims) == 5
    for text, named in claims:
        said = " ".join(rows[one].said(page.read(rows[one].record)) for one in named.split())
        numbers = re.findall(r"\b\d+\.\d+(?!B)\b", text)
        assert numbers or named.startswith("A1")
        missing = [number for number in numbers if not re.search(rf"\b{number}\b", said)]
        assert missing == [], text


def test_speeds_of_the_tutorial_are_those_of_its_rows(page: ModuleType) -> None:
    rows = {row.id: row for row in page.settings()[0]}
    text = (ROOT / "docs/tutorials/cpu-server.md").read_text()
    speeds = re.findall(r"\| ([\d.]+) tok/s \| \[(\w+)\]", text)
    assert len(speeds) == 3
    for speed, name in speeds:
        row = rows[name]
        assert page.number(row.results(page.read(row.record))[0].ours) == speed


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benches"))
        yield importlib.import_module("page")


def test_the_extras_of_the_start_page_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = text.split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    extras = set(re.findall(r"^(\w+) = ", listed, re.MULTILINE))
    table = (ROOT / "docs/index.md").read_text().split("| extra |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == extras
    assert {f"[{extra}]" for extra in extras} == set(re.findall(r"`(\[\w+\])`", README.read_text()))


def test_every_block_of_code_has_a_language() -> None:
    assert {block.language for block in BLOCKS} == {*OUTPUT, "python", "sh", "yaml", "rust"}
    for page in PAGES:
        text = page.read_text()
        assert not re.search(r"(?:\A|\n\n)```\n.*?^```$", text, re.MULTILINE | re.DOTALL), page
        num_blocks = sum(block.page == page for block in BLOCKS)
        assert num_blocks == len(re.findall(r"^```\w+$", text, re.MULTILINE)), page
        if page.parent == ROOT or ROOT / "docs" in page.parents:
            assert not re.search(r"^    (?:curl|make|pip|prefixcache) ", text, re.MULTILINE), page


def of(*languages: str) -> pytest.MarkDecorator:
    chosen = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=str)


@of("json", "yaml")
def test_data_can_be_read(block: Block) -> None:
    if block.language == "json":
        json.loads(block.code)
    else:
        assert yaml.safe_load(block.code).keys() <= {*leaves(EngineConfig), *leaves(ServeOptions)}


@of("python")
def test_python_compiles_and_its_imports_exist(block: Block) -> None:
    """Blocks without the mark of a fragment also run, in tests/e2e/docs/test_docs_code.py."""
    tree = compile(
        block.code, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("prefixcache"):
            home = importlib.import_module(str(node.module))
            assert all(hasattr(home, name.name) for name in node.names)
            assert find_spec(str(node.module)) is not None


@of("sh")
def test_commands_of_the_shell_exist(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The syntax of bash, options of ours, targets of make, scripts; what runs nowhere says why."""
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    monkeypatch.setattr("prefixcache.server.serve.serve", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (file,) = [block.code for block in BLOCKS if block.code.startswith("# server.yaml")]
    Path("server.yaml").write_text(file)
    for line in block.lines():
        words = [word for word in shlex.split(line, comments=True) if word]
        given = list(itertools.takewhile(re.compile(r"\w+=").match, words))
        words = words[len(given) :]
        if not words:
            continue
        runs = any(words[: len(one)] == one for one in RUN)
        assert runs or block.why is not None, f"no test runs {line}"
        if words[:2] == ["prefixcache", "serve"]:
            env = dict(one.split("=", 1) for one in given)
            result = CliRunner(env=env).invoke(app, words[1:])
            assert result.exit_code == 0, result.stderr
        elif words[0] == "prefixcache":
            check_command(words[1:])
        elif words[0] == "make":
            assert words[1] in targets
        elif words[0] == "python3" and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists()


# `serve` reads its configuration here, targets of make are what CI runs, and tests/wheel.py
# installs; tests/e2e/docs/test_docs_code.py runs the others.
RUN = [["make"], ["pip"], ["curl"], ["echo"]] + [
    ["prefixcache", name] for name in ("serve", "explain", "generate", "replay")
]


def check_command(words: list[str]) -> None:
    """Parses a command line without running it; values are not read."""
    command: click.Command = app
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    assert command is not app, words
    # A command keeps the help option that its first context makes.
    context = click.Context(command, parent=click.Context(app, **app.context_settings))
    command.make_parser(context).parse_args(words)


def test_the_site_has_every_page_and_every_option(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/site"))
        site = importlib.import_module("pages")
    site.write(tmp_path)
    made = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.md")}
    nav = yaml.safe_load((ROOT / "docs/site/mkdocs.yml").read_text())["nav"]
    assert made == set(named(nav))
    options = (tmp_path / "reference/flags.md").read_text()
    for option in ("--model", "--kv-cache-memory", "--api-key", "--eviction-policy"):
        assert f"`{option}`" in options
    assert "`--max-num-seqs`\n:   " in options
    assert "PREFIXCACHE_MAX_NUM_SEQS" in options
    assert "## `POST /v1/chat/completions`" in (tmp_path / "reference/http.md").read_text()
    metrics = (tmp_path / "reference/metrics.md").read_text()
    texts = [page.read_text() for page in PAGES]
    said = {name for text in texts for name in re.findall(r"`prefixcache:\w+`", text)}
    assert len(said) >= 5
    assert {name for name in said if name not in metrics} == set()
    for file in tmp_path.rglob("*.md"):
        for target in LINK.findall(without_code(file.read_text())):
            path = target.partition("#")[0]
            assert re.match(r"[a-z]+:|$", path) or (file.parent / path).exists(), (file, target)


def named(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for one in nav:
            yield from named(one)
    elif isinstance(nav, dict):
        for one in nav.values():
            yield from named(one)
