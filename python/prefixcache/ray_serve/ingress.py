"""The deployment that takes HTTP requests: the server's endpoints, without an engine."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from prefixcache.config.flags import shown_values
from prefixcache.config.logs import set_up_logging
from prefixcache.models.hub import read_config, resolve_model
from prefixcache.ray_serve.app import create_ingress_app
from prefixcache.ray_serve.replicas.commands import CommandClient
from prefixcache.ray_serve.replicas.replica_set import ReplicaSet
from prefixcache.ray_serve.routed_engine import RoutedEngine
from prefixcache.server.admin.model_dirs import ModelDirs
from prefixcache.server.serve import access_rules, served_model, server_limits
from prefixcache.text.grammar.grammars import Grammars
from prefixcache.text.grammar.vocabulary import vocabulary_of
from prefixcache.text.tokenization.chat_template import read_template
from prefixcache.text.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.applications import Starlette

    from prefixcache.config.engine_config import EngineConfig
    from prefixcache.ray_serve.ray_options import RayOptions
    from prefixcache.ray_serve.replicas.replica_state import ReplicaState
    from prefixcache.server.options.serve_options import ServeOptions


class Ingress:
    """Checks requests, renders and encodes prompts, and streams what the replicas answer."""

    async def __init__(
        self,
        config: EngineConfig,
        options: ServeOptions,
        ray_options: RayOptions,
        replicas: DeploymentHandle[Any],
        commands: DeploymentHandle[Any],
    ) -> None:
        set_up_logging(options.log_level, options.log_format, shows_prompts=options.log_prompts)
        folder = await asyncio.to_thread(resolve_model, config.model, config.revision)
        model = read_config(config.model, folder)
        tokenizer = Tokenizer.from_folder(folder, read_template(config.chat_template))
        about = cast("dict[str, Any]", await replicas.about.remote())
        names = ("batch_invariant", "dtype", "kv_dtype", "activations")
        facts = {name: about[name] for name in names}
        grammars = Grammars(partial(vocabulary_of, tokenizer, model))
        state = cast("ReplicaState", await commands.state.remote())
        client = CommandClient(commands, state)
        longest, block_size = about["max_model_len"], about["prefix_hash"]["block_size"]
        self._engine = RoutedEngine(
            replicas, client, grammars, max_model_len=longest, block_size=block_size
        )
        self._app = create_ingress_app(
            self._engine,
            ReplicaSet(replicas),
            client,
            served_model(config, options, tokenizer, model, folder, **facts),
            rules=access_rules(options),
            model_dirs=ModelDirs(options.allowed_model_dirs),
            limits=server_limits(options),
            flags=shown_values(config.on(about["device"]))
            | shown_values(options)
            | shown_values(ray_options),
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Ray Serve after the constructor."""
        return self._app
