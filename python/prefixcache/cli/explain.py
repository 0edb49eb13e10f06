"""The command `prefixcache explain`: why prompts were not cached, as a running server says."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from prefixcache.cli.command_line import Given
from prefixcache.config.checked import Checked, PositiveInt
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError, PrefixCacheError

if TYPE_CHECKING:
    import httpx

_SECONDS = 60
_STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(Checked):
    """Whom to ask, and how much to show."""

    url: str = flag("http://127.0.0.1:8000", "Server to ask.", "Server")
    api_key: str | None = flag(
        None,
        "Key of the server: an admin key, or for one prompt any.",
        "Server",
        secret=True,
        shown="none, which is enough on the server's own machine without keys",
    )
    limit: PositiveInt = flag(10, "Most lines of advice.", "Answer")
    json: bool = flag(False, "Show the server's answer as JSON.", "Answer")


def explain(given: Given) -> None:
    """Show why prompts missed the cache.

    A running server says which prompts it computes again and again, why, and what to do.

    With BODY, a file with the body of a completion, chat, response or message (- reads it from
    stdin), explain that one prompt; nothing is computed.
    """
    options = given.make(ExplainOptions)
    path: str | None = given.values["body"]
    answer = _asked(options, None if path is None else _read(path))
    if options.json:
        click.echo(json.dumps(answer, ensure_ascii=False, indent=2))
        return
    try:
        lines = _advice(answer, options) if path is None else [*map(_line, answer["prompts"])]
    except (KeyError, TypeError) as error:
        raise _unknown(options) from error
    for line in lines:
        click.echo(line)


def _read(path: str) -> bytes:
    if "://" in path:
        raise FieldError("BODY", f"is a file. To ask the server at {path}, give --url {path}.")
    try:
        return sys.stdin.buffer.read() if path == _STDIN else Path(path).read_bytes()
    except OSError as error:
        raise FieldError("BODY", f"cannot be read: {path}: {error.strerror}.") from error


def _asked(options: ExplainOptions, body: bytes | None) -> dict[str, Any]:
    """The server's answer. Raises `PrefixCacheError` for an error of its own, and for none."""
    import httpx

    from prefixcache.tools.openai_api import server_root

    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    url = server_root(options.url)
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=_SECONDS) as client:
            if body is None:
                response = client.get("/prefix_cache/misses", params={"limit": options.limit})
            else:
                sent = {"Content-Type": "application/json"}
                response = client.post("/prefix_cache/explain", content=body, headers=sent)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise PrefixCacheError(
            f"No server answers at {options.url} ({error}). Is it running? --url names another."
        ) from error
    return _read_answer(options, response)


def _read_answer(options: ExplainOptions, response: httpx.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise _unknown(options)
    answer = cast("dict[str, Any]", content)
    if response.is_success:
        return answer
    error = answer.get("error")
    if not isinstance(error, Mapping):
        raise _unknown(options)
    said = cast("Mapping[str, object]", error)
    if response.status_code == 404 and not isinstance(said.get("code"), str):  # no such path
        raise _unknown(options)
    raise PrefixCacheError(f"{options.url} answers {response.status_code}: {said.get('message')}")


def _unknown(options: ExplainOptions) -> PrefixCacheError:
    return PrefixCacheError(f"{options.url} is not a prefixcache server that explains misses.")


def _advice(answer: Mapping[str, Any], options: ExplainOptions) -> list[str]:
    asked, cached = answer["prompt_tokens"], answer["cached_tokens"]
    share = f"{100 * cached / asked:.1f} %" if asked else "none"
    from_cache = f"{share} from the cache"
    if disk := answer.get("disk_cached_tokens", 0):
        from_cache += f" ({100 * disk / asked:.1f} % from its disk)"
    findings = answer["findings"]
    total = f"{answer['num_requests']} prompts remembered, {asked} tokens: {from_cache}"
    lines = [f"{total}, {answer['tokens_recomputed']} tokens computed again."]
    lines += [f"{place}. {finding['description']}" for place, finding in enumerate(findings, 1)]
    if not findings:
        lines.append("No avoidable recomputation found.")
    elif answer["num_findings"] > len(findings):
        lines.append(f"and {answer['num_findings'] - len(findings)} more (--limit {options.limit})")
    return lines


def _line(prompt: Mapping[str, Any]) -> str:
    """Of one prompt of the body."""
    earlier: Mapping[str, Any] = prompt["earlier"] or {}
    difference = earlier.get("difference")
    differs = f" Compared with an earlier one, {difference['description']}." if difference else ""
    cached = f"{prompt['cached_tokens']} of {prompt['prompt_tokens']} tokens are cached"
    on_disk = prompt.get("disk_tokens", 0)
    disk = f", the next {on_disk} on the disk" if on_disk else ""
    return f"{cached}{disk}: {prompt['description']}{differs}"
