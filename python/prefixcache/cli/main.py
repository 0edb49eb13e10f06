"""The command `prefixcache`: serve, serve-ray, generate, download, convert, bench and others.

What is heavy is imported by the command that needs it, so that help comes at once.
"""

from __future__ import annotations

import gc
import os
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
from annotated_types import MinLen

from prefixcache import __version__
from prefixcache.cli.bench import bench, compare
from prefixcache.cli.chat import ChatOptions, chat
from prefixcache.cli.command_line import App, FlagCommand, FlagGroup, Given
from prefixcache.cli.completion import SHELLS, completion
from prefixcache.cli.doctor import DoctorOptions, doctor
from prefixcache.cli.explain import ExplainOptions, explain
from prefixcache.cli.kv_files import CACHE
from prefixcache.cli.models import MODELS
from prefixcache.cli.replay import replay
from prefixcache.cli.rerun import rerun
from prefixcache.cli.verify import verify
from prefixcache.cli.vllm_options import vllm_options
from prefixcache.config.checked import Checked, shown
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.flags import flag, leaves
from prefixcache.config.logs import LogLevel, set_up_logging
from prefixcache.exceptions import (
    ConfigError,
    FieldError,
    InvalidRequestError,
    PrefixCacheError,
    how_to_install,
)
from prefixcache.ray_serve.environment import prepare_environment
from prefixcache.ray_serve.ray_options import NOT_SERVED, RayOptions
from prefixcache.server.options.serve_options import LOG_LEVEL_HELP, ServeOptions
from prefixcache.tools.bench.bench_options import BenchOptions
from prefixcache.tools.replay.replay_options import ReplayOptions
from prefixcache.tools.verify.verify_options import VerifyOptions

if TYPE_CHECKING:
    from prefixcache.engine.build import BuiltEngine
    from prefixcache.types.sampling_params import SamplingParams
    from prefixcache.types.token_ids import TokenIds

QUANTIZABLE = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(Checked):
    """Flags of `prefixcache generate` besides the engine's; `SamplingParams` checks most."""

    prompt: str
    chat: bool = flag(False, "Answer the prompt as a chat message.", "Answer")
    system: str | None = flag(None, "System message of the chat; implies --chat.", "Answer")
    max_tokens: int = flag(256, "Most tokens of the answer.", "Answer")
    temperature: float | None = flag(None, "0 always takes the likeliest token.", "Answer")
    top_p: float | None = flag(
        None, "Sample from the likeliest tokens with this total probability.", "Answer"
    )
    top_k: int | None = flag(None, "Sample from this number of likeliest tokens.", "Answer")
    min_p: float | None = flag(
        None,
        "Sample from tokens with at least this share of the likeliest one's probability.",
        "Answer",
    )
    repetition_penalty: float | None = flag(
        None, "Penalty for tokens that occurred before; 1 is none.", "Answer"
    )
    stop: tuple[Annotated[str, MinLen(1)], ...] = flag((), "Text that ends the answer.", "Answer")
    log_level: LogLevel = flag("warning", LOG_LEVEL_HELP, "Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(Checked):
    """Flags of `prefixcache convert`: what the weights become, and where."""

    quantize: str | None = flag(
        None,
        "Format for the weight matrices, of a third to a half of bfloat16's size.",
        "Conversion",
        metavar=f"[{'|'.join(QUANTIZABLE)}]",
    )
    dequantize: Literal["bfloat16", "float32"] | None = flag(
        None,
        "Write unquantized safetensors of this type, for example from a GGUF file.",
        "Conversion",
        aliases=("widen",),
    )
    output: Path | None = flag(
        None,
        "Folder to write, which must not exist yet.",
        "Conversion",
        shown="the model's name and the format, in the current folder",
    )

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.quantize is None and self.dequantize is None:
            raise FieldError("quantize", "or --dequantize is needed: give one of the two.")
        if self.quantize is not None and self.dequantize is not None:
            raise FieldError("quantize", "excludes --dequantize: give one, not both.")
        if self.quantize is not None and self.quantize.lower() not in QUANTIZABLE:
            raise FieldError(
                "quantize",
                f"must be one of {', '.join(QUANTIZABLE)}, got {shown(self.quantize)}. Other "
                "formats, such as q4_k_m, come in GGUF files, which are served as they are.",
            )


def main() -> None:
    """The entry point of the command."""
    # numpy multiplies nothing large here, and to start its threads takes longer than to import it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    app()


def serve(given: Given) -> None:
    """Serve a model to OpenAI clients."""
    given.check(EngineConfig, ServeOptions)
    config, options = given.make(EngineConfig), given.make(ServeOptions)
    set_up_logging(
        options.log_level,
        options.log_format,
        file=options.log_file,
        shows_prompts=options.log_prompts,
    )
    gc.disable()  # what a start makes stays: to look for garbage in it took a tenth of the start
    try:
        from prefixcache.server.serve import serve as run_server

        run_server(config, options)
    finally:
        gc.enable()


def serve_ray(given: Given) -> None:
    """Serve a model by several engines under Ray.

    Each prompt goes to the engine that has its prefix cached.
    """
    given.check(EngineConfig, ServeOptions, RayOptions)
    config, options = given.make(EngineConfig), given.make(ServeOptions)
    ray_options = given.make(RayOptions)
    set_up_logging(options.log_level, options.log_format, shows_prompts=options.log_prompts)
    prepare_environment(on_this_machine_alone=ray_options.address is None)
    try:
        import_module("ray.serve")
    except ImportError as error:
        message = f"serve-ray needs Ray Serve ({error}): {how_to_install('ray')}."
        raise ConfigError(message) from None
    from prefixcache.ray_serve.ray_run import serve_ray as run_cluster

    run_cluster(config, options, ray_options)


def generate(given: Given) -> None:
    """Complete a prompt in the terminal.

    With --chat the prompt is answered as a chat message.
    """
    options = given.make(GenerateOptions)
    config = given.make(EngineConfig, max_num_seqs=1)
    set_up_logging(options.log_level, shows_prompts=True)
    _sampling_params(options, {})  # Wrong options are reported before a model is loaded.
    from prefixcache.engine.build import build
    from prefixcache.models.hub import resolve_model

    built = build(config, resolve_model(config.model, config.revision))
    params = _sampling_params(options, built.model.generation.sampling_options())
    _stream(built, _prompt_ids(built, options), params)


def download(given: Given) -> None:
    """Fetch a model for later starts offline."""
    from prefixcache.models.hub import resolve_model

    config = given.make(EngineConfig)
    click.echo(resolve_model(config.model, config.revision))


def convert(given: Given) -> None:
    """Quantize or dequantize a model's weights.

    The result is a folder that can be served.
    """
    options, config = given.make(ConvertOptions), given.make(EngineConfig)
    from prefixcache.models.conversion import convert_model

    made = convert_model(
        config.model,
        config.revision,
        options.output,
        quant_format=None if options.quantize is None else options.quantize.upper(),
        dtype=options.dequantize,
    )
    click.echo(made)


def _prompt_ids(built: BuiltEngine, options: GenerateOptions) -> TokenIds:
    tokenizer = built.tokenizer
    template = tokenizer.chat_template
    if not options.chat and options.system is None:
        return tokenizer.encode(options.prompt)
    if template is None:
        raise ConfigError("This model has no chat template; leave --chat and --system out.")
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return tokenizer.encode(template.render(messages), add_special_tokens=False)


def _sampling_params(options: GenerateOptions, defaults: dict[str, Any]) -> SamplingParams:
    from prefixcache.types.sampling_params import SamplingParams

    names = {field.name for field in fields(SamplingParams)}
    given = {name: value for name, value in asdict(options).items() if name in names}
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(**{**defaults, **chosen})
    except InvalidRequestError as error:
        field = error.param or ""
        raise FieldError(field, str(error).removeprefix(f"{field} ")) from None


def _stream(built: BuiltEngine, prompt: TokenIds, params: SamplingParams) -> None:
    from prefixcache.types.request import Request

    engine = built.engine
    engine.add_request(Request(request_id="0", prompt_token_ids=prompt, params=params))
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                raise PrefixCacheError(output.error)
            click.echo(output.text, nl=False)
    click.echo()


_MODEL = click.Argument(["model_argument"], metavar="[MODEL]", required=False, help="As --model.")
_PROMPT = click.Argument(["prompt"], help="Text to complete, or with --chat a message to answer.")
_URL = click.Argument(["url"], help="Address of an OpenAI-compatible server.")
_RESULTS = [click.Argument([name], help="Results, as --output writes them.") for name in "ab"]
_TRACES = click.Argument(
    ["traces"],
    metavar="TRACE...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    help="Mooncake's JSON lines, PTT, or a recording of `serve`; plain, gzip or xz.",
)
_RECORD = click.Argument(
    ["record"], type=click.Path(path_type=Path), help="A file of --record-requests."
)
_IDS = click.Argument(["ids"], metavar="[ID]...", nargs=-1, help="Requests; all without one.")
_BODY = click.Argument(["body"], metavar="[BODY]", required=False, help="File, - for stdin.")
_SHELL = click.Argument(
    ["shell"],
    metavar="[SHELL]",
    required=False,
    type=click.Choice(SHELLS),
    help="Shell to complete in.",
)
_HELP = """An LLM server around a prefix KV cache.

Exit status of every command: 0 done, 1 failed, 2 wrong usage. `prefixcache COMMAND --help` shows a
command's options and examples.
"""
app = App(
    "prefixcache",
    help=_HELP,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    commands=[
        FlagCommand(
            serve,
            EngineConfig,
            ServeOptions,
            arguments=[_MODEL],
            foreign=vllm_options,
            examples=[
                "prefixcache serve",
                "prefixcache serve ./model.gguf --port 9000 --kv-cache-memory 2GiB",
                "PREFIXCACHE_API_KEY=secret prefixcache serve Qwen/Qwen3-0.6B --host 0.0.0.0",
            ],
        ),
        FlagCommand(
            serve_ray,
            RayOptions,
            EngineConfig,
            ServeOptions,
            arguments=[_MODEL],
            without=NOT_SERVED,
            examples=["prefixcache serve-ray ./model.gguf --num-replicas 3"],
        ),
        FlagCommand(
            generate,
            GenerateOptions,
            EngineConfig,
            arguments=[_PROMPT],
            without=("max_num_seqs",),
            examples=[
                "prefixcache generate 'The capital of Japan is' --max-tokens 8",
                "prefixcache generate 'What is the capital of Japan?' --chat",
            ],
        ),
        FlagCommand(
            download,
            EngineConfig,
            arguments=[_MODEL],
            without=leaves(EngineConfig).keys() - {"model", "revision"},
            examples=["prefixcache download Qwen/Qwen3-0.6B"],
        ),
        FlagCommand(
            convert,
            ConvertOptions,
            EngineConfig,
            arguments=[_MODEL],
            without=leaves(EngineConfig).keys() - {"model", "revision"},
            examples=["prefixcache convert Qwen/Qwen3-0.6B --quantize q8_0 --output ./qwen-q8"],
        ),
        FlagGroup(
            bench,
            BenchOptions,
            EngineConfig,
            below=[
                FlagCommand(
                    compare,
                    arguments=_RESULTS,
                    examples=["prefixcache bench compare before.json after.json"],
                )
            ],
            examples=[
                "prefixcache bench --workload agents",
                "prefixcache bench --base-url http://127.0.0.1:8000 --output after.json",
            ],
        ),
        FlagCommand(
            replay,
            ReplayOptions,
            arguments=[_TRACES],
            examples=["prefixcache replay recording.jsonl --sizes 10%,50%"],
        ),
        FlagCommand(
            rerun,
            EngineConfig,
            arguments=[_RECORD, _IDS],
            without=("record_requests", "chat_template"),
            examples=["prefixcache rerun day.jsonl", "prefixcache rerun day.jsonl cmpl-5"],
        ),
        FlagCommand(
            verify,
            VerifyOptions,
            arguments=[_URL],
            examples=["prefixcache verify http://127.0.0.1:8000"],
        ),
        FlagCommand(
            explain,
            ExplainOptions,
            arguments=[_BODY],
            examples=["prefixcache explain", "prefixcache explain request.json"],
        ),
        FlagCommand(
            chat,
            ChatOptions,
            examples=["prefixcache chat", "prefixcache chat --url http://127.0.0.1:9000"],
        ),
        MODELS,
        FlagCommand(doctor, DoctorOptions, examples=["prefixcache doctor"]),
        FlagCommand(
            completion,
            arguments=[_SHELL],
            examples=["prefixcache completion bash"],
        ),
        CACHE,
    ],
)
click.version_option(__version__, message="prefixcache %(version)s", help="Show the version.")(app)
