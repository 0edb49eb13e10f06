"""First come, first served beside long hits first, over HTTP, at twice the rate that it can serve.

    python benches/serving/admission_http.py [--model MODEL] [--repeats 3] [--output FILE]

The workloads of `admission.py`, smaller, against two servers with the default model, one for each
policy. Requests come at fixed times, twice as many a second as `fcfs` serves when all wait from the
beginning; nothing is shed, and percentiles are over all of them. Times are those of a client, so
other work on the machine counts. Therefore both servers work at the same time: what slows one down
slows the other down, and their ratios are what is to be looked at.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from admission import POLICIES, Arrival, conversations, facts, options, shared_prefixes

from prefixcache.tools.answer_stream import stream_events

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from server_process import PREFIXCACHE, server_process

RECORD = Path(__file__).parents[1] / "record" / "admission-http.json"
BLOCK = 16
OUTPUT_TOKENS = 4
# The pool holds half of the prefixes and two requests more.
WORKLOADS = {
    "shared-prefix": partial(shared_prefixes, prefixes=6, length=128),
    "multi-turn": partial(conversations, count=10, length=48),
}
POOL_TOKENS = 640


async def send(client: httpx.AsyncClient, prompt: list[int], due: float) -> float:
    """Seconds from when the request was due to its first token."""
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    first = None
    async for event in stream_events(client, "/v1/completions", body):
        if first is None and event.get("choices"):
            first = time.perf_counter() - due
    assert first is not None
    return first


async def serve(address: str, arrivals: list[Arrival], rate: float | None) -> dict[str, float]:
    """All requests, `rate` in a second or all at once, to a server whose cache is empty."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
        (await client.post("/reset_prefix_cache")).raise_for_status()
        before = (await client.get("/prefix_cache/stats")).json()
        begun = time.perf_counter() + 0.1
        dues = [begun + (one.at / rate if rate else 0.0) for one in arrivals]
        pairs = zip(arrivals, dues, strict=True)
        found = await asyncio.gather(*(send(client, one.prompt, due) for one, due in pairs))
        seconds = time.perf_counter() - begun
        after = (await client.get("/prefix_cache/stats")).json()
    p50, p90, p99 = np.percentile(found, [50, 90, 99])
    queried = after["queried_tokens"] - before["queried_tokens"]
    return {
        "hit_rate": round((after["hit_tokens"] - before["hit_tokens"]) / queried, 4),
        "ttft_p50_s": round(float(p50), 3),
        "ttft_p90_s": round(float(p90), 3),
        "ttft_p99_s": round(float(p99), 3),
        "seconds": round(seconds, 2),
    }


async def serve_both(
    addresses: dict[str, str], arrivals: list[Arrival], rate: float | None
) -> dict[str, dict[str, float]]:
    served = (serve(address, arrivals, rate) for address in addresses.values())
    return dict(zip(addresses, await asyncio.gather(*served), strict=True))


def measure(
    addresses: dict[str, str], arrivals: list[Arrival], repeats: int, load: float
) -> dict[str, Any]:
    at_once = asyncio.run(serve_both(addresses, arrivals, None))
    rate = load * len(arrivals) / at_once["fcfs"]["seconds"]
    runs = [asyncio.run(serve_both(addresses, arrivals, rate)) for _ in range(repeats)]
    pairs = [(run["fcfs"], run["cache-aware"]) for run in runs]
    ratios = [
        {name: round(fcfs[name] / other[name], 2) for name in fcfs if name != "hit_rate"}
        for fcfs, other in pairs
    ]
    return {"requests": len(arrivals), "rate": rate, "fcfs_to_cache_aware": ratios, "runs": runs}


def main() -> None:
    parser = options(__doc__, 600.0, RECORD)
    parser.add_argument("--model", help="the server's default without")
    asked = parser.parse_args()
    found = facts(asked, POOL_TOKENS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses: dict[str, str] = {}
        for policy in POLICIES:
            command = [*PREFIXCACHE, "serve", *([asked.model] if asked.model else [])]
            command += ["--port", "0", "--served-model-name", "bench", "--block-size", str(BLOCK)]
            command += ["--num-blocks", str(1 + POOL_TOKENS // BLOCK), "--max-num-seqs", "4"]
            command += ["--max-num-batched-tokens", "256", "--max-model-len", "512"]
            command += ["--scheduling-policy", policy, "--max-queue", "100000"]
            command += ["--max-waiting-per-key", "100000"]
            command += ["--max-queue-delay", str(asked.max_queue_delay)]
            server = stack.enter_context(server_process(command, folder / f"{policy}.log"))
            addresses[policy] = server.address
        for name, workload in WORKLOADS.items():
            print(name, flush=True)
            found[name] = measure(addresses, workload(asked.seed), asked.repeats, asked.load)
            print(json.dumps(found[name]), flush=True)
    asked.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
