"""Prometheus pages of several replicas as one: each family once, with the samples of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merged_metrics(pages: Sequence[str]) -> str:
    """One page with all samples, in the order of the first page that has a family.

    Replicas tell theirs apart by a label.
    """
    families: dict[str, Metric] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
    return generate_latest(_Families(families.values())).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
