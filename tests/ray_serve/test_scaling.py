"""Replicas that come and go while streams run."""

from __future__ import annotations

import asyncio

import httpx
from cluster import REPLICA, Cluster, Traffic, bodies_of, completion, said, streamed, until


async def test_replicas_come_and_go_under_load(scaling: Cluster, one_server: str) -> None:
    bodies = bodies_of(8, max_tokens=300, ignore_eos=True)
    expected = [said(await completion(one_server, **body))[0]["text"] for body in bodies]
    with Traffic(scaling.address, bodies[:1], stream=True) as few:
        with Traffic(scaling.address, bodies, stream=True) as many:
            await until(lambda: len(scaling.processes(REPLICA)) == 3)
            await asyncio.to_thread(scaling.wait_for_replicas, 3)
            num_before = len(many.answers)
            await until(lambda: len(many.answers) > num_before + len(bodies))
        await until(lambda: len(scaling.processes(REPLICA)) == 1)
        num_before = len(few.answers)
        await until(lambda: len(few.answers) > num_before + 1)
    whole = 0
    for index, one in [*few.answers, *many.answers]:
        assert isinstance(one, httpx.Response)
        assert one.status_code == 200, one.text
        text, error = streamed(one.text.splitlines())
        assert text == expected[index] or (error is not None and expected[index].startswith(text))
        whole += error is None
    # Ray gives a replica that goes 20 s to end what it has begun.
    assert whole > len(bodies)
