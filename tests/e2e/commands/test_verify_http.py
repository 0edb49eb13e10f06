"""`prefixcache verify` against a server of ours, and against one whose rows depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from equality import WIDE
from prefixcache.tools.verify.client import Asker
from prefixcache.tools.verify.verify_options import VerifyOptions
from prefixcache.tools.verify.verify_report import Report, verdict
from prefixcache.tools.verify.verify_run import verify_with
from support.serving import served_folder


async def report_on(folder: Path, **flags: Any) -> Report:
    options = VerifyOptions(
        url="http://localhost", num_questions=3, prompt_words=32, max_tokens=6, top_logprobs=3
    )
    async with served_folder(folder, num_blocks=800, **flags) as (client, _):
        return await verify_with(Asker(client, options, lambda: None), options, 3, "verify")


async def test_no_hit_changes_a_log_probability(tiny_checkpoint: Callable[..., Path]):
    report = await report_on(tiny_checkpoint(**WIDE), global_cache_hit_threshold=0.9)
    assert report.status == 0, verdict(report)
    assert report.cooling == "a new cache_salt"
    assert [one.num_hits for one in report.rounds] == [0, 3, 0, 3, 0, 3, 3]


async def test_rows_that_depend_on_the_batch_are_found_out(tiny_checkpoint: Callable[..., Path]):
    report = await report_on(tiny_checkpoint(**WIDE), batch_invariant=False, attention="torch")
    assert report.status == 1, verdict(report)
