"""What `--pooling` means for a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prefixcache.config.pooling_mode import read_pooling
from prefixcache.exceptions import FieldError
from prefixcache.server.options.serve_options import PoolingMode

if TYPE_CHECKING:
    from prefixcache.text.tokenization.tokenizer import Tokenizer


def chosen_pooling(mode: PoolingMode, folder: Path, tokenizer: Tokenizer) -> str | None:
    """What `--pooling` means for the model: "last", "rank", None, or a mode that is not supported.

    Raises `FieldError` where `mode` asks for ranks of a model that cannot give any.
    """
    if mode == "auto":
        pooling = read_pooling(folder)
        return "last" if pooling == "lasttoken" else pooling
    if mode == "rank" and rank_tokens(tokenizer) is None:
        raise FieldError("pooling", "rank needs a model whose tokenizer has yes and no as tokens.")
    return None if mode == "none" else mode


def rank_tokens(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The ids of "yes" and "no", whose logits are the rank; None where they are no tokens."""
    yes, no = tokenizer.encode_batch(["yes", "no"], add_special_tokens=False)
    return (int(yes[0]), int(no[0])) if len(yes) == len(no) == 1 else None
