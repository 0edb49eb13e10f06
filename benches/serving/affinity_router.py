"""Ray's own PrefixCacheAffinityRouter over our jobs, for `replicas.py`."""

from __future__ import annotations

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.request_router import PendingRequest

from prefixcache.ray_serve.job import RoutedJob


class AffinityRouter(PrefixCacheAffinityRouter):
    """It compares texts. Here each token is a character, so texts share what prompts share."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        job = pending_request.args[0] if pending_request.args else None
        if not isinstance(job, RoutedJob):
            return ""
        return "".join(chr(0x4E00 + token) for token in job.requests[0].prompt_token_ids)
