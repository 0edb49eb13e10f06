"""Web pages of other origins, which an operator may let in (CORS). Nothing here imports FastAPI."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prefixcache.config.checked import Checked
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError

ANY = "*"

_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[1-9]\d{0,4}))?"
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossOrigin(Checked):
    """Which pages of other origins may use the server, and how. Without origins none may."""

    allowed_origins: tuple[str, ...] = flag(
        (),
        "Origin of web pages that may use the server, as https://app.example.com, or *; a JSON "
        "list, or given several times.",
        "Access",
        shown="none",
        listed=True,
    )
    allowed_methods: tuple[str, ...] = flag(
        (ANY,), "Methods that such pages may use.", "Access", shown=ANY, listed=True
    )
    allowed_headers: tuple[str, ...] = flag(
        (ANY,), "Headers that such pages may send.", "Access", shown=ANY, listed=True
    )
    allow_credentials: bool = flag(
        False, "Let browsers send cookies of this host with such requests.", "Access"
    )

    def check_together(self) -> None:
        """Raises `FieldError` for what no browser could ever match, or lets in every page."""
        for origin in self.allowed_origins:
            if origin != ANY and not _is_origin(origin):
                raise FieldError("allowed_origins", f"{_FORM}, got {origin!r}.")
        for name in ("allowed_methods", "allowed_headers"):
            wrong = [token for token in getattr(self, name) if not _TOKEN.fullmatch(token)]
            if wrong:
                raise FieldError(name, f"must be names or *, got {wrong[0]!r}.")
        if self.allow_credentials and (ANY in self.allowed_origins or not self.allowed_origins):
            problem = "needs --allowed-origins that are named: with * every page had the cookies."
            raise FieldError("allow_credentials", problem)

    def allows(self, origin: str) -> bool:
        """Whether pages of an origin, as a browser names it, may use the server."""
        return ANY in self.allowed_origins or origin in self.allowed_origins


_FORM = (
    "must be * or an origin as browsers send it: https://host or https://host:port, in lower case, "
    "without a path, without / at the end and without the scheme's own port"
)


def _is_origin(text: str) -> bool:
    found = _ORIGIN.fullmatch(text)
    if found is None:
        return False
    port = int(found["port"] or 0)
    return port <= _LAST_PORT and port != _DEFAULT_PORTS.get(found["scheme"], -1)
