"""The Prometheus form of an engine's counters."""

from __future__ import annotations

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.metrics import Gauges, Histogram, LabelledMetrics, Metrics


def gauges() -> Gauges:
    return Gauges(
        num_running=2,
        num_waiting=3,
        cache_usage=0.25,
        num_preemptions=4,
        num_queried_tokens=100,
        num_hit_tokens=64,
        num_window_missed_tokens=48,
        cached_blocks=11,
        free_blocks=12,
        evictions=6,
        pinned_blocks=5,
        pins=9,
        demotions=3,
        pinned_evictions=1,
        pinned_hits=7,
    )


def samples(metrics: Metrics | LabelledMetrics) -> dict[str, float]:
    text = generate_latest(metrics).decode()
    return {  # without those of the process
        sample.name
        + "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if ":" in sample.name
    }


def test_names_are_those_of_vllm_under_our_prefix() -> None:
    metrics = Metrics(gauges)
    metrics.finished["stop"] += 2
    expected = {
        "prefixcache:num_requests_running": 2,
        "prefixcache:num_requests_waiting": 3,
        "prefixcache:kv_cache_usage_perc": 0.25,
        "prefixcache:num_preemptions_total": 4,
        "prefixcache:prompt_tokens_total": 0,
        "prefixcache:generation_tokens_total": 0,
        "prefixcache:prefix_cache_queries_total": 100,
        "prefixcache:prefix_cache_hits_total": 64,
        "prefixcache:window_missed_tokens_total": 48,
        "prefixcache:cached_blocks": 11,
        "prefixcache:free_blocks": 12,
        "prefixcache:evictions_total": 6,
        "prefixcache:pinned_blocks": 5,
        "prefixcache:pins_total": 9,
        "prefixcache:demotions_total": 3,
        "prefixcache:pinned_evictions_total": 1,
        "prefixcache:pinned_hits_total": 7,
        "prefixcache:request_success_total{finished_reason=stop}": 2,
        "prefixcache:time_to_first_token_seconds_count": 0,
        "prefixcache:inter_token_latency_seconds_count": 0,
        "prefixcache:e2e_request_latency_seconds_count": 0,
        "prefixcache:iteration_tokens_total_count": 0,
        "prefixcache:step_overhead_seconds_count": 0,
    }
    found = samples(metrics)
    assert {name: found[name] for name in expected} == expected


def test_every_sample_gets_the_labels_next_to_its_own() -> None:
    metrics = Metrics(gauges)
    metrics.finished["stop"] += 2
    labelled = LabelledMetrics(metrics, model_name="tiny")
    for _ in range(2):
        found = samples(labelled)
        assert all("{model_name=tiny}" in name for name in found)
        assert found["prefixcache:num_requests_running{model_name=tiny}"] == 2
        key = "prefixcache:request_success_total{finished_reason=stop}{model_name=tiny}"
        assert found[key] == 2
        assert found["prefixcache:iteration_tokens_total_count{model_name=tiny}"] == 0
    assert len(found) == len(samples(metrics))
    assert not any("model_name" in name for name in samples(metrics))


# Those of vLLM 0.11 that its own dashboard shows and that mean something here.
_OF_VLLM = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "request_success_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("e2e_request_latency_seconds_bucket", "request_queue_time_seconds_sum"),
    *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    "iteration_tokens_total_bucket",
    *("request_inference_time_seconds_sum", "request_time_per_output_token_seconds_bucket"),
    *("request_params_max_tokens_bucket", "request_prefill_kv_computed_tokens_sum"),
    *("prompt_tokens_cached_total", "cache_config_info", "engine_sleep_state"),
}


def test_dashboards_of_vllm_find_its_names_and_its_labels() -> None:
    metrics = Metrics(gauges)
    metrics.finished["stop"] += 1
    found = samples(LabelledMetrics(metrics, prefix="vllm", model_name="tiny"))
    names = {name.partition("{")[0] for name in found}
    assert {f"vllm:{name}" for name in _OF_VLLM} <= names
    assert all(name.startswith("vllm:") for name in names)
    assert all("{engine=0}" in name and "{model_name=tiny}" in name for name in found)
    assert all(name.startswith("prefixcache:") for name in samples(metrics))


def test_histogram_buckets_are_cumulative_and_bounds_belong_to_them() -> None:
    histogram = Histogram("x", "X.", (1, 2.5))
    for value in (0.5, 1, 2, 99):
        histogram.observe(value)
    family = histogram.family()
    found = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    assert found == {
        ("prefixcache:x_bucket", "1.0"): 2,
        ("prefixcache:x_bucket", "2.5"): 3,
        ("prefixcache:x_bucket", "+Inf"): 4,
        ("prefixcache:x_count", None): 4,
        ("prefixcache:x_sum", None): 102.5,
    }


def test_engines_do_not_share_counters_and_the_global_registry_knows_none() -> None:
    first, second = Metrics(gauges), Metrics(gauges)
    first.prompt_tokens += 7
    assert samples(first)["prefixcache:prompt_tokens_total"] == 7
    assert samples(second)["prefixcache:prompt_tokens_total"] == 0
    assert b"prefixcache" not in generate_latest(REGISTRY)
