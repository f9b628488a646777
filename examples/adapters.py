"""Adapters at run time: list, load, pin and unload.

    python examples/adapters.py [ADDRESS]

Requests load adapters by themselves. Loading ahead saves the first request's wait, and binds a name to files that were
replaced; unloading makes the server forget a name.
"""

import sys

from loraplex import AdapterNotFound, Client

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(address) as client:
    for row in client.adapters.load("toml", pin=True):  # behind a router: one row per worker
        print(f"loaded {row.adapter_id}: {row.kind}, rank {row.rank}, {row.num_bytes} bytes, in tier {row.tier}")

    for row in client.adapters.iterate(include_unloaded=True):  # page by page, however many there are
        print(f"{row.adapter_id:20} {row.kind or '-':9} {row.state}{' (pinned)' if row.pinned else ''}")

    client.adapters.unload("toml")
    print("toml is", client.adapters.get("toml")[0].state)

    try:
        client.generate("hello", adapter_id="no-such-adapter")
    except AdapterNotFound as error:
        print(f"{error.reason}: {error}")
