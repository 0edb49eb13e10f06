"""A damaged file of the disk tier: right bytes or a miss, and what comes after it hits again."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from disk_lives import MIB, SCOPE, Tiered
from prefixcache.kv.tiers.disk_store import FILE_NAME, DiskStore, _result_code
from support.repeatable import bounded

# Blocks of printable bytes, so that a log with any of them is noticed.
PROMPTS = [1065, 2080, 3095]
LEAST_BYTES = 5 * MIB // 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def content(folder: Path) -> dict[Path, bytes]:
    """The files of a life that wrote more than the least bound allows."""
    tiered = Tiered(folder)
    for first in [*range(10_000, 20_000, 1000), *PROMPTS, 50_000]:
        tiered.compute(first)
        tiered.settle()
    tiered.tier.close()
    return {path: path.read_bytes() for path in folder.iterdir()}


def live(folder: Path, max_bytes: int) -> tuple[int, bool]:
    """How many blocks a life got of earlier ones, and whether it had all of its own."""
    tiered = Tiered(folder, open_store=lambda *_: DiskStore(folder, max_bytes, SCOPE))
    counts = tiered.tier.counts
    tiered.until(lambda: tiered.tier._is_listed or counts().failures)
    num_earlier = sum(map(len, hits(tiered)))
    for first in [*PROMPTS, 60_000]:
        tiered.compute(first)
        tiered.settle()
    own = hits(tiered)
    tiered.tier.close()
    tiered.cache.validate()
    assert not tiered.tier._thread.is_alive()
    return num_earlier, counts().failures == 0 and [*map(len, own)] == [7] * len(PROMPTS)


def hits(tiered: Tiered) -> list[list[int]]:
    """What comes back of each prompt, which must be what was computed."""
    loaded = [tiered.load(tiered.hashes(first)) for first in PROMPTS]
    for first, numbers in zip(PROMPTS, loaded, strict=True):
        assert numbers == [(first + place) % 251 for place in range(len(numbers))]
    return loaded


def check_log(text: str) -> None:
    assert "Traceback" not in text
    assert not re.search(r"(.)\1{7}", text), "it quotes blocks"


def sql(*statements: str) -> Callable[[Path], None]:
    """Each on a connection of its own."""

    def spoil(file: Path) -> None:
        for statement in statements:
            db = sqlite3.connect(file, isolation_level=None)
            db.executescript(statement)
            db.close()

    return spoil


def patch(place: int, data: bytes) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place : place + len(data)] = data
        file.write_bytes(content)

    return spoil


SCHEMA = "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = "
# What one bit of a value's or a table's record may turn it into, and what SQL can make of a file.
NONSENSE: dict[str, Callable[[Path], None]] = {
    "values are text": sql("UPDATE data SET value = CAST(value AS TEXT)"),
    "values are numbers": sql("UPDATE data SET value = 5"),
    "values are null": sql(SCHEMA + "replace(sql, 'NOT NULL', '')", "UPDATE data SET value = NULL"),
    "keys are short": sql("UPDATE blocks SET key = substr(key, 1, 40)"),
    "keys are long": sql("UPDATE blocks SET key = CAST(key || x'00' AS BLOB)"),
    "keys are text": sql("UPDATE blocks SET key = CAST(key AS TEXT)"),
    "keys are numbers": sql("UPDATE blocks SET key = id"),
    "a last use": sql("UPDATE blocks SET used = 9223372036854775807 WHERE id = 5"),
    "a use that is text": sql("UPDATE blocks SET used = 'abc' WHERE id = 5"),
    "a use that is a fraction": sql("UPDATE blocks SET used = 1e300 WHERE id = 5"),
    "no values": sql("DELETE FROM data"),
    "no keys": sql("DELETE FROM blocks"),
    "no tables": sql("PRAGMA writable_schema = ON; DELETE FROM sqlite_master"),
    "no index": sql("DROP INDEX by_use"),
    "a schema that is no text": sql(SCHEMA + "CAST(x'ff3d3d3d3d3d3d3d3d' AS TEXT)"),
    "another version": sql("PRAGMA user_version = 9"),
    "a header that forbids writes": patch(18, b"\3"),
    "a header without automatic vacuum": patch(52, bytes(4)),
    "a header without incremental vacuum": patch(64, bytes(4)),
    "a file that was vacuumed whole": sql("PRAGMA auto_vacuum = NONE; VACUUM"),
}
HEALED_AT_ONCE = {name for name in NONSENSE if name.startswith(("values", "keys", "no values"))}


@pytest.mark.parametrize("max_bytes", [LEAST_BYTES, 8 * MIB])
@pytest.mark.parametrize("name", NONSENSE)
def test_a_file_of_nonsense_is_of_use_again(folder, content, caplog, name, max_bytes):
    NONSENSE[name](folder / FILE_NAME)
    lives = [live(folder, max_bytes) for _ in range(3)]
    assert [works for _, works in lives[1:]] == [True, True]
    assert lives[2][0] == 7 * len(PROMPTS)
    if name in HEALED_AT_ONCE:
        assert lives[0][1]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= max_bytes
    check_log(caplog.text)


def test_whatever_lies_in_the_folder_no_block_comes_back_wrong(folder, content, caplog, seed):
    choose = random.Random(seed)
    content[folder / f"{FILE_NAME}-journal"] = b""
    num_earlier = 0
    for _ in range(bounded(30, 1000)):
        for path, data in content.items():
            path.touch(mode=0o600)
            path.write_bytes(damaged(data, choose))
        before = True
        for _ in range(3):
            count, works = live(folder, choose.choice([LEAST_BYTES, 8 * MIB]))
            assert before or works, "a life that failed left a file that is of no use"
            before, num_earlier = works, num_earlier + count
    assert num_earlier
    check_log(caplog.text)


def damaged(content: bytes, choose: random.Random) -> bytes:
    """Cut, or with some bits or a part of any length, from elsewhere or anything, in its places."""
    if choose.random() < 0.3:
        return content
    if choose.random() < 0.2:
        return content[: choose.randrange(len(content) + 1)]
    data = bytearray(content or choose.randbytes(choose.randrange(1, 3000)))
    for _ in range(choose.choice([1, 1, 5, 50])):
        size = min(len(data), choose.choice([1, 1, 8, 512, 1 << 14]))
        # Anywhere, in the header, in the text of the schema, or where a page says what it holds.
        places = choose.choice([(0, len(data)), (0, 100), (15_500, 16_384), (1 << 14, len(data))])
        at = min(choose.randrange(*places), len(data) - size) if len(data) > 1 << 15 else 0
        at = at & -(1 << 14) if places[0] == 1 << 14 else at
        source = choose.randrange(len(data) - size + 1)
        part = data[source : source + size]
        bit = bytes([data[at] ^ 1 << choose.randrange(8)])
        new = choose.choice([part, choose.randbytes(size), bytes(size), bit, bit])
        data[at : at + len(new)] = new
    return bytes(data)


def raised(statement: str, db: sqlite3.Connection) -> sqlite3.Error:
    with pytest.raises(sqlite3.Error) as caught:
        db.executescript(statement)
    return caught.value


def test_what_passes_is_known_by_its_code_or_by_its_text(tmp_path):
    file = tmp_path / "file"
    first, second = (sqlite3.connect(file, isolation_level=None, timeout=0) for _ in range(2))
    first.executescript("CREATE TABLE t (a); BEGIN EXCLUSIVE")
    errors = {5: raised("INSERT INTO t VALUES (1)", second)}
    first.execute("COMMIT")
    second.execute("PRAGMA query_only = ON")
    errors[8] = raised("INSERT INTO t VALUES (1)", second)
    first.execute("PRAGMA max_page_count = 1")
    errors[13] = raised("CREATE TABLE u AS SELECT randomblob(20000)", first)
    with pytest.raises(sqlite3.Error) as caught:
        sqlite3.connect(tmp_path)
    errors[14] = caught.value
    first.executescript("INSERT INTO t VALUES (1)")
    rows = first.execute("SELECT * FROM t UNION ALL SELECT 2")
    rows.fetchone()
    errors[6] = raised("DROP TABLE t", first)
    errors[1] = raised("SELECT * FROM nothing", first)
    for code, error in errors.items():
        by_text = 0 if code == 1 else code
        # Python 3.10 has no codes.
        assert _result_code(error) == (code if hasattr(error, "sqlite_errorcode") else by_text)
        assert _result_code(type(error)(str(error))) == by_text
    for db in (first, second):
        db.close()
