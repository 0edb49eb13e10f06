"""Pages of two origins call a server that allows one, in headless Chromium (skipped without it)."""

from __future__ import annotations

import json
import logging
from typing import Any

from prefixcache.server.http.access import AccessRules
from prefixcache.server.options.serve_options import CrossOrigin
from support.browser import browser, needs_chromium
from support.serving import FakeEngine, fake_app, running, says

pytestmark = needs_chromium

_BODY = json.dumps({"prompt": [5, 6], "max_tokens": 2, "stream": True})


async def a_page(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"text/html")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"<title>a page</title>"})


def _call(address: str, content_type: str, key: str | None) -> str:
    """What the page's script sees: text and request id of an answer, or the name of the error."""
    headers = {"Content-Type": content_type}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    options = json.dumps({"method": "POST", "headers": headers, "body": _BODY})
    url = json.dumps(f"{address}/v1/completions")
    return (
        f"fetch({url}, {options}).then("
        "async answer => [await answer.text(), answer.headers.get('X-Request-Id')], "
        "error => [error.name, null])"
    )


def test_a_page_of_an_allowed_origin_reads_a_stream_and_others_nothing(tokenizer, caplog):
    caplog.set_level(logging.INFO, logger="prefixcache")
    engine = FakeEngine(lambda request: says(request, "h", "i"))
    with running(a_page) as allowed, running(a_page) as refused:
        rules = AccessRules(api_keys=("key",), cross_origin=CrossOrigin(allowed_origins=(allowed,)))
        app = fake_app(engine, tokenizer, rules=rules)
        with running(app) as address, browser() as page:
            page.go(f"{allowed}/")
            text, request_id = page.run(_call(address, "application/json", "key"))
            assert '"text":"h"' in text.replace(" ", "")
            assert text.endswith("data: [DONE]\n\n")
            assert request_id
            about_key, _ = page.run(_call(address, "application/json", None))
            assert "error" in json.loads(about_key)
            page.go(f"{refused}/")
            # The second is sent without a preflight: the server itself must refuse it.
            for content_type, key in (("application/json", "key"), ("text/plain", None)):
                assert page.run(_call(address, content_type, key)) == ["TypeError", None]
    assert len(engine.requests) == 1
    assert "POST /v1/completions: 403 Forbidden" in caplog.text
