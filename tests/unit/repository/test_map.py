"""ARCHITECTURE.md is true: its paths exist, and "Where a change goes" names all that must change.

Where a change can be tried without a build, it is made in a copy of the package, in the files that
the row names and in no others, and a process checks that it works.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python/prefixcache"
MAP = (ROOT / "ARCHITECTURE.md").read_text()
CHANGES = MAP.split("\n## Where a change goes\n")[1].split("\n## ")[0]
TABLE = [line.split(" | ") for line in CHANGES.splitlines() if line.startswith("| a")]
ROWS = {row[0].removeprefix("| "): re.findall(r"`([^`]+)`", row[1]) for row in TABLE}

# What is added: the text, and the one before which it goes.
METHOD = '''
    @endpoint("/made_up")
    def made_up(self, text: str) -> str:
        """Returns the text."""
        return text

'''
ROUTER = """
def made_up_router() -> Router:
    router = Router()
    router.get("/made_up_for_clients")(lambda: "hello")
    return router


"""
REGISTRATION = """
    from prefixcache.server.cache.probe import made_up_router
    app.include_router(made_up_router())
"""
ADDITIONS = {
    "a flag": {
        "config/engine_parts/cache_config.py": (
            '    made_up: PositiveInt = flag(7, "A made-up number.", "Cache")\n',
            "    block_size: Annotated[PositiveInt, Le(MAX_BLOCK_SIZE)] = flag(",
        )
    },
    "an admin operation": {"engine/control.py": (METHOD, "    @property\n    def is_paused(self)")},
    "a client endpoint": {
        "server/cache/probe.py": (ROUTER, "def probe_router("),
        "server/app.py": (REGISTRATION, "    app.include_router(probe_router("),
        "server/http/access.py": ('        "/made_up_for_clients",\n', '        "/detokenize",'),
    },
    "a model family": {
        "config/families/llama.py": (
            '    "MadeUpForCausalLM": Family(model_type="a", gguf=GgufRow(architecture="made")),\n',
            '    "ArceeForCausalLM": ',
        )
    },
}
CHECKS = {
    "a flag": """
from prefixcache.cli.main import app
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.flags import leaves
(option,) = [one for one in app.commands["serve"].params if one.name == "made_up"]
assert option.opts == ["--made-up"] and "made-up number" in option.help
assert "made_up" in leaves(EngineConfig)
""",
    "an admin operation": """
from starlette.testclient import TestClient
from prefixcache.engine.control import Control
from prefixcache.server.admin.admin import add_commands
from prefixcache.server.http.routes import Router
from prefixcache.server.openapi import DescribedApp
async def run(command, given):
    return command(None, **given)
app, router = DescribedApp(title="", version=""), Router()
add_commands(router, Control.endpoints(), run)
app.include_router(router)
assert TestClient(app).post("/made_up?text=hello").json() == "hello"
""",
    "a client endpoint": """
from unittest.mock import MagicMock
from starlette.testclient import TestClient
from prefixcache.server.app import client_app, guard
from prefixcache.server.http.access import AccessRules
from prefixcache.server.jobs.context import Lifecycle
from prefixcache.server.options.limits import ServerLimits
app = client_app(MagicMock(), MagicMock())
rules = AccessRules(api_keys=("client",), admin_api_keys=("administrator",))
guard(app, rules, lifecycle=Lifecycle(), limits=ServerLimits(), strict=False)
ask = TestClient(app, base_url="http://localhost").get
assert ask("/made_up_for_clients", headers={"Authorization": "Bearer client"}).json() == "hello"
assert ask("/made_up_for_clients").status_code == 401
""",
    "a model family": """
from prefixcache.config.model_config import ModelConfig
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
sizes |= dict(num_attention_heads=4, max_position_embeddings=128)
config = ModelConfig.from_hf({"architectures": ["MadeUpForCausalLM"], **sizes})
assert config.num_layers == 2
from prefixcache.models.gguf.folder import check_metadata
check_metadata("general.architecture", "made")
""",
}
TRY_ALL = """
import json, sys, traceback
problems = {}
for thing, code in json.load(sys.stdin).items():
    try:
        exec(code, {})
        problems[thing] = ""
    except Exception:
        problems[thing] = traceback.format_exc()
print(json.dumps(problems))
"""
# Things that are there already, and what every place that must know them says.
TRACES = {
    "a KV cache group": r'(?:Self|GroupSpec)::SlidingWindow|tuple\[Literal\["sliding_window"\]',
    "an eviction policy": r'(?:Policy|Self)::ReuseQueue\b|^    ReuseQueue,|\["lru", "reuse-queue"',
}


def place(name: str) -> Path:
    return ROOT / name if (ROOT / name).exists() else PACKAGE / name


def test_every_path_on_the_map_exists() -> None:
    names = re.findall(r"`([\w.-]+(?:/[\w.-]*)+|\w+\.py[i]?)`", MAP)
    assert len(names) > 40
    assert [name for name in names if not place(name).exists()] == []


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What does not work in a copy of the package with all additions; one process tries them."""
    folder = tmp_path_factory.mktemp("changed")
    copy = folder / "prefixcache"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for files in ADDITIONS.values():
        for name, (text, before) in files.items():
            old = (copy / name).read_text()
            assert old.count(before) == 1, (name, before)
            (copy / name).write_text(old.replace(before, text + before))
    done = subprocess.run(
        [sys.executable, "-c", TRY_ALL],
        input=json.dumps(CHECKS),
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("thing", ADDITIONS)
def test_a_change_needs_the_files_of_its_row_alone(thing: str, problems: dict[str, str]) -> None:
    assert sorted(ROWS[thing]) == sorted(ADDITIONS[thing])
    assert problems[thing] == ""


@pytest.mark.parametrize("thing", TRACES)
def test_a_row_names_all_places_that_know_such_a_thing(thing: str) -> None:
    sources = [*ROOT.glob("rust/*/src/**/*.rs"), *PACKAGE.rglob("*.py"), *PACKAGE.glob("*.pyi")]
    found = {
        file
        for file in sources
        if file.name not in ("models.rs", "schedules.rs")
        and re.search(TRACES[thing], without_tests(file.read_text()), re.MULTILINE)
    }
    assert found == set(map(place, ROWS[thing]))


def without_tests(code: str) -> str:
    return re.sub(r"//.*", "", code).split("\n#[cfg(test)]\nmod tests")[0]
