"""Shows what a server caches and forgets, as it happens, with pyzmq and msgspec alone.

    prefixcache serve --kv-events-config '{"enable_kv_cache_events": true}'
    python examples/kv_events_reader.py tcp://127.0.0.1:5557

It reads vLLM's events as well. `prefixcache.events.reader.EventReader` misses none.
"""

import sys

import msgspec
import zmq

with zmq.Context() as context, context.socket(zmq.SUB) as events:
    events.connect(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5557")
    events.subscribe(b"")
    cached: set[int] = set()
    while True:
        _, sequence, payload = events.recv_multipart()
        for event in msgspec.msgpack.decode(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    cached.update(event["block_hashes"])
                case "BlockRemoved":
                    cached.difference_update(event["block_hashes"])
                case "AllBlocksCleared":
                    cached.clear()
            print(int.from_bytes(sequence, "big"), event["type"], f"{len(cached)} blocks cached")
