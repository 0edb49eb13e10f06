"""The application of Ray Serve: an ingress, and replicas that compute."""

# Of Ray's decorators.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from prefixcache.ray_serve.ingress import Ingress
from prefixcache.ray_serve.ray_options import RayOptions
from prefixcache.ray_serve.replica import EngineReplica
from prefixcache.ray_serve.replicas.commands import COMMANDS, REPLICAS, Commands
from prefixcache.server.options.serve_options import ServeOptions

if TYPE_CHECKING:
    from prefixcache.config.engine_config import EngineConfig

ROUTER = "prefixcache.ray_serve.router:PrefixRequestRouter"
# Engines bound their queues themselves, and tell clients what is full; Ray's bound never acts.
_NO_BOUND = 2**20


def build_application(
    config: EngineConfig,
    options: ServeOptions | None = None,
    ray_options: RayOptions | None = None,
    *,
    router: str = ROUTER,
) -> Application:
    """What `ray.serve.run` runs. `router` is the class that chooses replicas, by its path."""
    # Others take arguments of their own.
    kwargs = {"block_size": config.cache.block_size} if router == ROUTER else {}
    options, ray_options = options or ServeOptions(), ray_options or RayOptions()
    replicas = _deployment(EngineReplica).options(
        name=REPLICAS,
        max_ongoing_requests=_NO_BOUND,
        ray_actor_options={
            "num_cpus": ray_options.replica_cpus,
            "num_gpus": ray_options.replica_gpus,
        },
        request_router_config=RequestRouterConfig.model_validate(
            {
                "request_router_class": router,
                "request_router_kwargs": kwargs,
            }
        ),
        **_num_replicas(ray_options),
    )
    ingress = _deployment(serve.ingress()(Ingress)).options(
        name="Ingress",
        num_replicas=ray_options.num_ingress,
        max_ongoing_requests=options.limit_concurrency,
        ray_actor_options={"num_cpus": 0},
    )
    commands_deployment = _deployment(Commands).options(
        name=COMMANDS, max_ongoing_requests=_NO_BOUND, ray_actor_options={"num_cpus": 0}
    )
    timeout = ray_options.command_timeout
    commands = commands_deployment.bind(timeout)
    engines = replicas.bind(config, options, commands, timeout)
    return ingress.bind(config, options, ray_options, engines, commands)


def _deployment(cls: Any) -> Deployment:
    return cast("Deployment", serve.deployment(cls))


def _num_replicas(options: RayOptions) -> dict[str, Any]:
    if options.max_replicas is None:
        return {"num_replicas": options.num_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.fewest,
            initial_replicas=max(options.fewest, min(options.num_replicas, options.max_replicas)),
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests,
        )
    }
