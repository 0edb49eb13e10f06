"""Lines that a server leaves out of prompts."""

from __future__ import annotations

import pytest

from prefixcache.exceptions import FieldError
from prefixcache.server.options.header_lines import HeaderLines
from prefixcache.server.options.serve_options import ServeOptions

BILLING = "^x-[a-z-]*billing-header:"
LINES = HeaderLines([BILLING, "^Time: "])


def test_lines_are_left_out_of_text() -> None:
    text = "x-anthropic-billing-header: cch=1;\r\nYou help.\nTime: 14:05\nNo Time: here"
    assert LINES.stripped(text) == "You help.\nNo Time: here"
    assert LINES.stripped("Time: 1") == ""
    for other in ("", "\n", "a\n\nb\n", "Lone \ud800"):
        assert LINES.stripped(other) == other
    assert HeaderLines([]).stripped("Time: 1") == "Time: 1"


def test_of_a_chat_only_what_the_system_says_is_read() -> None:
    parts = [{"type": "text", "text": "Time: 1\nHello"}, {"type": "image_url"}, 7]
    messages = [
        {"role": "system", "content": "Time: 1\nHelp."},
        {"role": "developer", "content": parts},
        {"role": "system", "content": None},
        {"role": "user", "content": "Time: 1\nWhat?"},
    ]
    stripped = LINES.stripped_messages(messages)
    assert [one["content"] for one in stripped] == [
        "Help.",
        [{"type": "text", "text": "Hello"}, *parts[1:]],
        None,
        "Time: 1\nWhat?",
    ]
    assert messages[0]["content"] == "Time: 1\nHelp."


def test_a_pattern_that_others_search_for_years_takes_no_time() -> None:
    """Exponential where an engine tries one way after the other."""
    assert HeaderLines(["^(a|aa)+$"]).stripped("a" * 100_000 + "b") == "a" * 100_000 + "b"


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1", "a{9999}{9999}", ".*", "^$", "x?"])
def test_wrong_patterns_are_refused_at_the_start(pattern: str) -> None:
    with pytest.raises(FieldError, match=r"^strip_header_pattern") as error:
        ServeOptions(strip_header_pattern=(pattern,))
    assert "\n" not in str(error.value)
