"""The life of a request through `prefixcache.core`, where only Python and numpy may be imported.

`python tests/core_alone.py` runs anywhere that the package and numpy are installed.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

ALLOWED = sys.stdlib_module_names | {"numpy", "prefixcache"}


class RefuseAllOthers(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname.partition(".")[0] not in ALLOWED:
            raise ImportError(f"{fullname} is not numpy")


sys.meta_path.insert(0, RefuseAllOthers())

import numpy as np  # noqa: E402

from prefixcache.core import BlockPool, PrefixCache  # noqa: E402

cache = PrefixCache(9, 4, model="m")
tokens = np.arange(10, dtype=np.int32)
assert cache.probe(cache.compute_block_hashes(tokens)) == 0
first = cache.new_sequence(tokens)
assert cache.commit_prefix_plan(first, 0, 10) == 0
cache.mark_blocks_filled([first], [10])
first.extend([10])
assert cache.append_slots([first], [1]) == 1
cache.release([first])

second = cache.new_sequence(tokens)
assert cache.count_prefix_hits(second) == 8
assert cache.commit_prefix_plan(second, 8, 2) == 8
cache.release([second])
cache.validate()

pool = BlockPool(4)
held = pool.allocate(2)
assert held is not None
pool.release(held)

ours = sorted(name for name in sys.modules if name.partition(".")[0] == "prefixcache")
print(*ours)
