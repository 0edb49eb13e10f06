"""Kills servers that answer over a kept cache; each next one must answer as one without a cache.

    python tests/killed_server.py COUNT [SEED]

Tiny models. Several clients ask, with and without a salt, while the cache is cleared, resized and
given other weights, until `kill -9` at a random moment. The next server, of either weights, answers
all prompts first: text and log probabilities bit for bit as a cold server, and no block that fails
its checksum. Most have a disk behind the cache too. Prints how many blocks were restored, how many
tokens hit in those first answers, and how many came from the disk later.
"""

from __future__ import annotations

import logging
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from support.server_process import PREFIXCACHE, ServerProcess, server_process

NUM_CLIENTS, NUM_PROMPTS, MOST_ANSWERS = 3, 12, 100
PROMPTS = [" ".join(f"{name}{place}" for place in range(12)) for name in "abcdefghijkl"]
FLAGS = ("--dtype", "float32", "--num-blocks", "40", "--served-model-name", "tiny")
Answer = tuple[str, Any]


@dataclass
class Kills:
    """Servers of `models`, whose file lies below `folder`; `expected` by model and prompt."""

    models: list[Path]
    folder: Path
    choose: random.Random
    expected: dict[tuple[int, int], Answer] = field(default_factory=dict)
    num_restored: int = 0
    num_loaded: int = 0
    num_hit: int = 0
    num_asked: int = 0

    def serving(self, model: int, *flags: str) -> Any:
        command = [*PREFIXCACHE, "serve", str(self.models[model]), "--port", "0", *FLAGS, *flags]
        return server_process(command, self.folder / "log")

    def compute_expected(self) -> None:
        for model in range(len(self.models)):
            with self.serving(model, "--no-enable-prefix-caching") as server:
                for prompt in range(NUM_PROMPTS):
                    self.expected[model, prompt], _ = ask(server, prompt)

    def kill_one(self) -> None:
        """One server: what it finds is right, and it dies while it computes more."""
        model = self.choose.randrange(len(self.models))
        flags = ["--kv-cache-dir", str(self.folder / "kv")]
        if self.choose.random() < 0.75:
            flags += ["--disk-cache-memory", "16MiB", "--disk-cache-dir", str(self.folder / "disk")]
        with self.serving(model, *flags) as server:
            for prompt in range(NUM_PROMPTS):
                answer, used = ask(server, prompt)
                assert answer == self.expected[model, prompt], f"prompt {prompt} of model {model}"
                self.num_hit += used["cached_tokens"]
            self.num_asked += NUM_PROMPTS
            self.num_restored += metric(server, "kv_file_restored_blocks")
            assert metric(server, "kv_file_failed_checks") == 0, "a kill tears no block"
            if flags[2:]:
                assert metric(server, "disk_damaged_blocks") == 0, "a kill tears no block"
            traffic = Traffic(self, server, model, random.Random(self.choose.random()))
            traffic.run(self.choose.randrange(1, MOST_ANSWERS))
        self.num_loaded += traffic.num_loaded
        assert not traffic.wrong, traffic.wrong
        self.num_asked += traffic.num_asked


class Traffic:
    """Clients of one server, until it is killed."""

    def __init__(
        self, kills: Kills, server: ServerProcess, model: int, choose: random.Random
    ) -> None:
        self._kills, self._server, self._choose = kills, server, choose
        # Weights that answers may be of: while they change, both.
        self._models = [model]
        self.wrong: list[str] = []
        self.num_asked = self.num_loaded = 0

    def run(self, answers: int) -> None:
        """All clients and the commands, and the kill soon after the clients have these answers."""
        threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]
        threads.append(threading.Thread(target=self._command))
        for thread in threads:
            thread.start()
        while self.num_asked < answers and threads[0].is_alive():
            time.sleep(0.001)
        time.sleep(self._choose.random() * 0.05)
        self._server.process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()

    def _ask(self) -> None:
        with suppress(httpx.TransportError):
            while True:
                self._ask_once(self._choose.randrange(NUM_PROMPTS))

    def _ask_once(self, prompt: int) -> None:
        before = list(self._models)
        answer, used = ask(self._server, prompt, self._choose.choice([None, None, "one", "other"]))
        self.num_loaded += used.get("disk_cached_tokens", 0)
        right = {*before, *self._models}
        if answer not in [self._kills.expected[model, prompt] for model in right]:
            self.wrong.append(f"prompt {prompt}, models {right}: {answer}")
        self.num_asked += 1

    def _command(self) -> None:
        with suppress(httpx.TransportError):
            while True:
                self._command_once(self._choose.random())

    def _command_once(self, number: float) -> None:
        if number < 0.1:
            post(self._server, "/reset_prefix_cache")
        elif number < 0.2:
            model = self._choose.randrange(len(self._kills.models))
            self._models.append(model)
            path = {"model_path": str(self._kills.models[model])}
            post(self._server, "/update_weights_from_disk", path)
            self._models = [model]
        elif number < 0.9:
            size = self._choose.choice([24, 32, 40])
            post(self._server, "/prefix_cache/resize", {"num_blocks": size})
        time.sleep(self._choose.random() * 0.1)


def post(server: ServerProcess, path: str, body: Mapping[str, Any] | None = None) -> None:
    answer = httpx.post(server.address + path, json=body, timeout=240)
    assert answer.status_code < 300, answer.text


def ask(
    server: ServerProcess, prompt: int, salt: str | None = None
) -> tuple[Answer, dict[str, int]]:
    """The text with its log probabilities, and how many tokens were cached, and where."""
    body = {"prompt": PROMPTS[prompt], "max_tokens": 8, "temperature": 0, "logprobs": 3}
    if salt is not None:
        body["cache_salt"] = salt
    answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=240).json()
    (choice,) = answer["choices"]
    return (choice["text"], choice["logprobs"]), answer["usage"]["prompt_tokens_details"]


def metric(server: ServerProcess, name: str) -> int:
    text = httpx.get(f"{server.address}/metrics", timeout=240).text
    found = re.search(rf"^prefixcache:{name}_total\S* (\S+)$", text, re.MULTILINE)
    assert found, f"no {name}"
    return int(float(found[1]))


def kill_servers(models: list[Path], folder: Path, count: int, seed: int) -> Kills:
    """Kills `count` servers; raises what is wrong."""
    kills = Kills(models, folder, random.Random(seed))
    kills.compute_expected()
    for _ in range(count):
        kills.kill_one()
    return kills


def main(count: int, seed: int = 0) -> None:
    from support.tiny_models import make_checkpoint

    logging.getLogger("httpx").setLevel(logging.WARNING)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = [make_checkpoint(folder / f"model-{one}", seed=one) for one in range(2)]
        kills = kill_servers(models, folder, count, seed)
    print(
        f"{count} servers killed: {kills.num_asked} answers, all as a cold server's; "
        f"{kills.num_restored} blocks restored, {kills.num_hit} tokens hit in first answers, "
        f"{kills.num_loaded} came from the disk later"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
