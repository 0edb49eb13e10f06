"""One verification: connects, finds out what the server can be asked, and asks."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from prefixcache.exceptions import FieldError
from prefixcache.tools.openai_api import open_client
from prefixcache.tools.verify.client import Asker
from prefixcache.tools.verify.cooling import find_cooling
from prefixcache.tools.verify.questions import make_questions
from prefixcache.tools.verify.rounds import Plan
from prefixcache.tools.verify.verify_options import VerifyOptions
from prefixcache.tools.verify.verify_report import Report

OnDone = Callable[[], object]


async def run_verify(
    options: VerifyOptions, seed: int, command: str, on_done: OnDone = lambda: None
) -> Report:
    """Asks the server. `on_done` is called for each answer. Raises `StreamError`."""
    async with open_client(options.url, options.api_key) as client:
        asker = Asker(client, options, on_done)
        return await verify_with(asker, options, seed, command)


async def verify_with(asker: Asker, options: VerifyOptions, seed: int, command: str) -> Report:
    """All rounds, through `asker`. Raises `StreamError`."""
    count = options.num_questions
    first, probe, between, *others = make_questions(2 * count + 3, options.prompt_words, seed)
    await asker.settle(first)
    cooling = await find_cooling(asker, probe, between)
    plan = Plan(asker, others[:count], others[count:], cooling)
    return Report(
        url=options.url,
        model=asker.model,
        api=options.api,
        seed=seed,
        tolerance=options.tolerance,
        cooling=None if cooling is None else cooling.name,
        notes=tuple(asker.notes),
        rounds=tuple([each_round async for each_round in plan.rounds()]),
        command=command,
    )


def check_url(url: str) -> None:
    """Raises `FieldError` for what is no address of a server."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise FieldError("URL", f"is none: {error}.") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise FieldError("URL", "must be an address such as http://127.0.0.1:8000.")
