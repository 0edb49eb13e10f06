"""A recorded dialogue through two kinds of servers: `make equality` runs all forty."""

from __future__ import annotations

import pytest
from rich.progress import Progress

from equality_http import Options, compare_servers
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.models.hub import is_downloaded

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not is_downloaded(DEFAULT_MODEL), reason="prefixcache download was not run"),
]


@pytest.mark.long  # Six servers start.
@pytest.mark.timeout(600)
async def test_the_cache_changes_no_bit_of_an_answer(seed: int) -> None:
    options = Options(dialogues=1, requests=2, tokens=4, seed=seed)
    counts = await compare_servers(options, Progress(disable=True))
    assert counts.differences == 0
    assert (counts.outputs, counts.llm_outputs) == (4, 2)
    assert counts.hit_tokens > 2 * 1_300
