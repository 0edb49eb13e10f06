"""Runs the application of `prefixcache serve-ray`: cluster, deployments, signals."""

# Of Ray's options.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from prefixcache.exceptions import ConfigError, FieldError
from prefixcache.ray_serve.application import build_application
from prefixcache.ray_serve.ray_internals import tell_untried
from prefixcache.ray_serve.ray_options import RayOptions
from prefixcache.server.http.listener import listening
from prefixcache.server.options.serve_options import ServeOptions
from prefixcache.server.serve import access_rules, announce_ready, warn_of_unused_variables

if TYPE_CHECKING:
    from prefixcache.config.engine_config import EngineConfig
    from prefixcache.config.model_config import ModelConfig

logger = logging.getLogger(__name__)

APPLICATION = "prefixcache"
# What Ray raises for parts of it that do not start, or not in time.
_RAY_ERRORS = (RuntimeError, TimeoutError, RayError, RayServeException)


def serve_ray(config: EngineConfig, options: ServeOptions, ray_options: RayOptions) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises `ConfigError` for what can be found wrong before a cluster is started, where there is
    none at `--address`, and where Ray's HTTP servers or the replicas do not start.
    """
    begun = time.perf_counter()
    tell_untried()
    warn_of_unused_variables(options)
    access_rules(options)
    config = with_block_size(config, _checked_model(config))
    with listening(options):  # Ray says less of a port that is in use, and later
        pass
    # Ray sets a handler of its own when it starts.
    with _cluster(ray_options), _stopped() as stopped:
        port = _start_proxies(options)
        _run(config, options, ray_options)
        seconds = time.perf_counter() - begun
        announce_ready(config.model, f"http://{options.host}:{port}", seconds, options)
        stopped.wait()
        serve.delete(APPLICATION)


def with_block_size(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The same with the blocks that replicas have for the model, in which the router counts."""
    return replace(config, cache=config.for_model(model).cache)


def _checked_model(config: EngineConfig) -> ModelConfig:
    from prefixcache.engine.build import check_weight_format
    from prefixcache.models.hub import read_config, resolve_model
    from prefixcache.text.tokenization.chat_template import read_template

    read_template(config.chat_template)
    folder = resolve_model(config.model, config.revision)
    check_weight_format(config, folder)
    return read_config(config.model, folder)


@contextmanager
def _stopped() -> Generator[threading.Event, None, None]:
    """An event that SIGINT and SIGTERM set."""
    event = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda _number, _frame: event.set()) for number in numbers]
    try:
        yield event
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _cluster(options: RayOptions) -> Generator[None, None, None]:
    """Joins the cluster at `--address`, or starts one of this machine alone and ends it."""
    common: dict[str, Any] = {"log_to_driver": True, "configure_logging": False}
    try:
        if options.address is not None:
            ray.init(address=options.address, **common)
        else:
            ray.init(
                _node_ip_address="127.0.0.1",
                include_dashboard=False,
                object_store_memory=options.ray_object_store,
                **common,
            )
    except Exception as error:  # as Ray raises for a node that takes too long to start
        if options.address is None:
            raise ConfigError(f"Ray cannot start a cluster: {error}") from error
        raise FieldError("address", f"{options.address} is no Ray cluster: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _start_proxies(options: ServeOptions) -> int:
    """Starts Ray's HTTP servers; their port, which Ray itself has not taken for another use."""
    with listening(options) as listener:
        port = listener.getsockname()[1]
    tls = options.tls
    http_options = {
        "host": options.host,
        "port": port,
        "keep_alive_timeout_s": options.timeout_keep_alive,
        "ssl_certfile": None if tls.ssl_certfile is None else str(tls.ssl_certfile),
        "ssl_keyfile": None if tls.ssl_keyfile is None else str(tls.ssl_keyfile),
    }
    try:
        serve.start(http_options=http_options)
    except _RAY_ERRORS as error:
        raise ConfigError(
            f"Ray's HTTP servers did not start: {error} If they were not ready in time, "
            "start again when the machine is less busy."
        ) from error
    return port


def _run(config: EngineConfig, options: ServeOptions, ray_options: RayOptions) -> None:
    application = build_application(config, options, ray_options)
    try:
        serve.run(application, name=APPLICATION, route_prefix="/")
    except _RAY_ERRORS as error:
        raise ConfigError(f"The replicas did not start: {error}") from error
