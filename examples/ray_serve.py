"""A deployment of one's own around the replicas of `prefixcache serve-ray`.

    pip install 'prefixcache[ray]'
    serve run examples.ray_serve:application

Ray Serve places, scales and heals the replicas; prompts go where their prefix is cached.
"""

from prefixcache.config import EngineConfig
from prefixcache.ray_serve.application import build_application
from prefixcache.ray_serve.options import RayOptions
from prefixcache.server.options import ServeOptions

application = build_application(
    EngineConfig.from_flags(model="smollm2-135m-instruct", kv_cache_memory="256MiB"),
    ServeOptions(served_model_name=("small",)),
    # From one to four replicas, by the requests that run and wait.
    RayOptions(max_replicas=4, target_ongoing_requests=8, replica_cpus=0.5),
)
