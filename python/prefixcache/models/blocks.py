"""Quantized tensors of a model's files."""

from __future__ import annotations

from prefixcache.ops.blocks import BLOCK_FORMATS, QuantizedTensor

__all__ = ["BLOCK_FORMATS", "QuantizedTensor"]
