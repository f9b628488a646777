"""guidellm beside `loraplex bench`: the same load on one server, in turns.

    python clients.py IN_DIR --guidellm PROGRAM [--streams 32] [--rounds 3] [FLAG ...]

IN_DIR as `serving.py make` makes it; further flags as `loraplex serve` takes them.

Streams over four adapters, each with its next request when one has ended; guidellm knows one model name, so each
adapter has a process of it. Each run of guidellm stands between two of ours, whose mean it is compared with: other work
on the machine is then the same for both. Lengths of outputs are drawn from a range, else all streams would begin their
requests in the same step. All figures are of requests as their client has recorded them, while all streams ran:
tokens/s, and the medians of the times to the first token and for a further one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from results import Record, add_json_option, recording
from systems import HTTP_READY, READY, Child

from loraplex import AsyncClient
from loraplex.bench import LoadSpec, Popularity, Selection, Session, parse_lengths

GUIDELLM_S = 900.0  # of one run, at most


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was answered. Times in seconds of any clock."""

    start_s: float
    first_token_s: float
    end_s: float
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.start_s

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.first_token_s) / (self.num_tokens - 1)

    def tokens_in(self, begin_s: float, end_s: float) -> float:
        """Tokens that came from `begin_s` to `end_s`, as if the request's tokens had come at a constant rate."""
        overlap_s = min(end_s, self.end_s) - max(begin_s, self.first_token_s)
        return max(0.0, overlap_s) / (self.end_s - self.first_token_s) * self.num_tokens


@dataclass(frozen=True, slots=True)
class Figures:
    tokens_per_s: float
    ttft_s: float
    tpot_s: float


def figures(groups: Sequence[Sequence[Served]]) -> Figures:
    """Figures of clients that ran at the same time. The window begins once all have begun and the first requests are
    over; it ends when one of the clients sends its last request."""
    served = list(itertools.chain(*groups))
    longest_s = max(one.end_s - one.start_s for one in served)
    begin_s = max(min(one.start_s for one in group) for group in groups) + longest_s
    end_s = min(max(one.start_s for one in group) for group in groups)
    inside = [one for one in served if begin_s <= one.start_s and one.end_s <= end_s]
    if not inside:
        raise SystemExit("no request ran while all clients did: raise --requests")
    return Figures(
        sum(one.tokens_in(begin_s, end_s) for one in served) / (end_s - begin_s),
        statistics.median(one.ttft_s for one in inside),
        statistics.median(one.tpot_s for one in inside),
    )


class ServedWithHttp:
    """`loraplex serve` with an HTTP port."""

    def __init__(self, *arguments: str) -> None:
        command = ["loraplex", "serve", *arguments, "--host", "127.0.0.1", "--port", "0", "--http-port", "0"]
        self._child = Child(command, "loraplex serve", merged=True)
        http = self._child.hear_until(HTTP_READY)  # on the line that names the port for gRPC first
        grpc = READY.search(http.string)
        assert grpc is not None
        self.address, self.url = grpc[1], f"http://{http[1]}"

    def close(self) -> None:
        self._child.close()


def by_loraplex(address: str, args: argparse.Namespace) -> list[list[Served]]:
    """Records of `loraplex bench --rate inf --max-inflight STREAMS --popularity distinct`."""
    spec = LoadSpec(
        math.inf,
        num_requests=args.requests * args.streams,
        max_in_flight=args.streams,
        popularity=Popularity("distinct"),
        prompt_tokens=parse_lengths(str(args.prompt), field="--prompt"),
        output_tokens=args.output,
        seed=time.monotonic_ns(),  # no prompt twice, as guidellm has it
    )
    session = Session(spec, Selection(named=tuple(args.adapters)), {"ignore_eos": True})
    asyncio.run(_drive(session, address))
    rows = session.recording.outcomes
    if failed := [one.failure for one in rows if one.failure is not None]:
        raise SystemExit(f"{len(failed)} requests of `loraplex bench` failed: {failed[0]}")
    return [
        [
            Served(one.sent_s, one.first_token_s, one.ended_s, one.num_tokens)
            for one in rows
            if one.sent_s is not None and one.first_token_s is not None and one.ended_s is not None
        ]
    ]


async def _drive(session: Session, address: str) -> None:
    async with AsyncClient(address, timeout_s=600, retries=0) as client:
        await session.run(client)


def by_guidellm(url: str, args: argparse.Namespace, seed: int) -> list[list[Served]]:
    """Records of processes of guidellm, one for each adapter."""
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{name}.json" for name in args.adapters]
        running = [
            subprocess.Popen(
                guidellm_command(url, name, report, args, seed + number),
                env={**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"},
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, (name, report) in enumerate(zip(args.adapters, reports, strict=True))
        ]
        try:
            for one in running:
                _, errors = one.communicate(timeout=GUIDELLM_S)
                if one.returncode:
                    raise SystemExit(f"guidellm ended with status {one.returncode}:\n{errors[-3000:]}")
        finally:
            for one in running:
                one.kill()
        return [_served(json.loads(report.read_text(encoding="utf-8"))) for report in reports]


def guidellm_command(url: str, adapter: str, report: Path, args: argparse.Namespace, seed: int) -> list[str]:
    streams = args.streams // len(args.adapters)
    least, most = args.output.least, args.output.most
    lengths = f"output_tokens={(least + most) // 2},output_tokens_min={least},output_tokens_max={most}"
    options = {
        "backend": f"kind=openai_http,target={url},model={adapter},request_format=/v1/completions",
        "tokenizer": f"kind=huggingface_auto,model={args.inputs / 'model'}",
        "profile": f"kind=concurrent,streams={streams}",
        "constraint": f"kind=max_requests,count={args.requests * streams}",
        "data": f"kind=synthetic_text,prompt_tokens={args.prompt},{lengths}",
        "output": f"kind=json,path={report}",
        "seed": f"kind=static,value={seed}",
    }
    flags = itertools.chain.from_iterable((f"--{name}", value) for name, value in options.items())
    return [args.guidellm, "run", *flags, "--disable-console"]


def _served(report: Mapping[str, Any]) -> list[Served]:
    """Requests of a report. Ends this program where a request has failed."""
    (found,) = report["benchmarks"]
    requests: Mapping[str, list[dict[str, Any]]] = found["requests"]
    for kind in ("errored", "incomplete"):
        if requests[kind]:
            raise SystemExit(f"{len(requests[kind])} requests of guidellm {kind}: {requests[kind][0]['info']}")
    return [
        Served(
            one["request_start_time"],
            one["request_start_time"] + one["time_to_first_token_ms"] / 1000,
            one["request_end_time"],
            one["output_tokens"],
        )
        for one in requests["successful"]
    ]


def mean(several: Iterable[Figures]) -> Figures:
    found = list(several)
    return Figures(*(statistics.fmean(getattr(one, field.name) for one in found) for field in fields(Figures)))


def measure(args: argparse.Namespace, more_flags: Sequence[str], record: Record) -> None:
    flags = [str(args.inputs / "model"), "--adapters", str(args.inputs / "adapters"), "--threads", str(args.threads)]
    server = ServedWithHttp(*flags, *more_flags)
    ratios: list[Figures] = []
    try:
        by_loraplex(server.address, args)  # warms up
        before = figures(by_loraplex(server.address, args))
        record({"client": "loraplex bench", **asdict(before)})
        for number in range(args.rounds):
            groups = by_guidellm(server.url, args, 1000 * number)
            theirs, num_requests = figures(groups), sum(map(len, groups))
            record({"client": "guidellm", "requests": num_requests, "errors": 0, **asdict(theirs)})
            after = figures(by_loraplex(server.address, args))
            record({"client": "loraplex bench", **asdict(after)})
            ours = mean((before, after))
            before = after
            names = [field.name for field in fields(Figures)]
            ratios.append(Figures(*(getattr(theirs, name) / getattr(ours, name) for name in names)))
            record({"guidellm / ours": asdict(ratios[-1])})
    finally:
        server.close()
    medians = {field.name: statistics.median(getattr(one, field.name) for one in ratios) for field in fields(Figures)}
    record({"guidellm / ours, medians": medians})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--guidellm", required=True, help="the program, of an environment of its own")
    parser.add_argument("--adapters", nargs="+", default=["a000", "a001", "a002", "a003"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=6, help="of each stream")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--output", type=partial(parse_lengths, field="--output"), default="16-48", help="tokens, N-M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the server")
    args, more_flags = parser.parse_known_args()
    # Its processes run in a folder of their own.
    args.inputs, args.guidellm = args.inputs.absolute(), os.path.abspath(shutil.which(args.guidellm) or args.guidellm)
    with recording(args.json) as record:
        measure(args, more_flags, record)


if __name__ == "__main__":
    main()
