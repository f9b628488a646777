"""Open-loop load on a worker, over popularities: command `serving.py open`.

What `loraplex bench` measures on any server, here on one whose adapters and slots are known: each popularity has a
server of its own that starts cold. Prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from dataclasses import asdict
from pathlib import Path

from inprocess import worker_flags
from results import Record, add_json_option, recording
from systems import Server

from loraplex import AsyncClient
from loraplex.bench import LoadSpec, Selection, Session, parse_lengths, parse_popularity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--cv", type=float, default=1.0, help="0 evenly spaced, 1 Poisson, more in bursts")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
    parser.add_argument("--popularity", nargs="+", default=["identical", "distinct", "uniform", "skewed", "zipf:1"])
    parser.add_argument("--adapters", type=int, help="how many of those in IN_DIR take part; default: all")
    parser.add_argument("--slots", type=int, default=64, help="how many of them are resident at most")
    parser.add_argument("--prompt", default="64", help="tokens, N or N-M")
    parser.add_argument("--output", default="64", help="tokens, N or N-M")
    parser.add_argument("--router", action="store_true", help="through a router")
    parser.add_argument("--seed", type=int, default=0)


def measure(args: argparse.Namespace) -> None:
    with recording(args.json) as record:
        _measure(args, record)


def _measure(args: argparse.Namespace, record: Record) -> None:
    for popularity in args.popularity:
        spec = LoadSpec(
            args.rate,
            args.cv,
            args.seconds if args.rate < math.inf else None,
            popularity=parse_popularity(popularity),
            prompt_tokens=parse_lengths(args.prompt, field="--prompt"),
            output_tokens=parse_lengths(args.output, field="--output"),
            seed=args.seed,
        )
        session = Session(spec, Selection(num_adapters=args.adapters), {"ignore_eos": True})
        with tempfile.TemporaryDirectory() as store:
            flags = [*worker_flags(args.inputs, Path(store), lora=True), "--adapter-slots", str(args.slots)]
            servers = [Server("worker", *flags, *args.flags)]
            try:
                if args.router:
                    servers.append(Server("router", "--worker", servers[0].address))
                asyncio.run(_drive(session, servers[-1].address))
            finally:
                for server in reversed(servers):
                    server.close()
        figures = asdict(session.recording.summary())
        record({**session.described(), "slots": args.slots, **figures})


async def _drive(session: Session, address: str) -> None:
    async with AsyncClient(address, timeout_s=600, retries=0) as client:
        await session.run(client)
