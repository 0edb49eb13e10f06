"""A bounded, checked disk behind SGLang's HiCache, keyed by weights and layout.

docs/guides/sglang.md says how to use it.
"""

SUPPORTED_VERSIONS = ("0.5.22", "0.5.23")
"""Versions of SGLang whose storage interface this was tested with."""


def refuse_version(version: str) -> str | None:
    """Why this version of SGLang is not supported; None if it is."""
    if ".".join(version.split(".")[:3]) in SUPPORTED_VERSIONS:
        return None
    return (
        f"prefixcache-sglang supports SGLang {' and '.join(SUPPORTED_VERSIONS)}, not {version}: "
        "the interface of its storage changes between versions."
    )
