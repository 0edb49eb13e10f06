"""Writes the pages of the site: those of docs/ and of the root, and the generated reference.

    python docs/site/pages.py target/docs

Links between pages follow them; a link to a file that is no page becomes its text and path.
Generated are the options, the metrics, the HTTP API and Python's public names, from the code.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROJECT = {
    "CONTRIBUTING.md": "tutorials/contributing.md",
    "ARCHITECTURE.md": "explanation/architecture.md",
    "BENCHMARKS.md": "benchmarks/index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "README.md": "index.md",
    "benches/traces/README.md": "benchmarks/traces.md",
    "benches/soak/report.md": "benchmarks/soak.md",
}
LINK = re.compile(r"(?P<bang>!?)\[(?P<text>[^\[\]]*)\]\((?P<to>[^()\s]+)\)")


def pages() -> dict[Path, str]:
    """Files of the repository that become pages, and their paths in the site."""
    own = {file: file.relative_to(DOCS).as_posix() for file in sorted(DOCS.rglob("*.md"))}
    bench = [*ROOT.glob("benches/results/*.md"), *ROOT.glob("benches/notes/*.md")]
    own |= {file: f"benchmarks/{file.parent.name}-{file.name}" for file in sorted(bench)}
    return own | {ROOT / name: to for name, to in PROJECT.items()}


def linked(text: str, source: Path, to: str, known: dict[Path, str]) -> str:
    """`text` of `source` with its links as from the page `to`."""

    def follow(match: re.Match[str]) -> str:
        path, _, anchor = match["to"].partition("#")
        if re.match(r"[a-z]+:", path) or not path:
            return match[0]
        target = (source.parent / path).resolve()
        if target in known:
            other = known[target]
        elif target.is_relative_to(DOCS / "img"):
            other = target.relative_to(DOCS).as_posix()
        else:
            place = target.relative_to(ROOT).as_posix()
            return match["text"] if place in match["text"] else f"{match['text']} (`{place}`)"
        here = os.path.relpath(other, Path(to).parent) + (f"#{anchor}" if anchor else "")
        return f"{match['bang']}[{match['text']}]({here})"

    return LINK.sub(follow, text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = [*head]
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def flags() -> str:
    """Each option of `serve`: a list, as a phone has no room for a table."""
    from prefixcache.cli.main import app
    from prefixcache.config.engine_config import EngineConfig
    from prefixcache.config.flags import leaves
    from prefixcache.server.options.serve_options import ServeOptions

    context = app.make_context("prefixcache", ["serve"], resilient_parsing=True)
    command = app.get_command(context, "serve")
    assert command is not None
    options = {one.name: one for one in command.params}
    groups: dict[str, list[str]] = {}
    for name, (_, field) in (leaves(EngineConfig) | leaves(ServeOptions)).items():
        if "group" not in field.metadata or name not in options:
            continue
        option: Any = options[name]
        spelled = [f"`{one}`" for one in [*option.opts, *option.secondary_opts]]
        row = f"{', '.join(spelled)}\n:   {' '.join((option.help or '').split())}\n"
        groups.setdefault(field.metadata["group"], []).append(row)
    text = """# Options

Of `serve`. Each option has a key, which is its name with `_` for `-`: `max_num_seqs` for
`--max-num-seqs`. The file of `--config` takes keys, and `LLM(...)` takes those of the engine as
keyword arguments. A variable is the key in capitals: `PREFIXCACHE_MAX_NUM_SEQS`.
"""
    for group, rows in groups.items():
        text += f"\n## {group}\n\n" + "\n".join(rows)
    return text


def metrics() -> str:
    """Each family of /metrics with its type, its own labels and its meaning."""
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    from prefixcache import metrics as of
    from prefixcache.diagnostics.room import CacheDiagnostics
    from prefixcache.engine.residency import BlockResidency
    from prefixcache.events.publisher import EventPublisher
    from prefixcache.kv.recordings.trace_writer import TraceWriter
    from prefixcache.types.modes import WeightsInfo

    parts: dict[str, Any] = {
        name: kind(**dict.fromkeys(kind.__dataclass_fields__, 0))
        for name, kind in (
            ("pool", of.PoolGauges),
            ("file", of.FileCounts),
            ("disk", of.DiskCounts),
            ("loads", of.LoadCounts),
        )
    }
    count, weights = {"x": 0}, WeightsInfo((), 0)
    config = dict.fromkeys(("block_size", "num_gpu_blocks", "enable_prefix_caching"), "")
    parts["drafts"] = of.DraftCounts(drafts=0, drafted=count, accepted=count)
    parts |= {"num_below_threshold": count, "num_stale_tokens": {1: 0}, "cache_config": config}
    gauges = of.Gauges(weights=weights, **parts)
    made = of.Metrics(lambda: gauges, of.resize_slices())
    made.finished["stop"] = 0
    core = MagicMock(missed_evictions=0, reuse_gaps=lambda: ([0] * 22, 0.0))
    made.more = [
        partial(CacheDiagnostics.families, MagicMock(miss_counts=count)),
        BlockResidency(MagicMock(core=core), MagicMock()).families,
        partial(EventPublisher.families, MagicMock()),
        partial(TraceWriter.families, MagicMock()),
    ]
    text = generate_latest(of.LabelledMetrics(made, model_name="x")).decode()
    families = text_string_to_metric_families(text)
    rows = [
        [f"`{queried_name(one)}`", one.type, own_labels(one), one.documentation] for one in families
    ]
    return METRICS + table(["name", "type", "labels", ""], sorted(rows))


METRICS = """# Metrics

Of `GET /metrics`, as they are queried; a histogram's name goes on with `_bucket`, `_sum` or
`_count`. All have the label `model_name` too, under Ray Serve `replica`, and with
`--metrics-prefix vllm` `engine`.

"""


def queried_name(family: Any) -> str:
    """The name of a family as Prometheus has it: a counter's samples have an ending."""
    return family.name + "_total" * (family.type == "counter")


def own_labels(family: Any) -> str:
    """The labels that tell samples of a family apart."""
    labels = {label for sample in family.samples for label in sample.labels}
    return ", ".join(f"`{label}`" for label in sorted(labels - {"le", "model_name"}))


def http() -> str:
    """Each endpoint and the fields of its body, from the schema that /openapi.json serves."""
    from prefixcache.engine.control import Control
    from prefixcache.server.app import create_app

    engine = MagicMock()
    engine.control.endpoints = Control.endpoints
    schema = create_app(engine, MagicMock(strict=False)).openapi()
    text = "# HTTP API\n\nFrom the schema that `/openapi.json` serves.\n"
    for path, methods in sorted(schema["paths"].items()):
        for method, operation in methods.items():
            text += f"\n## `{method.upper()} {path}`\n\n"
            text += operation.get("description") or operation.get("summary") or ""
            for body in bodies(operation, schema["components"]["schemas"]):
                rows = [[f"`{n}`", kind(one), one.get("description", "")] for n, one in body]
                text += "\n\n" + table(["field", "type", ""], rows)
            text += "\n"
    return text


def bodies(operation: dict[str, Any], schemas: dict[str, Any]) -> list[list[tuple[str, Any]]]:
    """The fields of each kind of body."""
    content = operation.get("requestBody", {}).get("content", {})
    found: list[Any] = [one["schema"] for one in content.values()]
    found = [choice for one in found for choice in one.get("anyOf", [one])]
    named = [schemas[one["$ref"].split("/")[-1]] if "$ref" in one else one for one in found]
    return [[*one["properties"].items()] for one in named if one.get("properties")]


def kind(schema: dict[str, Any]) -> str:
    """A short name of the type."""
    if "$ref" in schema:
        return schema["$ref"].split("/")[-1]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(one) for one in schema["anyOf"]))
    if schema.get("enum"):
        return ", ".join(f"`{one}`" for one in schema["enum"])
    shown = schema.get("type", "any")
    return f"list of {kind(schema['items'])}" if "items" in schema else str(shown)


def python() -> str:
    """The public names; mkdocstrings fills in their docstrings."""
    import prefixcache
    from prefixcache import core

    homes = {name: getattr(prefixcache, name) for name in prefixcache.__all__ if name[0] != "_"}
    text = "# Python API\n\n## prefixcache\n\n"
    text += "\n".join(f"::: {one.__module__}.{name}\n" for name, one in homes.items())
    text += "\n## prefixcache.core\n\n"
    return text + "\n".join(f"::: prefixcache._core.{name}\n" for name in core.__all__)


GENERATED = {"flags": flags, "metrics": metrics, "http": http, "python": python}


def write(out: Path) -> None:
    """Writes all pages into `out`, which is emptied."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(DOCS / "img", out / "img")
    (out / "assets").mkdir()
    shutil.copy(DOCS / "site/iframe-worker.js", out / "assets")
    known = pages()
    made = {f"reference/{name}.md": make() for name, make in GENERATED.items()}
    for source, to in known.items():
        if source.name != "README.md" or source.parent != ROOT:
            made[to] = linked(source.read_text(), source, to, known)
    for to, text in made.items():
        (out / to).parent.mkdir(parents=True, exist_ok=True)
        (out / to).write_text(text)
    found = {one["to"] for text in made.values() for one in LINK.finditer(text)}
    external = sorted(one for one in found if one.startswith("http"))
    print("links to elsewhere, not checked:", *external, sep="\n  ")


if __name__ == "__main__":
    # Names and texts are all that is read, so a site needs no build of the extension.
    sys.modules["prefixcache._core"] = MagicMock()
    write(Path(sys.argv[1]))
