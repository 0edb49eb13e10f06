"""The cache alone, for an engine of your own: blocks, prefix hits, block tables.

It needs numpy alone. `PrefixCache` hashes the tokens itself; `BlockPool` is for a caller that keeps
its own hashes and tables. Every error is one of Python's own. docs/tutorials/library.md explains
the life of a request, threads and errors.
"""

from prefixcache._core import BlockHashes, BlockPool, PrefixCache, Sequence

__all__ = ["BlockHashes", "BlockPool", "PrefixCache", "Sequence"]
