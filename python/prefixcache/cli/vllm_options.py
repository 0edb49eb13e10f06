"""Flags of vLLM as options of `serve`."""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.core import ParameterSource

from prefixcache.config.vllm_flags import VllmFlag, vllm_flags


class VllmOption(click.Option):
    """A hidden option that sets nothing."""

    def __init__(self, flag: VllmFlag) -> None:
        name = flag.names[0].lstrip("-").replace("-", "_").replace(".", "_")
        takes_value = flag.takes_value
        super().__init__(
            [f"foreign_{name}", *flag.names],
            hidden=True,
            is_flag=not takes_value,
            type=click.UNPROCESSED if takes_value else bool,
        )
        self._flag = flag

    def refuse(self, ctx: click.Context) -> None:
        """Raises `FieldError` when the option was given and asks for what is not done."""
        name = self.name or ""
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            self._flag.check(self.opts[0], ctx.params[name])


def vllm_options() -> Iterator[VllmOption]:
    """All of them."""
    return map(VllmOption, vllm_flags())
