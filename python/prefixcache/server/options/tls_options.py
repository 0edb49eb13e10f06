"""Flags of TLS. Nothing here opens a file or imports FastAPI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from prefixcache.config.checked import Checked
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions(Checked):
    """The files of a server that speaks HTTPS alone; without a certificate it speaks HTTP."""

    ssl_certfile: Path | None = flag(
        None, "Certificate and those it was signed with, in PEM: serve HTTPS.", "TLS"
    )
    ssl_keyfile: Path | None = flag(
        None, "Key of the certificate, in PEM.", "TLS", shown="in --ssl-certfile"
    )
    ssl_ca_certs: Path | None = flag(
        None, "Certificates in PEM that must have signed those of clients.", "TLS"
    )
    ssl_cert_reqs: Annotated[int, Ge(0), Le(2)] = flag(
        0, "Certificates of clients: 0 asks for none, 1 checks given ones, 2 needs one.", "TLS"
    )

    def check_together(self) -> None:
        """Raises `FieldError` for an option that would do nothing."""
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise FieldError(name, "needs --ssl-certfile.")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise FieldError("ssl_cert_reqs", "needs --ssl-ca-certs to check certificates against.")
        if self.ssl_ca_certs is not None and not self.ssl_cert_reqs:
            problem = "checks nobody without --ssl-cert-reqs 1, or 2 to need a certificate."
            raise FieldError("ssl_ca_certs", problem)

    @property
    def files(self) -> list[tuple[str, Path]]:
        """All files, each with the name of its field."""
        names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        paths = [(name, getattr(self, name)) for name in names]
        return [(name, path) for name, path in paths if path is not None]
