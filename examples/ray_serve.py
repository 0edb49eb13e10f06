r"""A deployment of one's own around the replicas of `prefixcache serve-ray`.

    pip install '.[ray]'
    serve run examples.ray_serve:application

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"model": "small", "messages": [{"role": "user", "content": "Hello"}]}'

Any OpenAI client works: `openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")`.
Ray Serve places, scales and heals the replicas; prompts go where their prefix is cached.
"""

from prefixcache.config.engine_config import EngineConfig
from prefixcache.ray_serve.application import build_application
from prefixcache.ray_serve.ray_options import RayOptions
from prefixcache.server.options.serve_options import ServeOptions

application = build_application(
    EngineConfig.from_flags(model="smollm2-135m-instruct", kv_cache_memory="256MiB"),
    ServeOptions(served_model_name=("small",)),
    # From one to four replicas, by the requests that run and wait.
    RayOptions(max_replicas=4, target_ongoing_requests=8, replica_cpus=0.5),
)
