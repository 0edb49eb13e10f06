"""`prefixcache serve-ray` whose replicas follow the load within seconds instead of minutes."""

from __future__ import annotations

import sys
from functools import partial

from ray.serve.config import AutoscalingConfig

from prefixcache.cli.main import main
from prefixcache.ray_serve import application

application.AutoscalingConfig = partial(  # type: ignore[misc, assignment]
    AutoscalingConfig,
    upscale_delay_s=1,
    downscale_delay_s=2,
    look_back_period_s=2,
    metrics_interval_s=0.5,
)
sys.exit(main())
