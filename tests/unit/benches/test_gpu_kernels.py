"""The kernels that a GPU run builds first: those that are asked for later, and kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flashinfer")

import flashinfer

from fakes.native_flashinfer import Module, replace_native_modules
from prefixcache.runner.torch.attention.flashinfer import FlashInferAttention
from reference.paged_attention import SlowSequence, batch_of

BENCH = Path(__file__).parents[3] / "benches" / "gpu"
# Makes what each of its files would build, but for soft caps.
_NINJA = """#!{python}
import sys
from pathlib import Path
manifest = Path(sys.argv[sys.argv.index("-f") + 1])
for line in manifest.read_text().splitlines():
    folder = Path(line.removeprefix("subninja ")).parent
    if "logits_cap_True" not in folder.name:
        (folder / f"{{folder.name}}.so").write_text("compiled")
    print("built", folder.name)
sys.exit(1)
"""
_BUILD = """
import json, sys
from pathlib import Path
from compiled import build_all, keep_all
rows = [*build_all(hopper=True), *keep_all(Path(sys.argv[1]))]
again = list(build_all(hopper=True))
Path(sys.argv[1], "report.json").write_text(json.dumps([rows, again]))
"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of `benches/gpu`, whose folder is in the path for as long."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("record", "compiled"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import compiled

    for name in ("record", "compiled"):
        monkeypatch.delitem(sys.modules, name)
    return compiled


@pytest.mark.parametrize("hopper", [True, False])
def test_what_is_built_first_is_what_the_modes_ask_for(
    hopper: bool, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[tuple[Any, ...]] = set()

    def make(*wanted: Any) -> Any:
        asked.add(wanted)
        return Module(wanted[0])

    kernels = replace_native_modules(monkeypatch, make)
    for case in compiled.COMPILED_CASES:
        asked.clear()
        spec = compiled.spec_of(case)
        for invariant in (False, True):
            attention = FlashInferAttention(
                spec,
                dtype=torch.bfloat16,
                device=torch.device("cpu"),
                kernels=kernels,
                batch_invariant=invariant,
                hopper=hopper,
                workspace_bytes=1 << 24,
            )
            shape = attention.kv_shape(3, 16, spec.num_kv_heads, spec.head_dim)
            attention.bind([torch.zeros(shape, dtype=torch.bfloat16)])
            sequences = [SlowSequence(4, 1, (1,), True), SlowSequence(0, 5, (2,), False)]
            attention.plan(batch_of(sequences, 16))
        assert asked == set(compiled.modules_of(spec, hopper=hopper))


@pytest.mark.slow
def test_kernels_are_built_at_once_and_packed_as_the_next_prebuilt_ones(tmp_path: Path) -> None:
    tools, packages = tmp_path / "tools", tmp_path / "packages"
    tools.mkdir()
    (tools / "ninja").write_text(_NINJA.format(python=sys.executable))
    (tools / "ninja").chmod(0o755)
    shutil.copytree(BENCH / "prebuilt", packages)
    package = packages / "flashinfer_jit_cache"
    (package / "version.txt").write_text(flashinfer.__version__)
    (package / "aot" / "page").mkdir(parents=True)
    (package / "aot" / "page" / "page.so").write_text("prebuilt")
    paths = [packages, BENCH, Path(__file__).parents[3] / "python"]
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, tmp_path],
        env=os.environ
        | {
            "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "CUDA_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (*rows, kept), again = json.loads((tmp_path / "report.json").read_text())
    failed = {row["what"] for row in rows if not row["ok"]}
    assert len(rows) == len({row["what"] for row in rows})
    assert "page" not in {row["what"] for row in rows}
    assert failed == {row["what"] for row in rows if "logits_cap_True" in row["what"]} != set()
    # What was built is prebuilt from then on.
    assert {row["what"] for row in again} == failed
    with tarfile.open(tmp_path / "kernels.tar.xz") as archive:
        names = set(archive.getnames())
    built = {row["what"] for row in rows} - failed | {"page"}
    assert names == {f"aot/{name}/{name}.so" for name in built}
    assert kept["what"] == f"{len(built)} kernels"
