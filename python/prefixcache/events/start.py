"""From `--kv-events-config` to events that are published."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from prefixcache.events.config import KVEventsConfig
from prefixcache.exceptions import FieldError, how_to_install

if TYPE_CHECKING:
    from prefixcache.engine.engine import Engine
    from prefixcache.events.publisher import EventPublisher
    from prefixcache.events.sockets import EventSockets


@contextmanager
def event_sockets(config: KVEventsConfig | None) -> Generator[EventSockets | None]:
    """The endpoints, taken before a model is loaded; None where no events are asked for.

    Raises `FieldError` where they cannot be taken, or what they need is not installed.
    """
    if config is None or not config.is_on:
        yield None
        return
    try:
        from prefixcache.events.sockets import EventSockets
    except ModuleNotFoundError as error:
        problem = f"needs {error.name}: {how_to_install('events')}."
        raise FieldError("kv_events_config", problem) from None
    with closing(EventSockets(config)) as sockets:
        yield sockets


@contextmanager
def publishing(
    engine: Engine, sockets: EventSockets | None, config: KVEventsConfig | None, *, model: str
) -> Generator[EventPublisher | None]:
    """Publishes the events of an engine that has had no request; None without `sockets`.

    In the thread that changes the engine's cache until another one adopts it.
    """
    if sockets is None or config is None:
        yield None
        return
    from prefixcache.events.publisher import EventPublisher

    publisher = EventPublisher(engine.control.keep_events(), sockets, config, model=model)
    engine.metrics.more.append(publisher.families)
    publisher.start()
    with closing(publisher):
        yield publisher
