"""What administrators do to a running engine, at the paths of vLLM and SGLang.

A command of `engine.control.Control` that is marked as an endpoint is one; its parameters are the
options. They are read from the query string, as vLLM's clients send them, and from a JSON body.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import ValidationError, create_model
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from prefixcache.engine.weight_versions import check_tag
from prefixcache.exceptions import wrong
from prefixcache.server.admin.model_dirs import ModelDirs
from prefixcache.server.http.body import (
    Fields,
    RequestFields,
    invalid_field,
    parse_fields,
    parse_object,
    prepared,
    read_body,
)
from prefixcache.server.http.routes import Form, Raw, Router, describes, describes_command
from prefixcache.server.jobs.context import tell_unknown
from prefixcache.server.options.limits import MAX_PATH_CHARACTERS
from prefixcache.types.modes import InFlightMode

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.engine.control import Control
    from prefixcache.engine.stats import PrefixHashInfo
    from prefixcache.kv.elastic import ResizeStatus

T = TypeVar("T")
# The path of a command of `Control`, and the command, still without a control.
Command = tuple[str, Callable[..., Any]]
Resize = Callable[..., Awaitable["ResizeStatus"]]
# `update_weights` for whoever has the control.
UpdateWeights = Callable[..., Awaitable[tuple[int, "PrefixHashInfo"]]]
RunCommand = Callable[[Callable[..., Any], dict[str, Any]], Awaitable[Any]]

describes_stats = describes("The cache in numbers.", dict)
describes_resizing = describes("How far a change of the cache's size is.", dict)
# What answers tell of new weights: see `weights_fields`.
NEW_WEIGHTS: dict[str, Form] = {
    "weight_version": Raw({"type": ["integer", "string"]}),
    "weights_name": str,
    "root_hash": str,
}


class UpdateWeightsRequest(RequestFields):
    """Options of `POST /update_weights_from_disk`; `abort_all_requests` is mode "abort"."""

    no_effect = frozenset({"recapture_cuda_graph", "token_step", "torch_empty_cache"})
    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        "flush_cache": (True,),
        "is_async": (False,),
        "keep_pause": (False,),
        "load_format": ("auto", "safetensors"),
    }

    max_lengths: ClassVar[dict[str, int]] = {
        "model_path": MAX_PATH_CHARACTERS,
        "revision": MAX_PATH_CHARACTERS,
    }

    model_path: str | None = None
    revision: str | None = None
    mode: InFlightMode | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None

    def chosen_mode(self) -> InFlightMode:
        """What happens to requests in flight. Raises `InvalidRequestError` for two answers."""
        if not self.abort_all_requests:
            return self.mode or "recompute"
        if self.mode not in (None, "abort"):
            raise wrong("mode", f"is {self.mode!r}, but abort_all_requests is true")
        return "abort"


class SleepFields(RequestFields):
    """What `POST /sleep` cannot do: give up a part that `level` does not name."""

    refused: ClassVar[dict[str, tuple[object, ...]]] = {"tag": (), "tags": ()}


class ResizeRequest(RequestFields):
    """Options of `POST /prefix_cache/resize`: one of the two."""

    memory: int | float | str | None = None
    num_blocks: int | None = None


def admin_router(engine: AsyncEngine, model_dirs: ModelDirs) -> Router:
    """The endpoints, for one engine."""
    router = Router()

    async def resize_cache(**options: Any) -> ResizeStatus:
        return await engine.run(lambda control: control.resize(**options))

    async def update(**options: Any) -> tuple[int, PrefixHashInfo]:
        return await engine.run(partial(update_weights, **options))

    add_commands(
        router,
        engine.control.endpoints(),
        lambda command, given: engine.run(lambda control: command(control, **given)),
    )
    add_changes(router, resize_cache, update, model_dirs)

    @router.get("/prefix_cache/stats")
    @describes_stats
    async def prefix_cache_stats() -> dict[str, Any]:
        return dataclasses.asdict(engine.control.prefix_cache_stats())

    @router.get("/prefix_cache/resize")
    @describes_resizing
    async def resize_status() -> dict[str, Any]:
        return dataclasses.asdict(engine.control.resize_status)

    return router


def add_changes(
    router: Router, resize_cache: Resize, update: UpdateWeights, model_dirs: ModelDirs
) -> None:
    """The endpoints of changes that are more than a command.

    `resize_cache` does what `Control.resize` does, `update` what `update_weights` does.
    """

    @router.post("/prefix_cache/resize")
    @describes_command(ResizeRequest)
    async def resize(request: Request) -> Response:
        """Another size of the KV cache: 202 while requests hold blocks above its new end."""
        fields = await read_options(request, ResizeRequest)
        status = await resize_cache(memory=fields.memory, num_blocks=fields.num_blocks)
        code = HTTPStatus.OK if status.is_done else HTTPStatus.ACCEPTED
        return JSONResponse(dataclasses.asdict(status), status_code=code)

    @router.post("/update_weights_from_disk")
    @describes_command(UpdateWeightsRequest, {"success": bool, "message": str, **NEW_WEIGHTS})
    async def update_weights_from_disk(request: Request) -> dict[str, Any]:
        """Serves the weights of another folder or file, of the same model."""
        fields = await read_options(request, UpdateWeightsRequest)
        path, mode = required("model_path", fields.model_path), fields.chosen_mode()
        with model_dirs.checked(path) as folder:
            version, now = await update(
                path=folder, mode=mode, revision=fields.revision, tag=fields.weight_version
            )
        return {
            "success": True,
            "message": f"The weights are those of {path}.",
            **weights_fields(fields.weight_version or version, now),
        }


def weights_fields(version: int | str, now: PrefixHashInfo) -> dict[str, Any]:
    """What an answer tells of new weights."""
    return {
        "weight_version": version,
        "weights_name": now.weights_name,
        "root_hash": now.root_hash,
    }


def update_weights(
    control: Control, path: str, mode: InFlightMode, revision: str | None, tag: str | None
) -> tuple[int, PrefixHashInfo]:
    """The new version, and the hashes under it, returned before another update can follow."""
    check_tag(tag)
    checkpoint = control.weights.check_path(path, revision)

    def update() -> tuple[int, PrefixHashInfo]:
        version = control.weights.update_weights_from_folder(checkpoint, mode, weight_version=tag)
        return version, control.prefix_hash_info()

    return control.run_between_steps(update)


def options_of(command: Callable[..., Any]) -> type[RequestFields]:
    """The options of a command that is an endpoint, each of which may be left out or null."""
    types: dict[str, Any] = {
        parameter.name: (parameter.annotation | None, None) for parameter in _parameters(command)
    }
    base = SleepFields if command.__name__ == "sleep" else RequestFields
    return create_model(command.__name__, __base__=base, **types)


def _parameters(command: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those behind `self`."""
    return list(inspect.signature(command, eval_str=True).parameters.values())[1:]


def add_commands(router: Router, commands: Iterable[Command], run: RunCommand) -> None:
    """An endpoint for each of the commands; `run` gives one its arguments."""
    for path, command in commands:
        router.post(path)(_endpoint(run, command))


def _endpoint(run: RunCommand, command: Callable[..., Any]) -> Callable[..., Any]:
    """What calls a command with a request's options; those left out or null keep their defaults."""
    parameters, options = _parameters(command), options_of(command)
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]

    @describes_command(options)
    async def call(request: Request) -> Response:
        fields = await read_options(request, options)
        given = fields.model_dump(include=set(options.model_fields), exclude_none=True)
        for name in needed:
            required(name, given.get(name))
        result = await run(command, given)
        return Response() if result is None else JSONResponse(result)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    return call


def required(name: str, value: T | None) -> T:
    """The value of an option. Raises `InvalidRequestError` where it is left out."""
    if value is None:
        raise wrong(name, "is required")
    return value


async def read_options(request: Request, model: type[Fields]) -> Fields:
    """Options of both places; the body's win. Raises `InvalidRequestError` naming a wrong one."""
    given = _query(request, model)
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        given.update(await asyncio.to_thread(parse_object, await read_body(request)))
    fields = parse_fields(given, model)
    tell_unknown(request, fields)
    return fields


def _query(request: Request, model: type[Fields]) -> dict[str, Any]:
    """The query's options, each text read as its field's type wants it."""
    query = request.query_params
    lists = {name for name, field in model.model_fields.items() if _takes_list(field.annotation)}
    texts = {name: text for name, text in query.items() if name not in lists}
    try:
        given = prepared(model).model_validate_strings(texts).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise invalid_field(error) from None
    return given | {name: query.getlist(name) for name in lists if name in query}


def _takes_list(annotation: object) -> bool:
    choices = (annotation, *get_args(annotation))
    return any(get_origin(choice) in (list, Sequence) for choice in choices)
