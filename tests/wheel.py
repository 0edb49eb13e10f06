"""The wheel alone: built, installed in an empty environment, and asked outside of the tree.

`python tests/wheel.py` keeps nothing. First the cache alone, with numpy and nothing else; then
the server with what the wheel's own metadata requires, linked from this environment and nothing
more of it, for which the default model must have been fetched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import Distribution, distribution, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from support.server_process import server_process

ROOT = Path(__file__).parents[1]
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
    "max_tokens": 16,
    "temperature": 0,
}


def build(folder: Path) -> Path:
    """The wheel, built with the tools of this environment."""
    flags = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder: Path, *what: Path | str) -> Path:
    """The scripts of a new environment, in which pip has installed what it was asked to."""
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *what], check=True)
    return folder / "bin"


def use_core_alone(wheel: Path, folder: Path) -> None:
    """The life of a request, with the wheel and numpy installed and nothing else."""
    scripts = install(folder, "--no-deps", wheel, f"numpy=={version('numpy')}")
    names = subprocess.check_output([scripts / "pip", "list", "--format", "freeze"], text=True)
    installed = {line.partition("==")[0] for line in names.splitlines()}
    assert installed - {"pip", "setuptools"} == {"prefixcache", "numpy"}, installed
    subprocess.run([scripts / "python", "-I", ROOT / "tests" / "core_alone.py"], check=True)


def link_requirements(site: Path) -> None:
    """Links what the wheel in `site` requires, and what that requires, out of this environment."""
    (wheel,) = Distribution.discover(path=[str(site)], name="prefixcache")
    unread, linked = [*(wheel.requires or ())], set[str]()
    while unread:
        requirement = Requirement(unread.pop())
        if requirement.name in linked or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        linked.add(requirement.name)
        found = distribution(requirement.name)
        unread += found.requires or ()
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(found.locate_file(name))


@contextmanager
def serving(scripts: Path, folder: Path) -> Generator[str, None, None]:
    """The address of a server that sees nothing of this tree."""
    command = [scripts / "prefixcache", "serve", "--port", "0"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PREFIXCACHE_"))}
    with server_process(command, folder / "log", cwd=folder, env=clean) as server:
        yield server.address
        server.process.terminate()
        assert server.end() == 0


def ask(address: str) -> tuple[str, int]:
    """The answer, and how many tokens of the question were cached."""
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        data=json.dumps(QUESTION).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        reply: dict[str, Any] = json.load(response)
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["message"]["content"], cached


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        use_core_alone(wheel, folder / "core")
        scripts = install(folder / "environment", "--no-deps", wheel)
        site = next(folder.glob("environment/lib/python*/site-packages"))
        link_requirements(site)
        assert not {"torch", "transformers"} & {path.name for path in site.iterdir()}
        with serving(scripts, folder) as address:
            (first, cold), (second, warm) = ask(address), ask(address)
    print(f"{first!r}: {cold} tokens cached, then {warm}")
    assert "Tokyo" in first
    assert first == second
    assert cold == 0 < warm


if __name__ == "__main__":
    main()
