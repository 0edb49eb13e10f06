"""SGLang's cache controller over the disk storage: before and after a kill, and with faults."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
import tiers
import torch
from controller import NUM_PAGES, PAGE, PROMPT, Controller
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.runtime_context import get_context
from sglang.version import __version__

from prefixcache_sglang import SUPPORTED_VERSIONS, refuse_version

START = Callable[..., Controller]


def test_pages_come_back_also_after_a_restart(start: START) -> None:
    first = start()
    assert first.prefetch() == 0
    assert first.back_up() == NUM_PAGES
    assert first.prefetch() == NUM_PAGES
    assert first.prefetch([*PROMPT, *range(64)]) == NUM_PAGES
    assert first.prefetch([*PROMPT[1:], 7]) == 0
    first.close()
    assert start().prefetch() == NUM_PAGES


def test_a_killed_process_leaves_its_pages_to_the_next_one(tmp_path: Path, start: START) -> None:
    tiers.line_of_killed(Path(__file__).with_name("controller.py"), tmp_path, "backed up")
    assert start().prefetch() == NUM_PAGES


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": {"dtype": "bfloat16"}},
        {"arguments": {"context_length": 64}},
        {"arguments": {"json_model_override_args": '{"rope_theta": 1}'}},
        {"weights": "a name"},
    ],
    ids=str,
)
def test_another_configuration_finds_nothing(change: dict[str, Any], start: START) -> None:
    first = start()
    assert first.back_up() == NUM_PAGES
    first.close()
    assert start(**change).prefetch() == 0


def test_other_weights_in_the_same_files_find_nothing(tmp_path: Path, start: START) -> None:
    first = start()
    assert first.back_up() == NUM_PAGES
    first.close()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"WEIGHTS")
    assert start().prefetch() == 0


def test_only_folders_of_ranks_are_made_and_nobody_else_may_open_them(
    tmp_path: Path, start: START
) -> None:
    tiers.check_folders(tmp_path / "kv", start)


def test_new_weights_while_it_runs_find_and_store_nothing(start: START) -> None:
    controller = start()
    controller.back_up()
    get_context().override("test", weight_version="new")
    assert controller.prefetch() == 0
    assert controller.back_up([7, *PROMPT[1:]]) == 0
    controller.close()
    controller = start()
    assert controller.prefetch() == NUM_PAGES
    assert controller.prefetch([7, *PROMPT[1:]]) == 0


class Hung:
    """A store whose disk never answers; its calls keep their timeouts."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_into(self, keys: list[bytes], buffers: list[Any], timeout: float) -> list[bool]:
        return [threading.Event().wait(timeout)] * len(keys)

    put = get_into


def test_pages_that_are_late_are_misses(start: START, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = start()
    assert controller.back_up() == NUM_PAGES
    monkeypatch.setattr(controller.storage, "_deadline", 0.1)
    monkeypatch.setattr(controller.storage, "_store", Hung(controller.storage._store))
    assert controller.prefetch() == 0
    assert controller.back_up([7, *PROMPT[1:]]) == 0


@pytest.mark.timeout(0)
def test_no_injected_fault_gives_other_bytes() -> None:
    """FAULTS=100000 injects as many."""
    prompts = (PROMPT, [7, *PROMPT[1:]])

    def start(root: Path) -> damage.Engine:
        controller = Controller(root, max_bytes=damage.BOUND)
        return damage.Engine(
            controller.storage,
            next((root / "kv").glob("tp0*")),
            lambda: controller.pool.kv_buffer.view(torch.int16).numpy().copy(),
            lambda prompt: controller.back_up(prompts[prompt]),
            lambda prompt: controller.prefetch(prompts[prompt]),
            controller.close,
        )

    damage.damage_lives(start)


def test_an_option_that_is_no_number_is_named(start: START) -> None:
    tiers.check_numbers(start)


def test_the_bound_holds(tmp_path: Path, start: START) -> None:
    bound = 1 << 20
    controller = start(max_bytes=bound)
    for number in range(100):
        controller.back_up([number, *PROMPT[1:]])
        (folder,) = (tmp_path / "kv").glob("tp0*")
        assert damage.num_disk_bytes(folder) <= bound
    assert controller.prefetch([99, *PROMPT[1:]]) == NUM_PAGES


def test_pages_of_several_pools(start: START) -> None:
    """The second pool has the pages 0 to 3 and 5 to 7."""
    controller = start()
    controller.back_up()
    storage, pool, keys = controller.storage, controller.pool, controller.keys(PROMPT)
    storage.register_mem_host_pool_v2(pool, PoolName.SWA)
    indices = pool.alloc(7 * PAGE)
    pool.kv_buffer.view(torch.int16).random_(1, 999)
    pages = [pool.get_data_page(begin).view(torch.int16).clone() for begin in indices[::PAGE]]
    stored = PoolTransfer(name=PoolName.SWA, host_indices=indices, keys=[*keys[:4], *keys[5:8]])
    assert storage.batch_set_v2([stored]) == {PoolName.SWA: [True] * 7}
    cases = (PoolHitPolicy.ALL_PAGES, 10, 4), (PoolHitPolicy.TRAILING_PAGES, 2, 8)
    for policy, num_keys, num_pages in cases:
        transfer = PoolTransfer(name=PoolName.SWA, keys=keys[:num_keys], hit_policy=policy)
        result = storage.batch_exists_v2(keys, [transfer])
        assert result.kv_hit_pages == num_pages
        assert result.extra_pool_hit_pages == {"kv": 10, "swa": num_pages}
    assert result.restorable_prefix_pages == [1, 2, 3, 4, 7, 8]
    pool.kv_buffer.zero_()
    assert storage.batch_get_v2([stored]) == {PoolName.SWA: [True] * 7}
    absent = PoolTransfer(name=PoolName.SWA, host_indices=indices[: 2 * PAGE], keys=keys[8:])
    assert storage.batch_get_v2([absent]) == {PoolName.SWA: [False] * 2}
    for begin, page in zip(indices[::PAGE], pages, strict=True):
        assert torch.equal(pool.get_data_page(begin).view(torch.int16), page)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"enable_lora": True}, "LoRA"), ({"load_format": "dummy"}, "random")],
)
def test_what_cannot_stand_for_pages_is_refused(
    arguments: dict[str, Any], said: str, start: START
) -> None:
    with pytest.raises(ValueError, match=said):
        start(arguments=arguments)


def test_other_versions_are_refused() -> None:
    assert refuse_version(__version__) is None
    assert [refuse_version(f"{name}.post1") for name in SUPPORTED_VERSIONS] == [None, None]
    for version in ("0.5.21", "0.5.24", "0.5.230", "1.5.23"):
        assert version in str(refuse_version(version))


def test_the_line_of_the_guide_starts_it(tmp_path: Path, start: START) -> None:
    page = Path(__file__).parents[3] / "docs/guides/sglang.md"
    (line,) = re.findall(r"--hicache-storage-backend-extra-config '(.+?)'", page.read_text())
    options = json.loads(line) | {"root_dir": str(tmp_path / "guide")}
    assert start(**options).back_up() == NUM_PAGES
