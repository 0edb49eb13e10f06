"""Who may ask for what.

A path is the administrator's unless it is declared open below, so that a route which nobody thought
of is closed. Administrators know an `--admin-api-key`. Without any key they are who connects from
this machine, unless something may stand between: behind a proxy everybody comes from this machine.

Web pages are kept out whatever they know: a browser says where a request comes from, and a page
whose name was made to resolve to this machine (DNS rebinding) gives itself away by `Host`. Pages of
origins that the operator allowed are clients, and administrators only by a key: where they are
opened says nothing of who wrote them.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from prefixcache.exceptions import FieldError
from prefixcache.server.http.errors import OLLAMA_PREFIX, ApiError
from prefixcache.server.options.serve_options import CrossOrigin
from prefixcache.types.request import CacheScope

_PUBLIC_PATHS = frozenset({"/", "/chat", "/dashboard", "/docs", "/health", "/ping", "/ready"})
_PUBLIC_PREFIX = "/dashboard/assets/"
_CLIENT_PATHS = frozenset(
    {
        "/detokenize",
        "/load",
        "/openapi.json",
        "/prefix_cache/explain",
        "/prefix_cache/probe",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v2/rerank",
        "/version",
    }
)
_CLIENT_PREFIXES = ("/v1/models/", "/v1/responses/", OLLAMA_PREFIX)
_WARM_PATH = "/prefix_cache/warm"

_HOST_PATTERN = re.compile(r"[\w*.-]+")
_HOST = re.compile(r"(\[(?P<address>[\w:.%]+)\]|(?P<name>[\w.-]+))(:\d*)?")
_LOCAL_HOSTS = ("localhost", "*.localhost")
_FORWARDING = frozenset(
    {
        "cf-connecting-ip",
        "forwarded",
        "true-client-ip",
        "via",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-envoy-external-address",
        "x-real-ip",
    }
)
_FORWARDING_PREFIXES = ("x-forwarded-", "x-original-")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """What the operator decided.

    With `api_keys` clients must send one of them, with `admin_api_keys` administrators. A request's
    `Host` must be an address, localhost, or match one of `allowed_hosts` ("*.example.com").
    `cross_origin` says which pages of other origins are let in. `public_metrics` lets everybody
    read `/metrics`, `client_warming` clients warm the cache.
    Raises `FieldError` for a key or host that could never match or would match too much.
    """

    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    public_metrics: bool = False
    client_warming: bool = False

    def __post_init__(self) -> None:
        for key in (*self.api_keys, *self.admin_api_keys):
            if not key or key != key.strip():
                problem = "must not be empty, nor begin or end with white space."
                raise FieldError("An API key", problem)
        if set(self.api_keys) & set(self.admin_api_keys):
            problem = "is an --admin-api-key too: every client would be an administrator."
            raise FieldError("An --api-key", problem)
        for host in self.allowed_hosts:
            if not is_host_name(host):
                raise FieldError(
                    "--allowed-hosts",
                    "takes a name without scheme and port, such as example.com or *.example.com, "
                    f"and may be given several times; got {host!r}.",
                )


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `namespace` tells one API key's cache salts from another's."""

    is_admin: bool = False
    namespace: str | None = None

    def scope(self, salt: str | None) -> CacheScope:
        """The scope of a request with this salt."""
        return CacheScope(self.namespace, self.own(salt))

    def own(self, text: str | None) -> str | None:
        """What a client chose; with API keys the same text is another for each."""
        return text if text is None or self.namespace is None else f"{self.namespace}:{text}"


def is_host_name(host: str) -> bool:
    """Whether the text is a host name or a pattern of names, with neither scheme nor port."""
    return _HOST_PATTERN.fullmatch(host) is not None


class AccessCheck:
    """ASGI middleware: refuses what `rules` do not allow, before the body is read.

    Leaves the `Caller` in the request's state.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._hosts = (*_LOCAL_HOSTS, *map(str.lower, rules.allowed_hosts))
        self._cross_origin = rules.cross_origin
        self._public = _PUBLIC_PATHS | ({"/metrics"} if rules.public_metrics else set[str]())
        self._client_paths = _CLIENT_PATHS | ({_WARM_PATH} if rules.client_warming else set[str]())
        self._api_keys = [_digest(key.encode()) for key in rules.api_keys]
        self._admin_keys = [_digest(key.encode()) for key in rules.admin_api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on. Raises `ApiError` for one that is not allowed."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["caller"] = self._admit(scope)
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        """Who asks. Raises `ApiError` unless they may."""
        path: str = scope["path"]
        if path in self._public or path.startswith(_PUBLIC_PREFIX):
            return Caller()
        headers = Headers(scope=scope)
        is_foreign_page = self._is_foreign_page(headers, scope["scheme"])
        digest = _digest(_key_of(headers))
        caller = self._caller(digest, is_local=not is_foreign_page and _is_local(scope, headers))
        if self._api_keys and not (caller.is_admin or _holds(self._api_keys, digest)):
            raise _key_needed("the server's API key")
        is_for_clients = path in self._client_paths or path.startswith(_CLIENT_PREFIXES)
        if not (caller.is_admin or is_for_clients) and _exists(scope):
            raise self._admin_needed(scope)
        return caller

    def _is_foreign_page(self, headers: Headers, scheme: str) -> bool:
        """Whether a browser asks on behalf of a page of another origin, which is allowed.

        Raises `ApiError` for any other page that is not ours.
        """
        host = ",".join(headers.getlist("host"))
        if not _is_known_host(host, self._hosts):
            raise _forbidden(
                f"The host {host!r} is not known here; --allowed-hosts adds it.", "unknown_host"
            )
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site")
        if origin is not None and not _is_own_origin(origin.lower(), host.lower(), scheme, site):
            if self._cross_origin.allows(origin):
                return True
            raise _forbidden(
                f"Pages of {origin!r} may not use this server; --allowed-origins lets them in.",
                "foreign_origin",
            )
        if site == "cross-site":
            raise _forbidden("Pages of other sites may not use this server.", "foreign_origin")
        return False

    def _caller(self, digest: bytes, *, is_local: bool) -> Caller:
        has_keys = bool(self._api_keys or self._admin_keys)
        is_admin = _holds(self._admin_keys, digest) if has_keys else is_local
        return Caller(is_admin, digest.hex() if self._api_keys else None)

    def _admin_needed(self, scope: Scope) -> ApiError:
        if self._admin_keys and not self._api_keys:
            return _key_needed("the server's admin API key")
        who = "those who send an --admin-api-key"
        if not (self._api_keys or self._admin_keys):
            who += " or, as long as there is no key, connect from this machine without a proxy"
        return _forbidden(f"{scope['method']} {scope['path']} is for {who}.", "admin_only")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _holds(digests: list[bytes], digest: bytes) -> bool:
    """Compares all, each in constant time: how long it takes tells nothing of a key."""
    matches = [secrets.compare_digest(digest, expected) for expected in digests]
    return any(matches)


def _key_of(headers: Headers) -> bytes:
    """The key as it came, since header values are bytes; empty without one.

    OpenAI's clients send it as a bearer token, Anthropic's as `x-api-key`.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("latin-1")


def _exists(scope: Scope) -> bool:
    """Whether a route answers: what does not exist is "not found" rather than forbidden."""
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


def _is_known_host(host: str, patterns: tuple[str, ...]) -> bool:
    """An address is reached without resolving a name, so that nobody can rebind it."""
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = (match["address"] or match["name"]).lower()
    return bool(_address(name)) or any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_own_origin(origin: str, host: str, scheme: str, site: str | None) -> bool:
    """Whether a page came from this server; behind a proxy with TLS the browser's word decides."""
    own_scheme, _, name = origin.partition("://")
    is_same_scheme = own_scheme == scheme or (own_scheme == "https" and site == "same-origin")
    return name == host and is_same_scheme


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether the client runs on this machine and nothing seems to stand between.

    A Unix socket has no client address. nginx speaks HTTP/1.0 to servers by default.
    """
    client = scope.get("client")
    if client is None or scope["http_version"] == "1.0":
        return False
    by_proxy = any(name in _FORWARDING or name.startswith(_FORWARDING_PREFIXES) for name in headers)
    return is_loopback(client[0]) and not by_proxy


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, which nobody else can use."""
    address = _address(host)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address is not None and (mapped or address).is_loopback


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, code=code)


def _key_needed(what: str) -> ApiError:
    return ApiError(
        HTTPStatus.UNAUTHORIZED,
        f"Send {what} as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
