"""The command `prefixcache doctor`: what a report of a problem needs to say of the machine."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import click

from prefixcache.cli.command_line import Given
from prefixcache.config.checked import Checked
from prefixcache.config.flags import flag
from prefixcache.config.vllm_flags import KEY_VARIABLE
from prefixcache.exceptions import how_to_install

_NAME = re.compile(r"[\w.-]+")
_EXTRA = re.compile(r"extra *== *['\"]([\w-]+)['\"]")
_PACKAGES = ("tokenizers", "safetensors", "huggingface-hub", "gguf", "llguidance", "starlette")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(Checked):
    """How to show what was found."""

    json: bool = flag(False, "Show it as a JSON object.", "Answer")


def doctor(given: Given) -> None:
    """Show versions, kernels and what is missing.

    It loads no model and asks no network. Of environment variables it shows the names alone.
    """
    options = given.make(DoctorOptions)
    facts = {
        "machine": _machine(),
        "kernels": _kernels(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "extras": _extras(requires("prefixcache") or []),
        "settings": _settings(),
    }
    if options.json:
        click.echo(json.dumps(facts, indent=1))
        return
    for heading, values in facts.items():
        click.echo(f"{heading}:")
        for name, value in values.items():
            label = name.replace("_gib", " (GiB)")
            click.echo(f"  {label:<22}{'missing' if value is None else value}")


def _machine() -> Mapping[str, Any]:
    from prefixcache.config.machine import machine_memory
    from prefixcache.tools.bench.machine import machine_facts

    available = machine_memory()[1] / 2**30
    gpus = len([*Path("/dev").glob("nvidia[0-9]*")])
    return machine_facts() | {"memory available": f"{available:.1f} GiB", "NVIDIA GPUs": gpus}


def _kernels() -> Mapping[str, str]:
    """What a step computes with on a CPU where no flag says otherwise."""
    from prefixcache._core import Cpu
    from prefixcache.runner.threads import default_threads

    available = Cpu.available_instructions()
    return {
        "instructions": ", ".join(available),
        "chosen": f"{available[-1]} (--cpu-instructions)",
        "threads": f"{default_threads()} (--cpu-threads)",
    }


def _extras(requirements: list[str]) -> dict[str, str]:
    """For each extra its versions, or how to install what is missing."""
    needed: defaultdict[str, list[str]] = defaultdict(list)
    for line in requirements:
        name = _NAME.match(line)
        for extra in _EXTRA.findall(line):
            needed[extra] += [name[0]] if name else []
    return {extra: _extra(extra, names) for extra, names in sorted(needed.items())}


def _extra(extra: str, names: list[str]) -> str:
    versions = {name: _version(name) for name in names}
    if absent := [name for name, version in versions.items() if version is None]:
        return f"missing {', '.join(absent)}: {how_to_install(extra)}"
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _settings() -> dict[str, str]:
    from prefixcache.config.home import cache_home

    names = [
        name
        for name in sorted(os.environ)
        if name.startswith(("PREFIXCACHE_", "HF_", KEY_VARIABLE))
    ]
    return {"models": str(cache_home() / "models"), "variables": " ".join(names) or "none"}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
