"""What `--kv-events-config` says; needs neither pyzmq nor msgspec."""

from __future__ import annotations

import ipaddress
import json
import re
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, cast

from annotated_types import MinLen

from prefixcache.config.checked import Checked, PositiveInt
from prefixcache.config.flags import closest
from prefixcache.exceptions import FieldError

Publisher = Literal["null", "zmq"]

_TCP = re.compile(r"tcp://(\[[^\]]+\]|[^:\[\]]+):(\*|\d{1,5})")
_IPC = re.compile(r"ipc://.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig(Checked):
    """Where KV events go; the keys are vLLM's. Raises `FieldError` that names a key.

    Batches are published at `endpoint` under `topic`, and the last `buffer_steps` of them are sent
    again at `replay_endpoint`, where there is one. A consumer that does not read has at most `hwm`
    batches waiting for it, and misses what is more.
    """

    enable_kv_cache_events: bool = False
    publisher: Publisher | None = None
    endpoint: Annotated[str, MinLen(1)] = "tcp://127.0.0.1:5557"
    replay_endpoint: Annotated[str, MinLen(1)] | None = None
    buffer_steps: PositiveInt = 10_000
    hwm: PositiveInt = 10_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def endpoints(self) -> dict[str, str]:
        """The endpoints that are used, by their keys."""
        given = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        return {key: endpoint for key, endpoint in given.items() if endpoint is not None}

    def check_together(self) -> None:
        """Raises `FieldError` for what is no endpoint that can be bound."""
        for key, endpoint in self.endpoints().items():
            _host(key, endpoint)

    def check_reach(self) -> None:
        """Raises `FieldError` for an endpoint that other machines reach."""
        for key, endpoint in self.endpoints().items():
            if not _is_local(_host(key, endpoint)):
                problem = (
                    f"of {endpoint} lets other machines read what is cached: give "
                    "--kv-events-public too, or take an address of this machine alone, as "
                    "tcp://127.0.0.1:5557."
                )
                raise FieldError(key, problem)


def _host(key: str, endpoint: str) -> str | None:
    """The host of a TCP endpoint; None of one in the file system."""
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None and not _IPC.fullmatch(endpoint):
        problem = (
            "must be tcp://ADDRESS:PORT, where the port * takes a free one, or ipc://PATH, "
            f"got {endpoint!r}."
        )
        raise FieldError(key, problem)
    if tcp is None:
        return None
    if tcp[2] != "*" and int(tcp[2]) > 65535:
        raise FieldError(key, f"must have a port up to 65535, got {endpoint!r}.")
    return tcp[1].strip("[]")


def is_local_endpoint(endpoint: str) -> bool:
    """Whether other machines cannot reach it. Raises `FieldError` for what is no endpoint."""
    return _is_local(_host("endpoint", endpoint))


def _is_local(host: str | None) -> bool:
    if host is None or host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def parse_kv_events(value: object) -> KVEventsConfig | None:
    """The configuration that a JSON text or an object spells; None of null.

    Raises `ValueError` that names the key.
    """
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    if value is None or isinstance(value, KVEventsConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError('must be a JSON object, as {"enable_kv_cache_events": true}')
    given = cast("dict[str, Any]", value)
    names = {field.name: None for field in fields(KVEventsConfig)}
    for name in given:
        if name not in names:
            hint = closest(str(name), names) or f": its keys are {', '.join(names)}"
            raise ValueError(f"it has no key {name!r}{hint}")
    try:
        return KVEventsConfig(**given)
    except FieldError as error:
        raise ValueError(f"its {str(error).rstrip('.')}") from None
