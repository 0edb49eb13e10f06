"""The shapes whose FlashInfer kernels are tried, and the build of those that are not prebuilt."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from record import Row

from prefixcache.runner.torch.attention.base import AttentionSpec
from prefixcache.runner.torch.attention.flashinfer_plan import needs_tensor_cores

PREBUILT_CASES: tuple[dict[str, Any], ...] = (
    {"num_heads": 28, "num_kv_heads": 4, "head_dim": 128},
    {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
)
# FlashInfer compiles these, for minutes.
COMPILED_CASES: tuple[dict[str, Any], ...] = (
    {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64},
    {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "sliding_window": 37},
    {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "softcap": 30.0},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "sliding_window": 512},
)
KERNELS = "kernels.tar.xz"


def spec_of(case: dict[str, Any]) -> AttentionSpec:
    """The attention of a case."""
    return AttentionSpec(scale=case["head_dim"] ** -0.5, **case)


def modules_of(spec: AttentionSpec, *, hopper: bool) -> list[tuple[Any, ...]]:
    """What FlashInfer's wrappers look modules up by: the kind, and the arguments of its maker.

    The kind is a prefill's backend, or "plain" for the decode without tensor cores.
    """
    dtypes = (torch.bfloat16,) * 3 + (torch.int32,)
    uses = (spec.sliding_window is not None, spec.softcap is not None)
    arguments = (*dtypes, spec.head_dim, spec.head_dim, 0, *uses)
    prefill = ("fa3" if hopper else "fa2", *arguments, False)
    decode = ("fa2", *arguments, False) if needs_tensor_cores(spec) else ("plain", *arguments)
    return [prefill, decode]


def build_all(*, hopper: bool) -> Iterator[Row]:
    """Compiles what no case has yet, side by side, and puts it where prebuilt kernels lie.

    One that fails does not end the others.
    """
    from flashinfer.jit import env

    begun = time.perf_counter()
    env.FLASHINFER_JIT_DIR.mkdir(parents=True, exist_ok=True)
    missing = [spec for spec in _jit_specs(hopper) if not spec.is_aot]
    for spec in missing:
        spec.write_ninja()
    together = env.FLASHINFER_JIT_DIR / "together.ninja"
    together.write_text("".join(f"subninja {spec.ninja_path}\n" for spec in missing))
    subprocess.run(["ninja", "-k", "0", "-f", together], check=False, cwd=env.FLASHINFER_JIT_DIR)
    seconds = time.perf_counter() - begun
    for spec in missing:
        row: Row = {"section": "jit_build", "what": spec.name, "value": seconds}
        compiled = spec.jit_library_path.exists()
        if compiled:
            # From its own folder FlashInfer would compile it again: another ninja has built it.
            spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(spec.jit_library_path, spec.aot_path)
        yield row | {"unit": "s for all of them", "ok": compiled}


def keep_all(folder: Path) -> Iterator[Row]:
    """Packs all kernels that were prebuilt or compiled as the next `pack.sh` wants them."""
    from flashinfer.jit import env

    found = {
        library.stem: library
        for place in (env.FLASHINFER_JIT_DIR, env.FLASHINFER_AOT_DIR)
        for library in sorted(place.glob("*/*.so"))
    }
    archive = folder / KERNELS
    with tarfile.open(archive, "w:xz") as packed:
        for name, library in found.items():
            packed.add(library, f"aot/{name}/{name}.so")
    mib = archive.stat().st_size / 2**20
    yield {"section": "jit_keep", "what": f"{len(found)} kernels", "value": mib, "unit": "MiB"}


def _jit_specs(hopper: bool) -> list[Any]:
    """FlashInfer's build descriptions of all cases, each once."""
    from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.page import gen_page_module

    specs = {"page": gen_page_module()}
    for case in (*PREBUILT_CASES, *COMPILED_CASES):
        for kind, *arguments in modules_of(spec_of(case), hopper=hopper):
            if kind == "plain":
                spec = gen_batch_decode_module(*arguments)
            else:
                spec = gen_batch_prefill_module(kind, *arguments)
            specs[spec.name] = spec
    return list(specs.values())
