"""`/metrics` of a server, and the reference of its names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.serving import metric, served_folder

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| `([\w:]+)` \| (\w+) \| ([^|]*) \|", re.MULTILINE)
OF_ALL = {"model_name", "le"}


@pytest.fixture(scope="module")
def reference() -> dict[str, set[str]]:
    """The labels of each name in the reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/site"))
        rows = ROW.findall(importlib.import_module("pages").metrics())
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, _, labels in rows}


def shown(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Each sample as it is queried: its name, without a histogram's ending, and its labels."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = family.name if family.type == "histogram" else sample.name
            yield name, frozenset(sample.labels.keys() - OF_ALL)


async def test_the_reference_has_the_names_and_labels_of_a_server(
    tiny_checkpoint: Callable[..., Path], reference: dict[str, set[str]], tmp_path: Path
) -> None:
    options = {"diagnostics_memory": 1 << 20, "kv_cache_metrics": True, "speculate": "prompt"}
    disk = {"disk_cache_memory": 1 << 20, "disk_cache_dir": str(tmp_path)}
    async with served_folder(tiny_checkpoint(), **options, **disk) as (client, _):
        await _use(client)
        text = (await client.get("/metrics")).text
        await client.post("/sleep?level=2")
        asleep = (await client.get("/metrics")).text
    found = set(shown(text))
    assert len(found) > 70
    assert {(name, labels) for name, labels in found if reference.get(name) != labels} == set()
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert f"process_{name}" in dict(found)
    assert metric(text, "prompt_tokens_cached_total") == metric(text, "prefix_cache_hits_total") > 0
    assert metric(text, "request_prefill_kv_computed_tokens_sum") == (
        metric(text, "prompt_tokens_total") - metric(text, "prompt_tokens_cached_total")
    )
    assert metric(text, "request_params_max_tokens_sum") == 3 * 4 + 1
    assert metric(text, "request_time_per_output_token_seconds_count") == 3
    assert metric(text, "request_inference_time_seconds_count") == 4
    assert 'cache_config_info{block_size="16",enable_prefix_caching="True"' in text
    for page, state in ((text, "awake"), (asleep, "discard_all")):
        states = re.findall(r'engine_sleep_state\{.*sleep_state="(\w+)"\} 1.0', page)
        assert states == [state]


async def _use(client: httpx.AsyncClient) -> None:
    """Four answers: two of one request, one that hits, and one of a single token."""
    body = {"model": "tiny", "prompt": "one two three " * 20, "ignore_eos": True}
    for options in ({"n": 2, "max_tokens": 4}, {"max_tokens": 4}, {"max_tokens": 1}):
        answer = await client.post("/v1/completions", json=body | options)
        answer.raise_for_status()
