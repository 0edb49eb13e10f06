"""Flags of `prefixcache serve` other than those of the engine. Nothing here imports Starlette."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from annotated_types import Ge, Le, MinLen

from prefixcache.config.checked import Checked, Count, PositiveFloat, PositiveInt, ReadBy
from prefixcache.config.engine_parts.flag_values import ByteSize
from prefixcache.config.flags import flag
from prefixcache.config.logs import LogFormat, LogLevel
from prefixcache.config.vllm_flags import KEY_VARIABLE
from prefixcache.events.config import KVEventsConfig, parse_kv_events
from prefixcache.exceptions import FieldError
from prefixcache.server.options.limits import MAX_BODY_BYTES
from prefixcache.text.chat.parser_names import ReasoningParserName, ToolCallParserName

PoolingMode = Literal["auto", "none", "last", "rank"]

ANY = "*"

_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[1-9]\d{0,4}))?"
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LAST_PORT = 65535
_FORM = (
    "must be * or an origin as browsers send it: https://host or https://host:port, in lower case, "
    "without a path, without / at the end and without the scheme's own port"
)
_PERMISSIONS = re.compile(r"0?[0-7]{3}")

LOG_LEVEL_HELP = "Least level of log lines; debug also shows what the cache does."


def _parse_variables(value: object) -> Mapping[str, Any] | None:
    """The object that a JSON text spells. Raises `ValueError` for anything else."""
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    if value is not None and not isinstance(value, dict):
        raise ValueError('must be a JSON object, as {"enable_thinking": false}')
    return cast("Mapping[str, Any] | None", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions(Checked):
    """The files of a server that speaks HTTPS alone; without a certificate it speaks HTTP."""

    ssl_certfile: Path | None = flag(None, "Certificate and its chain, in PEM: serve HTTPS.", "TLS")
    ssl_keyfile: Path | None = flag(
        None, "Key of the certificate, in PEM.", "TLS", shown="in --ssl-certfile"
    )
    ssl_ca_certs: Path | None = flag(
        None, "CA certificates, in PEM, that must have signed those of clients.", "TLS"
    )
    ssl_cert_reqs: Annotated[int, Ge(0), Le(2)] = flag(
        0,
        "Certificates of clients: 0 asks for none, 1 checks those that are sent, 2 requires one.",
        "TLS",
    )

    def check_together(self) -> None:
        """Raises `FieldError` for an option that would do nothing."""
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise FieldError(name, "needs --ssl-certfile.")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise FieldError("ssl_cert_reqs", "needs --ssl-ca-certs to check certificates against.")
        if self.ssl_ca_certs is not None and not self.ssl_cert_reqs:
            problem = "checks nobody without --ssl-cert-reqs 1, or 2 to need a certificate."
            raise FieldError("ssl_ca_certs", problem)

    @property
    def files(self) -> list[tuple[str, Path]]:
        """All files, each with the name of its field."""
        names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        paths = [(name, getattr(self, name)) for name in names]
        return [(name, path) for name, path in paths if path is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossOrigin(Checked):
    """Which pages of other origins may use the server, and how. Without origins none may."""

    allowed_origins: tuple[str, ...] = flag(
        (),
        "Origin of web pages that may use the server, as https://app.example.com, or *; a JSON "
        "list, or given several times.",
        "Access",
        shown="none",
        listed=True,
    )
    allowed_methods: tuple[str, ...] = flag(
        (ANY,), "Methods that such pages may use.", "Access", shown=ANY, listed=True
    )
    allowed_headers: tuple[str, ...] = flag(
        (ANY,), "Headers that such pages may send.", "Access", shown=ANY, listed=True
    )
    allow_credentials: bool = flag(
        False, "Let browsers send cookies of this host with such requests.", "Access"
    )

    def check_together(self) -> None:
        """Raises `FieldError` for what no browser could ever match, or lets in every page."""
        for origin in self.allowed_origins:
            if origin != ANY and not _is_origin(origin):
                raise FieldError("allowed_origins", f"{_FORM}, got {origin!r}.")
        for name in ("allowed_methods", "allowed_headers"):
            wrong = [token for token in getattr(self, name) if not _TOKEN.fullmatch(token)]
            if wrong:
                raise FieldError(name, f"must be names or *, got {wrong[0]!r}.")
        if self.allow_credentials and (ANY in self.allowed_origins or not self.allowed_origins):
            problem = "needs --allowed-origins that are named: with * every page had the cookies."
            raise FieldError("allow_credentials", problem)

    def allows(self, origin: str) -> bool:
        """Whether pages of an origin, as a browser names it, may use the server."""
        return ANY in self.allowed_origins or origin in self.allowed_origins


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(Checked):
    """Where, as what and to whom a model is served."""

    host: str = flag("127.0.0.1", "Address to listen on.", "Server", common=True)
    port: Annotated[Count, Le(65535)] = flag(
        8000, "Port; 0 takes a free one.", "Server", common=True
    )
    uds: Path | None = flag(None, "Unix socket to listen on, instead of a port.", "Server")
    uds_permissions: str = flag(
        "600", "Who may connect to the Unix socket, as for chmod.", "Server", metavar="<octal>"
    )
    served_model_name: tuple[Annotated[str, MinLen(1)], ...] = flag(
        (),
        "Names for clients; * also accepts any other.",
        "Server",
        shown="--model",
        greedy=True,
        common=True,
    )
    strict: bool = flag(False, "Reject requests with unknown fields, instead of warning.", "Server")
    strict_max_tokens: bool = flag(
        False,
        "Reject a max_tokens that the context has no room for with a 400, as clients expect that "
        "shorten their prompts then, instead of answering up to the context's end.",
        "Server",
    )
    clamp_max_tokens: bool = flag(True, "The opposite of --strict-max-tokens.", "Server")
    tool_call_parser: ToolCallParserName = flag(
        "auto",
        "Format of the model's tool calls; auto takes that of its chat template, and lists tools "
        f"in the prompt if that shows none. One of {', '.join(get_args(ToolCallParserName))}.",
        "Server",
        metavar="<name>",
    )
    reasoning_parser: ReasoningParserName = flag(
        "auto",
        "Format of the model's reasoning; auto takes that of its chat template, none leaves "
        f"reasoning in the content. One of {', '.join(get_args(ReasoningParserName))}.",
        "Server",
        metavar="<name>",
    )
    pooling: PoolingMode = flag(
        "auto",
        "What is read of a prompt's last token: last serves /v1/embeddings, rank /v1/rerank and "
        "/score with a model of Qwen3-Reranker's kind; auto goes by the model's files.",
        "Server",
    )
    default_chat_template_kwargs: Annotated[Mapping[str, Any] | None, ReadBy(_parse_variables)] = (
        flag(
            None,
            "Variables of the chat template for requests that do not set them, as "
            '{"enable_thinking": false}.',
            "Server",
            metavar="<json>",
        )
    )
    drain_seconds: Count = flag(
        10,
        "Seconds that open answers get to end when the server stops.",
        "Server",
        aliases=("shutdown_timeout",),
    )
    request_timeout: PositiveFloat | None = flag(
        None,
        "Most seconds from a request to the last token of its answer; then it ends with a 504.",
        "Server",
        shown="no limit",
        metavar="<seconds>",
    )
    max_total_body_bytes: Annotated[ByteSize, Ge(MAX_BODY_BYTES)] = flag(
        8 * MAX_BODY_BYTES,
        "Most memory of all bodies that are being read and checked, and of the log "
        "probabilities of answers that are not streamed; more get a 503.",
        "Server",
        shown="256MiB",
        metavar="<bytes or size>",
    )
    limit_concurrency: PositiveInt = flag(2048, "Most connections at once; more get 503.", "Server")
    # Longer than clients keep one, such as the 5 seconds of OpenAI's: a request that is sent while
    # the server closes its connection is lost.
    timeout_keep_alive: PositiveInt = flag(
        75, "Seconds that an idle connection stays open.", "Server"
    )
    timeout_read: PositiveFloat = flag(
        20, "Most seconds for a request's head, and for each part of its body.", "Server"
    )
    timeout_write: PositiveFloat = flag(
        30, "Most seconds that a client may read nothing of what was sent.", "Server"
    )
    log_level: LogLevel = flag("info", LOG_LEVEL_HELP, "Server", common=True)
    log_format: LogFormat = flag("text", "json writes one object a line.", "Server")
    log_file: Path | None = flag(
        None, "File for the log; it may be rotated.", "Server", shown="stderr"
    )
    log_prompts: bool = flag(
        False, "Write prompts to the log, and error messages that may quote them.", "Server"
    )
    max_log_len: PositiveInt = flag(
        2048, "Most characters of a request's prompts in the log.", "Server"
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "OpenTelemetry collector for traces, as http://localhost:4317.",
        "Server",
        shown="none",
    )
    api_key: tuple[str, ...] = flag(
        (),
        "Key that clients must send; may be given several times.",
        "Access",
        secret=True,
        common=True,
        variable=KEY_VARIABLE,
    )
    admin_api_key: tuple[str, ...] = flag(
        (),
        "Key for control, statistics and metrics; may be given several times.",
        "Access",
        shown="this machine alone, and nobody with --api-key",
        secret=True,
        common=True,
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "Name that clients may call the server by, as *.example.com; may be given several times.",
        "Access",
        shown="addresses, localhost, --host and the machine's name",
    )
    tls: TlsOptions = field(default_factory=TlsOptions)
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    metrics_prefix: Literal["prefixcache", "vllm"] = flag(
        "prefixcache", "Prefix of the names in /metrics; vllm fits dashboards for vLLM.", "Server"
    )
    strip_header_pattern: tuple[Annotated[str, MinLen(1)], ...] = flag(
        (),
        "Remove matching lines from system messages and plain prompts, such as a header that "
        "varies: '^x-anthropic-billing-header:'. May be given several times.",
        "Cache",
        metavar="<regex>",
    )
    diagnostics_memory: ByteSize = flag(
        16 * 2**20,
        "Most memory for recent prompts and evicted blocks, from which /prefix_cache/explain "
        "says why a prompt missed; 0 keeps none.",
        "Cache",
        shown="16MiB",
        metavar="<bytes or size>",
    )
    prompt_text: bool = flag(
        True, "Also keep the text of recent prompts, to show which part differs.", "Cache"
    )
    kv_events_config: Annotated[KVEventsConfig | None, ReadBy(parse_kv_events)] = flag(
        None,
        "Publish stored and removed blocks for routers, in vLLM's form: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557", '
        '"replay_endpoint": "tcp://127.0.0.1:5558"}.',
        "Cache",
        shown="none",
        metavar="<json>",
    )
    kv_events_public: bool = flag(
        False, "Let other machines read KV events, which contain the tokens of prompts.", "Access"
    )
    public_metrics: bool = flag(False, "Let everybody read /metrics.", "Access")
    client_warming: bool = flag(
        False, "Let clients call /prefix_cache/warm, not only administrators.", "Access"
    )
    allowed_model_dirs: tuple[Path, ...] = flag(
        (),
        "Folder that new weights may come from; may be given several times.",
        "Access",
        shown="anywhere",
    )
    max_queue: Count = flag(
        512,
        "Most waiting requests; more get a 503 with Retry-After. A request with many prompts "
        "counts once for every --max-num-seqs of them. 0 sets no limit.",
        "Scheduling",
    )
    max_waiting_per_key: PositiveInt | None = flag(
        None,
        "Most waiting requests of one API key; more get a 429 with Retry-After.",
        "Scheduling",
        shown="no limit",
    )

    def check_together(self) -> None:
        """Raises `FieldError` for invalid permissions or patterns."""
        from prefixcache.server.options.header_lines import HeaderLines

        HeaderLines(self.strip_header_pattern)
        if not _PERMISSIONS.fullmatch(self.uds_permissions):
            problem = f"must be three octal digits as 660, got {self.uds_permissions!r}."
            raise FieldError("uds_permissions", problem)
        events = self.kv_events_config
        if events is not None and events.is_on and not self.kv_events_public:
            _check_reach(events)


def _check_reach(config: KVEventsConfig) -> None:
    try:
        config.check_reach()
    except FieldError as error:
        raise FieldError("kv_events_config", f"has an endpoint in reach: {error}") from None


def _is_origin(text: str) -> bool:
    match = _ORIGIN.fullmatch(text)
    if match is None:
        return False
    port = int(match["port"] or 0)
    return port <= _LAST_PORT and port != _DEFAULT_PORTS.get(match["scheme"], -1)
