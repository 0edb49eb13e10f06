"""Three replicas under Ray Serve: how much of the prompts is cached, by who chooses the replica.

    make bench-replicas [ARGS="--turns 4 --json OUT"]

Conversations of several groups, each group with a system prompt, take turns in a random order, a
few at a time. All prefixes together are more than one replica holds: at 4 turns half as much again.
Rows: our routing; Ray's own routers; one server with three times the memory, which is the most that
routing can reach. Nothing is timed. A replica's load is the tokens that it computed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

from prefixcache.config.engine_config import EngineConfig  # noqa: E402
from prefixcache.ray_serve.environment import prepare_environment  # noqa: E402
from prefixcache.tools.bench.machine import write_record  # noqa: E402
from support.tiny_models import make_checkpoint  # noqa: E402

BLOCK_SIZE = 16
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 192, 40, 8
GROUPS = 6
ROUTERS = {
    "prefix routing": "prefixcache.ray_serve.router:PrefixRequestRouter",
    "power of two choices (Ray's default)": (
        "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"
    ),
    "PrefixCacheAffinityRouter (Ray LLM)": "affinity_router:AffinityRouter",
}
ONE_SERVER = "one server, three times the memory"


@dataclass
class Row:
    """What one way of choosing came to; `spread` is the busiest replica's load over the mean."""

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: dict[str, int]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def spread(self) -> float:
        loads = self.computed_tokens.values()
        return max(loads) * len(loads) / sum(loads)


class Conversation:
    """Its prompts grow by real answers."""

    def __init__(self, system: list[int], seed: str) -> None:
        self._random = random.Random(seed)
        self._prompt = list(system)

    async def turn(self, client: httpx.AsyncClient, model: str) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were cached."""
        self._prompt += draw(self._random, TURN_TOKENS)
        body = {
            "model": model,
            "prompt": self._prompt,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        fields = answer.json()
        self._prompt += fields["choices"][0].get("token_ids") or draw(self._random, ANSWER_TOKENS)
        usage = fields["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def draw(choose: random.Random, count: int) -> list[int]:
    return [choose.randrange(3, 300) for _ in range(count)]


async def measure(address: str, name: str, args: argparse.Namespace) -> Row:
    choose = random.Random(args.seed)
    systems = [draw(choose, SYSTEM_TOKENS) for _ in range(GROUPS)]
    numbers = range(args.conversations)
    talks = [Conversation(systems[n % GROUPS], f"{args.seed} {n}") for n in numbers]
    turns = []
    limit = asyncio.Semaphore(args.concurrency)
    async with httpx.AsyncClient(base_url=address, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def one(talk: Conversation) -> tuple[int, int]:
            async with limit:
                return await talk.turn(client, model)

        for _ in range(args.turns):
            choose.shuffle(talks)
            turns += await asyncio.gather(*map(one, talks))
        metrics = (await client.get("/metrics")).text
    prompt, cached = (sum(column) for column in zip(*turns, strict=True))
    return Row(name, len(turns), prompt, cached, computed_tokens(metrics))


def computed_tokens(metrics: str) -> dict[str, int]:
    """Prompt tokens that each replica did not find in its cache, by its name."""
    found: dict[str, int] = {}
    for kind, labels, value in re.findall(
        r"^prefixcache:prefix_cache_(queries|hits)_total\{(.*)\} (\S+)$", metrics, re.MULTILINE
    ):
        replica = re.search(r'replica="([^"]*)"', labels)
        name = replica[1] if replica else "one"
        found[name] = found.get(name, 0) + (1 if kind == "queries" else -1) * int(float(value))
    return found


@contextmanager
def cluster() -> Iterator[str]:
    """A Ray cluster on this machine, with its HTTP server; its address."""
    prepare_environment(on_this_machine_alone=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    import ray
    from ray import serve

    ray.init(
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_cpus=8,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
    )
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(folder: str, name: str, address: str, args: argparse.Namespace) -> Row:
    from ray import serve

    from prefixcache.ray_serve.application import build_application
    from prefixcache.ray_serve.ray_options import RayOptions
    from prefixcache.server.options.serve_options import ServeOptions

    replicas = 1 if name == ONE_SERVER else args.replicas
    config = EngineConfig.from_flags(
        model=folder,
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=args.num_blocks * (args.replicas // replicas),
        max_num_seqs=8 * (args.replicas // replicas),
    )
    application = build_application(
        config,
        ServeOptions(public_metrics=True),
        RayOptions(num_replicas=replicas, replica_cpus=0.1),
        router=ROUTERS.get(name, ROUTERS["prefix routing"]),
    )
    serve.run(application, name="bench")
    try:
        return asyncio.run(measure(address, name, args))
    finally:
        serve.delete("bench")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--num-blocks", type=int, default=240, help="of a replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="*", default=[*ROUTERS, ONE_SERVER])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, cluster() as address:
        make_checkpoint(Path(folder), max_position_embeddings=2048)
        for name in args.rows:
            rows.append(row := run(folder, name, address, args))
            computed = sum(row.computed_tokens.values())
            print(
                f"| {name} | {row.hit_rate:.1%} | {computed} | {row.spread:.2f} |",
                row.computed_tokens,
                flush=True,
            )
    shown = [
        asdict(row) | {"hit_percent": 100 * row.hit_rate, "spread": row.spread} for row in rows
    ]
    command = "make bench-replicas ARGS=" + shlex.quote(shlex.join(sys.argv[1:]))
    write_record(args.json, command, rows=shown)


if __name__ == "__main__":
    main()
