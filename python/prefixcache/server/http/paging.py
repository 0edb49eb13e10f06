"""Pages of a list, as OpenAI's and Anthropic's clients ask for them in the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefixcache.exceptions import InvalidRequestError, wrong

_DEFAULT_LIMIT = 20


def page(
    query: Mapping[str, str], ids: Sequence[str], *, most: int, after: str, before: str
) -> tuple[range, bool]:
    """Which of the objects with these ids are on the page, and whether more lie in its direction.

    `after` and `before` are the parameters that name the object next to the page. `limit` is from 1
    to `most`. Raises `InvalidRequestError`, naming the parameter.
    """
    limit = page_limit(query, most)
    if after in query and before in query:
        raise InvalidRequestError(f"{after} and {before} exclude each other.", param=before)
    if before in query:
        end = _place(query[before], ids, before)
        begin = max(0, end - limit)
        return range(begin, end), begin > 0
    begin = _place(query[after], ids, after) + 1 if after in query else 0
    end = min(begin + limit, len(ids))
    return range(begin, end), end < len(ids)


def page_limit(query: Mapping[str, str], most: int) -> int:
    """`limit`, or 20. Raises `InvalidRequestError` for other than 1 to `most`."""
    text = query.get("limit", str(_DEFAULT_LIMIT))
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= number <= most:
        raise wrong("limit", f"must be a number from 1 to {most}")
    return number


def _place(name: str, ids: Sequence[str], param: str) -> int:
    if name not in ids:
        raise wrong(param, "names none of the objects in the list")
    return ids.index(name)
