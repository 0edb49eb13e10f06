"""Where the cache writes a step's block tables: arrays that the runner owns.

Letters of shapes: T tokens in the step, S sequences, P pages (blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.core import PrefixCache
from prefixcache.core import Sequence as CoreSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTableBuffers:
    """Block tables of one KV cache group as CSR, as large as the largest step needs.

    Pages `indices[indptr[s]:indptr[s + 1]]` belong to sequence s, the last one holds
    `last_page_len[s]` tokens. `first_pages[s]` pages before them are left out, behind the group's
    window. `slot_mapping[t]` is block * block size + offset of token t.
    """

    indptr: npt.NDArray[np.int32]  # [S + 1]
    indices: npt.NDArray[np.int32]  # [sum of pages]
    last_page_len: npt.NDArray[np.int32]  # [S]
    slot_mapping: npt.NDArray[np.int64]  # [T]
    first_pages: npt.NDArray[np.int32]  # [S]

    @classmethod
    def of_size(cls, *, max_tokens: int, max_seqs: int, max_pages: int) -> BlockTableBuffers:
        """Zeros. `max_pages` is the most pages of one sequence."""
        return cls(
            indptr=np.zeros(max_seqs + 1, np.int32),
            indices=np.zeros(max_seqs * max_pages, np.int32),
            last_page_len=np.zeros(max_seqs, np.int32),
            slot_mapping=np.zeros(max_tokens, np.int64),
            first_pages=np.zeros(max_seqs, np.int32),
        )

    def fill(
        self,
        core: PrefixCache,
        sequences: Sequence[CoreSequence],
        starts: Sequence[int],
        counts: Sequence[int],
        group: int,
    ) -> None:
        """Writes the tables of a step that computes `counts` tokens of each sequence."""
        core.fill_block_tables(
            sequences,
            starts,
            counts,
            group,
            self.indptr,
            self.indices,
            self.last_page_len,
            self.slot_mapping,
            self.first_pages,
        )
