"""The page to talk to, in headless Chromium. Skipped where `chromium` is not installed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prefixcache.server.http.access import AccessRules
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import PromptUse, Request, RequestOutput
from support.browser import Page, browser, needs_chromium
from support.serving import FakeEngine, fake_app, running, says, wait_until

pytestmark = needs_chromium

KEY = "schlüssel <b>"
HOSTILE = (
    "<img src=x onerror=alert(1)><script>document.title='owned'</script>\u202e[a](javascript:1)"
)
TURNS = "document.querySelectorAll('article').length"
IS_DONE = "document.getElementById('stop').hidden"
Script = Callable[[Request], AsyncIterator[RequestOutput]]


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {"num_blocks": 60, "access": {"rules": AccessRules(api_keys=(KEY,))}}


@pytest.fixture(scope="module")
def tab() -> Generator[Page, None, None]:
    with browser() as page:
        yield page


def ask(page: Page, question: str, *, done: str = IS_DONE) -> None:
    page.wait_for("document.getElementById('model').textContent != ''")
    page.run("document.getElementById('question').focus()")
    page.type(question)
    page.press("Enter")
    page.wait_for(done)


def costs(page: Page) -> list[str]:
    return page.run("Array.from(document.querySelectorAll('.cost'), (one) => one.textContent)")


def problem(page: Page) -> str:
    return page.run("document.getElementById('problem').textContent")


def leave(page: Page) -> None:
    """So that no answer is open when the server ends, and the next one finds no conversation."""
    page.run("sessionStorage.clear()")
    page.go("about:blank")


@contextmanager
def opened(tab: Page, tokenizer: Tokenizer, script: Script) -> Iterator[FakeEngine]:
    """The page of a server whose answers are scripted."""
    engine = FakeEngine(script)
    with running(fake_app(engine, tokenizer)) as address:
        tab.go(f"{address}/chat")
        tab.problems.clear()
        yield engine
        leave(tab)


def test_a_dialogue_with_a_key_shows_what_each_turn_took_from_the_cache(
    tab: Page, address: str
) -> None:
    tab.go(f"{address}/chat")
    tab.wait_for("document.activeElement.id == 'key'")
    tab.type(KEY)
    tab.press("Enter")
    question = "Why does a long question fill more than one block of the cache?"
    for number in (1, 2):
        ask(tab, question, done=f"{TURNS} == {number} && {IS_DONE}")
    first, second = costs(tab)
    assert first.startswith("0 of ")
    cached, _, prompt = second.split(" prompt tokens cached, first token after ")[0].split()[:3]
    assert 16 <= int(cached) < int(prompt)
    assert "tokens/s" in second
    assert tab.run("document.querySelectorAll('progress')[1].value") == int(cached)
    shown = tab.run("document.getElementById('turns').textContent")
    tab.call("Page.reload")
    tab.wait_for(f"document.readyState == 'complete' && {TURNS} == 2")
    assert tab.run("document.getElementById('turns').textContent") == shown
    assert not any("schl" in url or "?" in url for url in tab.requests)
    tab.run("document.getElementById('forget').click()")
    assert tab.run(f"[{TURNS}, sessionStorage.getItem('prefixcache-key')]") == [0, None]
    assert question not in json.dumps(tab.run("({...sessionStorage})"))
    leave(tab)


def test_answers_are_text_and_code_alone_however_they_are_cut(
    tab: Page, tokenizer: Tokenizer
) -> None:
    answer = f"\n\n{HOSTILE}\n\nb\n```html\n{HOSTILE}\n\n  c\n```\n~~~\nd\n```\n~~~\nend `x`\n```e"
    with opened(tab, tokenizer, lambda request: says(request, *answer)):
        ask(tab, HOSTILE)
        found = "document.querySelectorAll('.answer > *')"
        blocks = f"Array.from({found}, (block) => [block.localName, block.innerText])"
        expected = [
            ["p", f"{HOSTILE}\n\nb"],
            ["pre", f"{HOSTILE}\n\n  c"],
            ["pre", "d\n```"],
            ["p", "end `x`"],
        ]
        assert [one for one in tab.run(blocks) if one[1]] == expected
        assert tab.run("document.querySelector('.question').textContent") == HOSTILE
        assert tab.run("document.querySelectorAll('main :is(img, script, a)').length") == 0
        assert tab.run("document.title") == "prefixcache chat"
        for width in (320, 390, 1200):
            tab.look(width, 800)
            tab.wait_for("document.documentElement.scrollWidth <= innerWidth")
        refused = "try { document.body.innerHTML = '<b>'; 'taken' } catch (error) { error.name }"
        assert tab.run(refused) == "TypeError"
        assert len(tab.problems) == 1  # what was refused


async def _never_ends(request: Request, text: str) -> AsyncIterator[RequestOutput]:
    while True:
        yield RequestOutput(
            request_id=request.request_id,
            token_ids=(3,),
            text=text,
            prompt=PromptUse(num_tokens=len(request.prompt_token_ids)),
        )
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("who", ["a person", "the page"])
def test_an_answer_ends_when_somebody_stops_it_or_it_is_too_long(
    tab: Page, tokenizer: Tokenizer, who: str
) -> None:
    text = "word " if who == "a person" else "word " * 20_000
    with opened(tab, tokenizer, lambda request: _never_ends(request, text)) as engine:
        if who == "the page":  # with the answer that is more than a tab may keep
            tab.run("sessionStorage.setItem('filler', 'x'.repeat(3 << 20))")
        ask(tab, "Go on", done="document.querySelector('.answer')?.textContent != ''")
        if who == "a person":
            tab.run("document.getElementById('stop').click()")
        tab.wait_for(IS_DONE)
        wait_until(lambda: engine.num_open == 0)
        (cost,) = costs(tab)
        assert "stopped" in cost
        assert ("too long" in cost) == (who == "the page")
        assert tab.run("document.querySelector('.answer').textContent.length") < 6 << 20
        assert ("too long to be kept" in problem(tab)) == (who == "the page")


def test_a_question_that_failed_can_be_sent_again(tab: Page, tokenizer: Tokenizer) -> None:
    failing = [True]

    async def script(request: Request) -> AsyncIterator[RequestOutput]:
        if failing.pop() if failing else False:
            raise RuntimeError("the script's")
        async for output in says(request, "thanks"):
            yield output

    with opened(tab, tokenizer, script) as engine:
        ask(tab, "Hello", done="document.getElementById('problem').textContent != ''")
        assert problem(tab) == "The server failed to answer; its log says why."
        assert tab.run(TURNS) == 0
        ask(tab, " again", done=f"{TURNS} == 1 && {IS_DONE}")
        assert tab.run("document.querySelector('.question').textContent") == "Hello again"
        assert problem(tab) == ""
        tab.run("document.getElementById('system').value = 'Be short.'")
        ask(tab, "And now?", done=f"{TURNS} == 2 && {IS_DONE}")
        prompt = tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())
        said = ["Be short.", "Hello again", "thanks", "And now?"]
        places = [prompt.index(one) for one in said]
        assert places == sorted(places)
