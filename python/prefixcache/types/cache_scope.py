"""Who may share a request's cached blocks, and for whom it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScope:
    """What tells one client's requests from another's, made once where a request is let in.

    Requests share blocks under the same `salt` alone. Retention hints count against the budget of
    `owner`; None leaves it to the salt. Clients take turns by `client`, and a router sends requests
    of one `affinity` to one replica where nothing speaks against it.
    """

    salt: str | None = None
    owner: str | None = None
    client: str | None = None
    affinity: str | None = None
