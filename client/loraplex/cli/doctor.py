"""Command `loraplex doctor`: abilities of this machine, and how a model would be served.

Changes nothing; needs no server, and an extra for models only.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any, Final, TypedDict, cast

import typer

import loraplex_proto
from loraplex.cli import terminal
from loraplex.cli.options import JsonOption
from loraplex_contracts.errors import InvalidArgument

# Extra -> distribution -> module, as the distributions in packages/ have them (a test compares).
EXTRAS: Final[dict[str, dict[str, str]]] = {
    "router": {
        "grpcio": "grpc",
        "grpcio-health-checking": "grpc_health",
        "grpcio-reflection": "grpc_reflection",
        "prometheus-client": "prometheus_client",
        "fastapi": "fastapi",
        "httptools": "httptools",
        "uvicorn": "uvicorn",
    },
    "server": {
        "loraplex-server": "loraplex_server",
        "google-re2": "re2",
        "huggingface-hub": "huggingface_hub",
        "jinja2": "jinja2",
        "llguidance": "llguidance",
        "numpy": "numpy",
        "peft": "peft",
        "safetensors": "safetensors",
        "tokenizers": "tokenizers",
        "torch": "torch",
        "transformers": "transformers",
    },
    "demo": {"loraplex-demo": "loraplex_demo"},
}
# What a server of an extra imports: a package may be there and not load.
SERVERS: Final = {
    "router": ("loraplex_router.server", "loraplex_router.http.app"),
    "server": ("loraplex_server.engine.assembly", "loraplex_server.grpc.server"),
}
PACKAGES: Final = ("grpcio", "protobuf", "torch", "transformers", "peft", "safetensors", "tokenizers", "triton")


class Row(TypedDict):
    """A device or an implementation, with the reason where it cannot be used."""

    name: str
    usable: bool
    note: str


class Report(TypedDict):
    """Output of `--json`."""

    loraplex: str
    python: str
    platform: str
    packages: dict[str, str]  # only those that are installed
    missing: dict[str, list[str]]  # by extra
    broken: dict[str, str]  # by extra that is there and does not load: why
    devices: list[Row]
    cpu_kernels: list[Row]
    lora_operations: list[Row]
    attention: list[Row]


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="DIR|ID", show_default=False,
        help="Instead: would this model be served, and how? Reads its configuration, and no weights.",
    ),
]  # fmt: skip


def doctor(
    *,
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(help="Of --model, as the worker's --dtype.")] = "auto",
    device: Annotated[str, typer.Option(help="Of --model, as the worker's --device.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show what is installed and what this machine can run, or how a model would be served.

    Changes nothing. Without --model it always ends well; what cannot be used is listed with the reason. With --model it
    needs loraplex[server], and exits with 0 for a model that would be served, 1 for one that is refused, 2 for a wrong
    command line, and 3 where only loading can tell. The Hub is asked only for a model of the Hub.
    """
    if model is not None:
        if not model:  # such as a variable of a shell that is not set
            raise InvalidArgument("--model must not be empty; leave it out or give a directory or a Hub id")
        _examine_model(model, dtype, device, as_json=as_json)
        return
    report = examine()
    if as_json:
        terminal.write_json(report)
    else:
        _print(report)


def _examine_model(model: str, dtype: str, device: str, *, as_json: bool) -> None:
    from loraplex_server.config import check_device

    check_device(device)
    from loraplex_server.cli.examine import EXIT_CODES, examine_model  # late: it imports torch

    with terminal.progress(f"examining {model}"):
        report = examine_model(model, dtype=dtype, device=device)
    if as_json:
        terminal.write_json(report)
    else:
        rows = [(name.replace("_", " "), _words(value)) for name, value in report.items() if value]
        terminal.write_table(("WHAT", "VALUE"), rows)
    if code := EXIT_CODES[report["verdict"]]:
        raise typer.Exit(code)


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(one) for one in cast("list[object]", value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def examine() -> Report:
    installed = {name: found for name in PACKAGES if (found := _version(name))}
    missing = {
        extra: [name for name, module in needs.items() if find_spec(module) is None] for extra, needs in EXTRAS.items()
    }
    loads = {extra: _problem(modules) for extra, modules in SERVERS.items() if not missing[extra]}
    return {
        "loraplex": loraplex_proto.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": installed,
        "missing": missing,
        "broken": {extra: problem for extra, problem in loads.items() if problem},
        "devices": _devices(),
        "cpu_kernels": _or_reason(_cpu_kernels, "native"),
        "lora_operations": _or_reason(_lora_operations),
        "attention": _or_reason(_attention),
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _problem(modules: Iterable[str]) -> str:
    """The reason that one of these modules does not load; empty where all do."""
    try:
        for module in modules:
            import_module(module)
    except Exception as error:
        return _first_line(error)
    return ""


def _devices() -> list[Row]:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    note = f"{num_cores} cores for this process"
    try:
        torch: Any = import_module("torch")
    except Exception as error:
        return [
            {"name": "cpu", "usable": False, "note": note},
            {"name": "cuda", "usable": False, "note": f"PyTorch does not load: {_first_line(error)}"},
        ]
    rows: list[Row] = [
        {"name": "cpu", "usable": True, "note": f"{note}, {torch.backends.cpu.get_cpu_capability()}"},
    ]
    if not torch.cuda.is_available():
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch sees no CUDA GPU"
        return [*rows, {"name": "cuda", "usable": False, "note": why}]
    for idx in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(idx)
        text = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"
        rows.append({"name": f"cuda:{idx}", "usable": True, "note": text})
    return rows


def _cpu_kernels() -> list[Row]:
    from loraplex_server.backends.cpu.native.library import load

    status = load().status
    if not status.usable:
        return [{"name": "native", "usable": False, "note": status.reason}]
    from loraplex_server.backends.cpu.native.report import examine_cpu

    cpu = examine_cpu()
    note = f"{cpu.isa}, {cpu.num_threads} threads, reads weights at {cpu.read_bytes_per_s / 1e9:.0f} GB/s"
    return [{"name": "native", "usable": True, "note": "; ".join((note, *cpu.unused))}]


def _lora_operations() -> list[Row]:
    from loraplex_server.backends.registry import lora_operations

    return _rows_of(lora_operations())


def _attention() -> list[Row]:
    from loraplex_server.backends.registry import attention_kernels

    return _rows_of(attention_kernels())


def _rows_of(found: Iterable[Any]) -> list[Row]:
    return [{"name": one.name, "usable": one.usable, "note": one.reason} for one in found]


def _or_reason(find: Callable[[], list[Row]], name: str = "all") -> list[Row]:
    """The rows that `find` returns, or one row with the error that a broken installation raises."""
    try:
        return find()
    except Exception as error:
        return [{"name": name, "usable": False, "note": _first_line(error)}]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _print(report: Report) -> None:
    rows = [
        ("loraplex", report["loraplex"], ""),
        ("python", report["python"], report["platform"]),
        *((name, found, "") for name, found in report["packages"].items()),
    ]
    for extra, missing in report["missing"].items():
        problem = report["broken"].get(extra, "")
        state = "missing" if missing else "broken" if problem else "complete"
        rows.append((f"extra {extra}", state, f"pip install 'loraplex[{extra}]'" if missing else problem))
    titled: tuple[tuple[str, list[Row]], ...] = (
        ("device", report["devices"]),
        ("cpu kernels", report["cpu_kernels"]),
        ("lora", report["lora_operations"]),
        ("attention", report["attention"]),
    )
    for title, found in titled:
        rows += [(f"{title} {row['name']}", "usable" if row["usable"] else "no", row["note"]) for row in found]
    terminal.write_table(("WHAT", "STATE", "NOTE"), rows)
