"""The page in headless Chromium. Skipped where `chromium` is not installed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.server.http.access import AccessRules
from support.browser import Page, browser, needs_chromium
from support.serving import running, serve_folder

pytestmark = needs_chromium

ADMIN_KEY = "schlüssel <b>"
HOSTILE = "<img src=x onerror=alert(1)></q></summary><script>document.title='owned'</script>\u202e"
IS_SHOWN = "!document.getElementById('view').hidden && document.querySelector('#tiles dd') != null"
MODULE = "import('/dashboard/assets/page.js')"


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {"num_blocks": 60, "access": {"rules": AccessRules(admin_api_keys=(ADMIN_KEY,))}}


@pytest.fixture(scope="module")
def tab() -> Generator[Page, None, None]:
    with browser() as page:
        yield page


@pytest.fixture
def page(address: str, tab: Page) -> Page:
    """The page of an administrator who gave the key by hand; its browser ends before the server."""
    tab.look(1200, 900)
    tab.go(f"{address}/dashboard")
    if tab.run("sessionStorage.getItem('prefixcache-admin-key') == null"):
        tab.wait_for("document.activeElement.id == 'key'")
        assert tab.run("document.getElementById('view').hidden")
        tab.type(ADMIN_KEY)
        tab.press("Enter")
    tab.wait_for(IS_SHOWN)
    tab.problems.clear()
    return tab


@contextmanager
def running_request(address: str, request_id: str) -> Iterator[None]:
    """A request that runs until the end, with an id of the client's."""
    body = {"model": "tiny", "prompt": "go on", "max_tokens": 200, "ignore_eos": True}
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(headers={"X-Request-Id": request_id}, timeout=150) as client:
            while not stop.is_set():
                client.post(f"{address}/v1/completions", json=body).raise_for_status()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_the_key_is_asked_for_and_never_stands_in_an_address(page: Page, address: str) -> None:
    asked = [url for url in page.requests if not url.startswith(("data:", "about:"))]
    assert asked
    assert {httpx.URL(url).copy_with(path="/", query=None) for url in asked} == {
        httpx.URL(address).copy_with(path="/")
    }
    assert not any("schl" in url or "?" in url for url in asked)
    page.run("document.getElementById('forget').click()")
    assert page.run("document.getElementById('view').hidden")
    assert page.run("sessionStorage.length") == 0


def test_what_clients_send_is_shown_as_text_alone(page: Page, address: str) -> None:
    request_id = "<script>document.title='owned'</script><b>"
    with running_request(address, request_id):
        page.wait_for("document.querySelector('#requests td.id')?.textContent.includes('<script>')")
    node = {
        "id": "1",
        "depth": 0,
        "tokens": 32,
        "requests": 2,
        "hits": 1,
        "last_use": 0,
        "salted": True,
        "text": HOSTILE,
    }
    miss = {
        "request_id": HOSTILE,
        "time": 0,
        "api": HOSTILE,
        "prompt_tokens": 5,
        "hit_tokens": 0,
        "reason": HOSTILE,
        "detail": None,
        "advice": HOSTILE,
    }
    event = {
        "type": "prefixes",
        "prefixes": [node | {"children": [node | {"id": "2", "children": []}]}],
        "misses": [miss],
    }
    hello = {"type": "hello", "model": HOSTILE, "version": HOSTILE, "ages": [1], "points": []}
    for one in (event, hello | {"most_points": 9}):
        page.run(f"{MODULE}.then((page) => page.tell({json.dumps(one)}))")
    assert page.run("document.querySelector('#prefixes q').textContent") == HOSTILE
    assert page.run("document.querySelector('#misses .note').textContent") == HOSTILE
    assert page.run("document.querySelectorAll('main img, main script, td b').length") == 0
    assert page.run("document.title") == "prefixcache dashboard"
    refused = "try { document.body.innerHTML = '<b>'; 'taken' } catch (error) { error.name }"
    assert page.run(refused) == "TypeError"


def test_the_page_stays_as_small_as_it_was_however_long_it_is_open(page: Page) -> None:
    """Events of many days with requests, prefixes and misses that come and go."""
    script = """MODULE.then((page) => {
        const points = (time) => ({time, running: 2, waiting: 1, hit_ratio: 0.5, ttft_p50: 0.1,
            ttft_p90: 0.2, memory_tokens: time % 7, computed_tokens: 3, generated_tokens: 2,
            evictions: 1, demotions: 0});
        const cache = {enabled: true, is_sleeping: false, is_paused: false, block_size: 16,
            num_blocks: 4, recent_hit_ratio: 0.5, recent_queries: 2, hit_tokens: 1,
            queried_tokens: 2, evictions: 0, demotions: 0, preemptions: 0};
        for (let i = FIRST; i < FIRST + COUNT; i++) {
            const request = (n) => ({request_id: `request ${i} ${n}`, cached_tokens: 1,
                computed_tokens: 2, total_tokens: 3, max_tokens: 4});
            page.tell({type: "snapshot", point: points(i), cache, memory: null,
                map: {free: [1, 0], cached: [1, 1], pinned: [0, 0], held: [0, 1], age: [0, -1]},
                requests: Array.from({length: i % 5}, (_, n) => request(n))});
            page.tell({type: "prefixes", misses: [{request_id: `miss ${i}`, time: i, api: "chat",
                    prompt_tokens: 1, hit_tokens: 0, reason: "never_seen", detail: null,
                    advice: "warm it"}],
                prefixes: [{id: `prefix ${i}`, depth: 0, tokens: 16, requests: 2, hits: 1,
                    last_use: i, salted: false, text: "text", children: []}]});
        }
    })"""
    page.run("document.getElementById('forget').click()")

    def open_for(first: int, events: int) -> dict[str, float]:
        numbers = script.replace("MODULE", MODULE).replace("FIRST", str(first))
        page.run(numbers.replace("COUNT", str(events)))
        return page.counts()

    before = open_for(0, 700)
    after = open_for(700, 2000)
    assert after["Nodes"] <= before["Nodes"] + 50
    assert after["JSEventListeners"] <= before["JSEventListeners"]
    assert after["JSHeapUsedSize"] <= before["JSHeapUsedSize"] + 100_000
    assert page.problems == []


def test_the_page_works_with_keys_names_its_parts_and_fits_a_phone(page: Page) -> None:
    page.run("document.getElementById('map').focus()")
    page.press("ArrowRight")
    assert page.run("document.getElementById('cell').textContent").startswith("Cell 1 of 59: ")
    page.press("End")
    assert page.run("document.getElementById('cell').textContent").startswith("Cell 59 of 59: ")
    unnamed = """[...document.querySelectorAll('canvas, section, progress, [tabindex="0"]')]
        .filter((one) => !one.hidden && one.id != 'login' && !one.hasAttribute('aria-label')
            && !document.getElementById(one.getAttribute('aria-labelledby'))).length"""
    assert page.run(unnamed) == 0
    names = _names(page)
    assert {"banner", "main", "heading", "table", "contentinfo"} <= {role for role, _ in names}
    assert ("image", "Map of the cache's blocks") in {(role, name[:25]) for role, name in names}
    for width in (320, 390, 1200):
        page.look(width, 800)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), width
    assert page.problems == []


def test_charts_show_a_chosen_window_and_the_values_under_the_pointer_or_the_last(
    page: Page,
) -> None:
    page.run("document.getElementById('forget').click()")
    points = [{"time": time, "hit_ratio": time / 1000} for time in range(0, 301, 10)]
    hello = {"type": "hello", "model": "m", "version": "0", "ages": [1], "points": points[:-1]}
    hello["started"] = -3400
    script = """MODULE.then((page) => {
        page.tell(HELLO);
        const map = {free: [1], cached: [0], pinned: [0], held: [0], age: [0]};
        const rest = {memory: null, requests: [], cache: {}, failed: 3, refused: 4, map};
        for (const point of [POINT, {time: 310}]) page.tell({type: "snapshot", point, ...rest});
        const canvas = document.querySelector("#charts canvas");
        const shown = () => document.querySelector("#charts figcaption").textContent;
        const move = (kind, x) => {
            const event = new PointerEvent(kind);
            Object.defineProperty(event, "offsetX", {value: x});
            canvas.dispatchEvent(event);
        };
        const tiles = Array.from(document.querySelectorAll("#tiles dd"), (one) => one.textContent);
        const texts = [shown(), ...tiles.filter((text) => /3, 4|h$/.test(text))];
        for (const seconds of [600, 60]) {
            document.querySelector(`.window [value="${seconds}"]`).click();
            move("pointermove", 56);
            texts.push(shown());
        }
        move("pointerleave", 0);
        return [...texts, shown()];
    })"""
    script = script.replace("MODULE", MODULE).replace(
        "HELLO", json.dumps(hello | {"most_points": 99})
    )
    shown = page.run(script.replace("POINT", json.dumps(points[-1])))
    last = "cached 30.0 %"
    assert shown == [last, "3, 4", "1.03 h", "cached 0.0 %", "cached 25.0 %", last]


@pytest.mark.parametrize("dark", [False, True])
def test_colours_differ_enough_to_be_read(page: Page, dark: bool) -> None:
    page.look(1200, 900, dark=dark)
    least = {
        ("text", "back"): 7,
        ("text", "panel"): 7,
        ("dim", "back"): 4.5,
        ("dim", "panel"): 4.5,
        ("first", "panel"): 4.5,
        ("second", "panel"): 4.5,
        ("third", "panel"): 4.5,
        ("bad", "back"): 4.5,
        ("held", "panel"): 3,
        ("cached", "panel"): 3,
        ("pinned", "panel"): 3,
        ("focus", "panel"): 3,
    }
    for (one, other), ratio in least.items():
        assert _contrast(_colour(page, one), _colour(page, other)) >= ratio, (one, other)


def _names(page: Page) -> list[tuple[str, str]]:
    """What a screen reader reads: roles and names."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    seen = [node for node in nodes if not node["ignored"]]
    return [(node["role"]["value"], str(node.get("name", {}).get("value", ""))) for node in seen]


def _colour(page: Page, name: str) -> Any:
    style = "getComputedStyle(document.documentElement)"
    return page.run(f"{style}.getPropertyValue('--{name}').trim()")


def _contrast(one: str, other: str) -> float:
    """WCAG's, of two colours as #rrggbb."""
    lower, higher = sorted((_luminance(one), _luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.slow
def test_the_page_of_the_api_shows_every_endpoint(
    tiny_checkpoint: Callable[..., Path], tab: Page
) -> None:
    rules = AccessRules(api_keys=(ADMIN_KEY,))
    app, engine = serve_folder(tiny_checkpoint(), num_blocks=40, access={"rules": rules})
    headers = {"Authorization": f"Bearer {ADMIN_KEY}".encode()}
    try:
        with running(app) as address:
            paths = httpx.get(f"{address}/openapi.json", headers=headers, timeout=240).json()[
                "paths"
            ]
            tab.go(f"{address}/docs")
            tab.wait_for("!document.getElementById('login').hidden")
            tab.problems.clear()  # the refusal
            tab.run("document.getElementById('key').focus()")
            tab.type(ADMIN_KEY)
            tab.press("Enter")
            tab.wait_for("document.querySelector('#endpoints section') != null")
            shown = tab.run(
                "Array.from(document.querySelectorAll('summary code'), (one) => one.textContent)"
            )
            text = tab.run("document.getElementById('endpoints').textContent")
            assert tab.problems == []
            tab.go("about:blank")
    finally:
        engine.close()
    assert shown == [f"{m.upper()} {path}" for path, methods in paths.items() for m in methods]
    assert "max_tokens integer" in text
