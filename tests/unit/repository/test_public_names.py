"""The public surface, name by name, against `tests/snapshots/public_names.txt`.

A name that goes or changes its form breaks somebody. Where that is meant, write the file again with
`PREFIXCACHE_WRITE_SNAPSHOTS=1 pytest tests/unit/repository/test_public_names.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fakes.fake_engine import make_engine
from prefixcache.cli.main import app
from support.serving import served_folder

SNAPSHOT = Path(__file__).parents[2] / "snapshots/public_names.txt"

# Of a control: what only the package itself uses.
INSIDE = {"adjust_pool", "endpoints", "run_between_steps", "weights"}


def of_python() -> Iterator[str]:
    for module in map(importlib.import_module, ("prefixcache", "prefixcache.core")):
        for name in module.__all__:
            value = getattr(module, name)
            yield f"python {module.__name__}.{name}{signature(value)}"
            for member in sorted(dir(value)) if inspect.isclass(value) else ():
                if not member.startswith("_"):
                    found = signature(getattr(value, member))
                    yield f"python {module.__name__}.{name}.{member}{found}"


def of_control() -> Iterator[str]:
    """What `LLM.control` and `AsyncEngine.control` give: operations, and the engine's state."""
    control = make_engine(max_blocks=65)[0].control
    for member in dir(control):
        if not member.startswith("_") and member not in INSIDE:
            yield f"python prefixcache.LLM.control.{member}{signature(getattr(control, member))}"


def signature(value: Any) -> str:
    """Names and kinds of what it takes; defaults and types are not spelled alike everywhere."""
    if not callable(value):
        return ""
    if dataclasses.is_dataclass(value):
        return f"({', '.join(field.name for field in dataclasses.fields(value))})"
    try:
        found = inspect.signature(value)
    except ValueError:
        return "(...)"
    kept = [
        one.replace(annotation=one.empty, default=one.empty) for one in found.parameters.values()
    ]
    return str(found.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def of_commands() -> Iterator[str]:
    for name, command in sorted(app.commands.items()):
        for parameter in command.params:
            yield f"command {name} {' '.join((*parameter.opts, *parameter.secondary_opts))}"


def of_http(schema: Mapping[str, Any]) -> Iterator[str]:
    """Endpoints with their parameters, and all members of their bodies and answers."""
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parameters = [one["name"] for one in operation.get("parameters", ())]
            yield f"http {method.upper()} {path} {' '.join(parameters)}".rstrip()
            for place in ("requestBody", "responses"):
                found = {".".join(one) for one in members(operation.get(place, {}), schema, ())}
                if found:
                    yield f"http {method.upper()} {path} {place}: {' '.join(sorted(found))}"


def members(
    part: Any, schema: Mapping[str, Any], within: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Names of members in a part of a schema, with those that they are in."""
    if isinstance(part, list):
        for one in part:
            yield from members(one, schema, within)
    if not isinstance(part, dict) or len(within) > 6:
        return
    if "$ref" in part:
        yield from members(named(part["$ref"], schema), schema, within)
    for name, one in part.items():
        if name == "properties":
            for member, value in one.items():
                yield (*within, member)
                yield from members(value, schema, (*within, member))
        elif name not in ("example", "examples"):
            yield from members(one, schema, within)


def named(reference: str, schema: Any) -> Any:
    for name in reference.removeprefix("#/").split("/"):
        schema = schema[name]
    return schema


def of_metrics(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            yield f"metric {line.removeprefix('# TYPE ')}"


async def test_no_public_name_goes_or_changes(tiny_checkpoint: Callable[[], Path]) -> None:
    async with served_folder(tiny_checkpoint()) as (client, _):
        metrics = (await client.get("/metrics")).text
        schema = (await client.get("/openapi.json")).json()
    found = sorted(
        {*of_python(), *of_control(), *of_commands(), *of_http(schema), *of_metrics(metrics)}
    )
    if os.environ.get("PREFIXCACHE_WRITE_SNAPSHOTS"):
        SNAPSHOT.write_text("\n".join(found) + "\n", encoding="utf-8")
    assert found == SNAPSHOT.read_text(encoding="utf-8").splitlines()
