"""What keys depend on, and when the tier refuses to run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from engine import Engine, configure, kv_cache_config, transfer_config, write_model
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.plugins import load_general_plugins
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from prefixcache_vllm import SUPPORTED_VERSIONS, refuse_version
from prefixcache_vllm.namespace import namespace


def namespace_of(model: Path, folder: Path, weights: str | None = None, **changes: Any) -> bytes:
    config = configure(model, transfer_config(folder / "kv"), **changes)
    return namespace(
        config, build_offloading_config(config, kv_cache_config()), folder / "notes.json", weights
    )


def test_every_change_that_changes_bytes_has_keys_of_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = namespace_of(model, tmp_path)
    assert first == namespace_of(model, tmp_path)
    other = write_model(tmp_path / "other", b"others.")
    seen = {
        "unchanged": first,
        "weights": namespace_of(other, tmp_path),
        "named weights": namespace_of(model, tmp_path, "a name"),
        "dtype": namespace_of(model, tmp_path, dtype="bfloat16"),
        "cache dtype": namespace_of(model, tmp_path, cache_dtype="fp8"),
        "length": namespace_of(model, tmp_path, max_model_len=128),
        "rope": namespace_of(model, tmp_path, hf_overrides={"rope_theta": 1e6}),
        "hash": namespace_of(model, tmp_path, prefix_caching_hash_algo="sha256_cbor"),
    }
    monkeypatch.setattr(vllm, "__version__", "0.33.7")
    seen["version"] = namespace_of(model, tmp_path)
    assert len(set(seen.values())) == len(seen), seen


def test_ranks_and_blocks_are_part_of_keys(model: Path, tmp_path: Path) -> None:
    config = configure(model, transfer_config(tmp_path / "kv"))
    offloading = build_offloading_config(config, kv_cache_config())
    cases = [
        offloading,
        replace(offloading, parallel=replace(offloading.parallel, tp_size=2)),
        replace(offloading, parallel=replace(offloading.parallel, pp_size=2)),
        replace(offloading, cache=replace(offloading.cache, blocks_per_chunk=2)),
        replace(offloading, kv_cache_layout="HND"),
        replace(offloading, groups=()),
    ]
    notes = tmp_path / "notes.json"
    assert len({namespace(config, case, notes, None) for case in cases}) == len(cases)
    moved = replace(offloading, engine_id="other", extra_config={})
    assert namespace(config, moved, notes, None) == namespace(config, offloading, notes, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "set PYTHONHASHSEED"),
        ({"load_format": "dummy"}, "They are random"),
    ],
)
def test_what_cannot_stand_for_blocks_is_refused(
    changes: dict[str, Any], said: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=said):
        namespace_of(model, tmp_path, **changes)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert namespace_of(model, tmp_path, "a name", **changes)


@pytest.mark.parametrize(
    ("field", "said"), [("lora_config", "LoRA"), ("weight_transfer_config", "trainer")]
)
def test_weights_that_change_while_it_runs_are_refused(
    field: str, said: str, model: Path, tmp_path: Path
) -> None:
    config = configure(model, transfer_config(tmp_path / "kv"))
    offloading = build_offloading_config(config, kv_cache_config())
    setattr(config, field, SimpleNamespace())
    with pytest.raises(ValueError, match=said):
        namespace(config, offloading, tmp_path / "notes.json", "a name")


def test_vllms_own_connector_is_refused(model: Path, tmp_path: Path) -> None:
    transfer = transfer_config(tmp_path / "kv", connector="OffloadingConnector")
    with pytest.raises(ValueError, match='"kv_connector": "PrefixCacheConnector"'):
        Engine(configure(model, transfer))


def test_other_versions_are_refused() -> None:
    assert refuse_version(vllm.__version__) is None
    assert [refuse_version(f"{name}.2rc1+cpu") for name in SUPPORTED_VERSIONS] == [None, None]
    for version in ("0.31.0", "0.34.0", "1.33.0", "0.330"):
        assert version in str(refuse_version(version))


def test_vllm_finds_the_tier_by_the_line_of_the_guide(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs/guides/vllm.md"
    (line,) = re.findall(r"--kv-transfer-config '(.+?)'", page.read_text(), re.DOTALL)
    (plugin,) = entry_points(group="vllm.general_plugins", name="prefixcache")
    assert callable(plugin.load())
    load_general_plugins()
    transfer = KVTransferConfig(**json.loads(line))
    assert KVConnectorFactory.get_connector_class(transfer).__name__ == "PrefixCacheConnector"
    extra = transfer.kv_connector_extra_config
    assert OffloadingSpecFactory.get_spec_cls(extra).__name__ == "TieringOffloadingSpec"
    (tier,) = extra["secondary_tiers"]
    assert SecondaryTierFactory.get_tier_class(tier).__name__ == "PrefixCacheTier"
