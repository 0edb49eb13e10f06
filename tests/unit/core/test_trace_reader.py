"""Traces as arrays: read in parts, they are what one reading gives; errors name file and line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prefixcache._core import TraceReader

TRACE = Path(__file__).parents[3] / "benches/traces/taubench.ptt.gz"


def test_parts_are_the_whole() -> None:
    whole, reader = TraceReader(TRACE).read(10**6), TraceReader(str(TRACE))
    assert (reader.name, reader.block_size, len(whole["time_ms"])) == ("taubench", 16, 2454)
    parts = []
    while part := reader.read(1000):
        parts.append(part)
    assert [len(part["time_ms"]) for part in parts] == [1000, 1000, 454]
    assert reader.read(1) == {}
    for name in ("time_ms", "input_tokens", "output_tokens", "session", "block_ids"):
        joined = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(joined, whole[name])
        assert joined.dtype == whole[name].dtype
    lengths = np.concatenate([np.diff(part["indptr"]) for part in parts])
    np.testing.assert_array_equal(lengths, np.diff(whole["indptr"]))
    np.testing.assert_array_equal(lengths, whole["input_tokens"] // 16)


def test_errors_name_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "bad.ptt"
    path.write_text("#PTT1 name=bad block=4\n0,4,0,-1,0,-1,1,0,0\n0,4,0,-1,0,7,0,0,0\n")
    reader = TraceReader(path)
    assert len(reader.read(1)["time_ms"]) == 1
    with pytest.raises(ValueError, match=r"bad\.ptt, line 3: fork must be -1 or one of the 1"):
        reader.read(1)
    with pytest.raises(ValueError, match=r"none\.ptt, line 1: cannot be read"):
        TraceReader(tmp_path / "none.ptt")
