"""What deploy/ asks of the server is there: metrics of dashboards and alerts, and options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.flags import leaves
from prefixcache.diagnostics.evictions import EvictionReader
from prefixcache.engine.residency import BlockResidency
from prefixcache.metrics import DiskCounts, FileCounts, Gauges, LabelledMetrics, Metrics, PoolGauges
from prefixcache.server.options.serve_options import ServeOptions

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DOCS = DEPLOY.parent / "docs" / "guides" / "deploy.md"
_NAME = re.compile(r"prefixcache:(\w+)")


def served_names() -> set[str]:
    """All names that /metrics can show, without their prefix."""
    metrics = Metrics(_gauges)
    metrics.finished["stop"] += 1
    metrics.more.append(_residency().families)
    text = generate_latest(LabelledMetrics(metrics, model_name="x")).decode()
    families = text_string_to_metric_families(text)
    names = [sample.name for family in families for sample in family.samples]
    return {match[1] for name in names if (match := _NAME.fullmatch(name))}


def _gauges() -> Gauges:
    kinds = {"pool": PoolGauges, "disk": DiskCounts, "file": FileCounts}
    parts: Any = {
        name: kind(**dict.fromkeys(kind.__dataclass_fields__, 1)) for name, kind in kinds.items()
    }
    return Gauges(num_below_threshold={"request": 1}, **parts)


def _residency() -> BlockResidency:
    cache = _cache_without_evictions()
    return BlockResidency(cache, EvictionReader(cache))


def _cache_without_evictions() -> mock.Mock:
    evictions = np.zeros(0, dtype=[("cause", "u1"), ("age", "f8"), ("idle", "f8")])
    gaps = ([0] * 22, 0.0)
    core = mock.Mock(
        take_evictions=lambda _: evictions, reuse_gaps=lambda: gaps, missed_evictions=0
    )
    return mock.Mock(core=core)


def options() -> set[str]:
    return {*leaves(EngineConfig), *leaves(ServeOptions)}


def expressions(tree: Any) -> list[str]:
    """All `expr` and `query` in a file of Grafana or Prometheus."""
    if isinstance(tree, list):
        return [text for item in tree for text in expressions(item)]
    if not isinstance(tree, dict):
        return []
    own = [tree[key] for key in ("expr", "query") if isinstance(tree.get(key), str)]
    return own + [text for value in tree.values() for text in expressions(value)]


@pytest.mark.parametrize("file", [DASHBOARD, ALERTS], ids=lambda file: file.name)
def test_metrics_that_are_asked_for_exist(file: Path) -> None:
    asked = {
        name
        for text in expressions(yaml.safe_load(file.read_text()))
        for name in _NAME.findall(text)
    }
    assert asked
    assert asked <= served_names()


def test_every_metric_of_ours_that_counts_trouble_is_on_the_dashboard() -> None:
    shown = {
        name
        for text in expressions(json.loads(DASHBOARD.read_text()))
        for name in _NAME.findall(text)
    }
    assert {
        "queue_full_refusals_total",
        "num_preemptions_total",
        "window_missed_tokens_total",
        "disk_damaged_blocks_total",
        "disk_failures_total",
        "kv_file_failed_checks_total",
        "kv_file_failed_syncs_total",
    } <= shown


def test_what_to_do_stands_in_the_docs_for_every_alert() -> None:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    documented = set(re.findall(r"^\| `(Prefixcache\w+)` \|", DOCS.read_text(), re.MULTILINE))
    assert alerts == documented


def test_options_in_the_examples_exist() -> None:
    pods = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "prefixcache.yaml").read_text()))
    (deployment,) = [one for one in pods if one["kind"] == "Deployment"]
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    arguments = [argument.removeprefix("--").partition("=")[0] for argument in server["args"]]
    assert {name.replace("-", "_") for name in arguments} <= options()
    assert yaml.safe_load((DEPLOY / "systemd" / "server.yaml").read_text()).keys() <= options()
