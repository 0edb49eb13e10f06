"""The command `prefixcache`: serve, generate, download, bench.

What is heavy is imported by the command that needs it, so that help comes at once.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from prefixcache.bench.command import bench
from prefixcache.config import DEFAULT_MODEL
from prefixcache.exceptions import ConfigError, PrefixCacheError
from prefixcache.help_text import GroupedCommand

if TYPE_CHECKING:
    from prefixcache.config import EngineConfig
    from prefixcache.engine.build import BuiltEngine
    from prefixcache.sampling_params import SamplingParams
    from prefixcache.token_ids import TokenIds

app = typer.Typer(
    name="prefixcache",
    help="An LLM server around a prefix KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=GroupedCommand)(bench)

_SERVER = "Server"
_ACCESS = "Access"
_MODEL = "Model"
_SCHEDULING = "Scheduling"
_CACHE = "Cache"

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", rich_help_panel=_MODEL, help="Alias, folder, GGUF file or hub id."),
]
RevisionOption = Annotated[
    str | None, typer.Option(rich_help_panel=_MODEL, help="Branch, tag or commit of a hub id.")
]
DtypeOption = Annotated[
    str, typer.Option(rich_help_panel=_MODEL, help="auto, bfloat16 or float32.")
]
DeviceOption = Annotated[str, typer.Option(rich_help_panel=_MODEL, help="auto, cpu or cuda.")]
LogLevelOption = Annotated[
    str,
    typer.Option(
        rich_help_panel=_SERVER,
        help="debug, info, warning or error; debug shows what the cache does.",
    ),
]


def main() -> None:
    """The entry point of the command."""
    app()


def _show_version(asked: bool) -> None:
    if asked:
        from prefixcache import __version__

        typer.echo(f"prefixcache {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None: ...


@app.command(cls=GroupedCommand)
def serve(
    model_argument: ModelArgument = None,
    host: Annotated[
        str, typer.Option(rich_help_panel=_SERVER, help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(rich_help_panel=_SERVER, help="Port; 0 takes a free one.", min=0, max=65535),
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_SERVER, help="Name for clients; may be given several times."),
    ] = None,
    drain_seconds: Annotated[
        int,
        typer.Option(
            rich_help_panel=_SERVER,
            help="Time for open answers to end when the server stops.",
            min=0,
        ),
    ] = 10,
    limit_concurrency: Annotated[
        int,
        typer.Option(
            rich_help_panel=_SERVER, help="Most connections at once; more get 503.", min=1
        ),
    ] = 2048,
    timeout_keep_alive: Annotated[
        int,
        typer.Option(
            rich_help_panel=_SERVER,
            help="Seconds that a connection stays open without a request.",
            min=1,
        ),
    ] = 5,
    timeout_read: Annotated[
        int,
        typer.Option(
            rich_help_panel=_SERVER,
            help="Seconds for a request's head to come, and each part of its body.",
            min=1,
        ),
    ] = 20,
    log_level: LogLevelOption = "info",
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_ACCESS,
            envvar="PREFIXCACHE_API_KEY",
            help="Key that clients must send; may be given several times.",
        ),
    ] = None,
    admin_api_key: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_ACCESS,
            envvar="PREFIXCACHE_ADMIN_API_KEY",
            help="Key for control, statistics and metrics; may be given several times.",
            show_default="this machine alone, and nobody with --api-key",
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_ACCESS,
            help="Name that clients may call the server by, as *.example.com; may be given several "
            "times.",
            show_default="addresses, localhost, --host and the machine's name",
        ),
    ] = None,
    public_metrics: Annotated[
        bool,
        typer.Option(
            "--public-metrics", rich_help_panel=_ACCESS, help="Let everybody read /metrics."
        ),
    ] = False,
    allowed_model_dirs: Annotated[
        list[Path] | None,
        typer.Option(
            rich_help_panel=_ACCESS,
            help="Folder that new weights may come from; may be given several times.",
            show_default="anywhere",
        ),
    ] = None,
    model: ModelOption = None,
    revision: RevisionOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    seed: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="For requests without a seed of their own.")
    ] = 0,
    max_model_len: Annotated[
        int | None, typer.Option(rich_help_panel=_MODEL, help="Most tokens of a sequence.")
    ] = None,
    attention: Annotated[
        str, typer.Option(rich_help_panel=_MODEL, help="Attention backend.")
    ] = "auto",
    batch_invariant: Annotated[
        bool | None,
        typer.Option(
            rich_help_panel=_MODEL,
            help="Answers whose bits do not depend on the batch.",
            show_default="on for a CPU, off for CUDA",
        ),
    ] = None,
    enforce_eager: Annotated[
        bool, typer.Option(rich_help_panel=_MODEL, help="Run without CUDA graphs.")
    ] = False,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_MODEL, help="Share of a GPU's memory to use, 0.9 by default."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(rich_help_panel=_SCHEDULING, help="Most sequences of a step.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(rich_help_panel=_SCHEDULING, help="Most tokens of a step.")
    ] = None,
    max_step_ms: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_SCHEDULING,
            help="Most milliseconds of a step while answers are under way; 0 sets no limit.",
            show_default="250 on a CPU, 0 on CUDA",
        ),
    ] = None,
    scheduling_policy: Annotated[
        str,
        typer.Option(
            rich_help_panel=_SCHEDULING,
            help="fcfs serves in order of arrival; priority lets clients choose who is first.",
        ),
    ] = "fcfs",
    max_queue: Annotated[
        int,
        typer.Option(
            rich_help_panel=_SCHEDULING,
            help="Most requests that wait; more get a 503 with Retry-After. One with many prompts "
            "counts once for every --max-num-seqs of them. 0 sets no limit.",
            min=0,
        ),
    ] = 512,
    block_size: Annotated[
        int | None, typer.Option(rich_help_panel=_CACHE, help="Tokens of a cache block.")
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks",
            "--num-gpu-blocks-override",
            rich_help_panel=_CACHE,
            help="Blocks of the cache.",
        ),
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-memory",
            "--kv-cache-memory-bytes",
            rich_help_panel=_CACHE,
            help="Memory of the cache instead of --num-blocks, as 2GiB or in bytes.",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(rich_help_panel=_CACHE, help="Reuse the keys and values of equal beginnings."),
    ] = True,
    share_in_flight: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_CACHE, help="Wait for blocks that another request is computing."
        ),
    ] = True,
    merge_duplicate_blocks: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_CACHE,
            help="Keep one of several blocks that were filled with the same.",
        ),
    ] = True,
    global_cache_hit_threshold: Annotated[
        float,
        typer.Option(
            rich_help_panel=_CACHE,
            help="Requests with a smaller share of cached tokens end at once; 0 ends none.",
        ),
    ] = 0.0,
) -> None:
    """Serve a model to OpenAI clients."""
    flags = {
        "model": model_argument or model,
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "seed": seed,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_step_ms": max_step_ms,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "enable_prefix_caching": enable_prefix_caching,
        "share_in_flight": share_in_flight,
        "merge_duplicate_blocks": merge_duplicate_blocks,
        "global_cache_hit_threshold": global_cache_hit_threshold,
        "gpu_memory_utilization": gpu_memory_utilization,
        "batch_invariant": batch_invariant,
        "attention": attention,
        "enforce_eager": enforce_eager,
    }
    with _errors_shown():
        _set_up_logging(log_level)
        _check_keys_are_set()
        _check_one_of("--scheduling-policy", scheduling_policy, ("fcfs", "priority"))
        flags["kv_cache_memory"] = parse_size(kv_cache_memory)
        from prefixcache.server.access import AccessRules
        from prefixcache.server.model_dirs import ModelDirs
        from prefixcache.server.serve import ServeOptions
        from prefixcache.server.serve import serve as run_server

        options = ServeOptions(
            host=host,
            port=port,
            names=tuple(served_model_name or ()),
            rules=AccessRules(
                api_keys=tuple(api_key or ()),
                admin_api_keys=tuple(admin_api_key or ()),
                allowed_hosts=tuple(allowed_hosts or ()),
                public_metrics=public_metrics,
            ),
            model_dirs=ModelDirs(allowed_model_dirs or ()),
            priorities=scheduling_policy == "priority",
            max_queue=max_queue,
            drain_seconds=drain_seconds,
            limit_concurrency=limit_concurrency,
            keep_alive_seconds=timeout_keep_alive,
            read_seconds=timeout_read,
        )
        run_server(lambda: _engine_config(flags), options)


@app.command(cls=GroupedCommand)
def generate(
    prompt: Annotated[
        str, typer.Argument(help="What the model goes on with, or with --chat answers.")
    ],
    model: ModelOption = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Ask as a user in a chat, rather than go on with the text."),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message of the chat; implies --chat.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of likely tokens.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of likely tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least share of the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.")] = None,
    revision: RevisionOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    log_level: LogLevelOption = "warning",
) -> None:
    """Go on with a text in the terminal, or with --chat answer it."""
    flags = {"model": model, "revision": revision, "dtype": dtype, "device": device}
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    with _errors_shown():
        _set_up_logging(log_level)
        built = _build({**flags, "max_num_seqs": 1})
        _stream(built, _prompt_ids(built, prompt, system, chat), _sampling_params(built, sampling))


@app.command(cls=GroupedCommand)
def download(
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    revision: RevisionOption = None,
) -> None:
    """Fetch a model, so that later starts need no network."""
    from prefixcache.models.hub import resolve_model

    with _errors_shown():
        typer.echo(resolve_model(model_argument or model or DEFAULT_MODEL, revision))


def parse_size(text: str | None) -> int | None:
    """Bytes of a size such as "2GiB", "1.5 GB" or "1000000"; "2G" counts as "2GiB".

    Raises `ConfigError` for anything else.
    """
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"kv_cache_memory must be a size as 2GiB or 500MB, got {text!r}.")
    number, unit, binary = match.groups()
    decimal = unit is not None and not binary and text.strip().upper().endswith("B")
    factor = 1 if unit is None else (1000 if decimal else 1024) ** _POWERS[unit.upper()]
    return int(float(number) * factor)


def _engine_config(flags: dict[str, Any]) -> EngineConfig:
    from prefixcache.engine.build import config_from_flags

    return config_from_flags(**flags)


def _build(flags: dict[str, Any]) -> BuiltEngine:
    from prefixcache.engine.build import build
    from prefixcache.models.hub import resolve_model

    config = _engine_config(flags)
    return build(config, resolve_model(config.model, config.revision))


def _prompt_ids(built: BuiltEngine, prompt: str, system: str | None, chat: bool) -> TokenIds:
    tokenizer = built.tokenizer
    template = tokenizer.chat_template
    if not chat and system is None:
        return tokenizer.encode(prompt)
    if template is None:
        raise ConfigError("This model has no chat template; leave --chat and --system out.")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode(template.render(messages), add_special_tokens=False)


def _sampling_params(built: BuiltEngine, given: dict[str, Any]) -> SamplingParams:
    from prefixcache.sampling_params import SamplingParams

    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**built.model.generation.sampling_options(), **chosen})


def _stream(built: BuiltEngine, prompt: TokenIds, params: SamplingParams) -> None:
    from prefixcache.request import Request

    engine = built.engine
    engine.add_request(Request(request_id="0", prompt_token_ids=prompt, params=params))
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                raise PrefixCacheError(output.error)
            typer.echo(output.text, nl=False)
    typer.echo()


def _set_up_logging(level: str) -> None:
    _check_one_of("--log-level", level, ("debug", "info", "warning", "error"))
    logging.basicConfig(level=logging.WARNING, format=_LOG_FORMAT, datefmt="%H:%M:%S")
    logging.getLogger("prefixcache").setLevel(level.upper())


def _check_keys_are_set() -> None:
    """An empty variable would start an open server for somebody who wanted a closed one."""
    for name in ("PREFIXCACHE_API_KEY", "PREFIXCACHE_ADMIN_API_KEY"):
        if not os.environ.get(name, "key").strip():
            raise ConfigError(f"{name} is set but empty. Give it a key, or unset it.")


def _check_one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}.")


@contextmanager
def _errors_shown() -> Generator[None, None, None]:
    """Errors that are raised on purpose become one line and exit status 1."""
    try:
        with suppress(BrokenPipeError):
            yield
    except PrefixCacheError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
