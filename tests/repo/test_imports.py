"""Import order of packages and folders, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "loraplex_contracts": "contracts",
    "loraplex_proto": "proto",
    "loraplex_runtime": "runtime",
    "loraplex": "client",
    "loraplex_router": "router",
    "loraplex_adapters": "adapters",
    "loraplex_server": "server",
    "loraplex_training": "training",
    "loraplex_demo": "demo",
    "loraplex_fleet": "fleet",
}
PACKAGES = {package: ROOT / folder / package for package, folder in FOLDERS.items()}
# Who may import whom, anywhere in a file (lazily too).
WIRE = {"loraplex_contracts", "loraplex_proto", "loraplex_runtime"}
SERVING = {"loraplex_adapters", "loraplex_server"}
ALLOWED = {
    "loraplex_contracts": {"loraplex_contracts"},
    "loraplex_proto": {"loraplex_contracts", "loraplex_proto"},
    "loraplex_runtime": WIRE,
    "loraplex": WIRE | {"loraplex"},
    "loraplex_router": WIRE | {"loraplex_router"},
    "loraplex_adapters": {"loraplex_contracts", "loraplex_adapters"},
    "loraplex_server": WIRE | SERVING,
    "loraplex_training": WIRE | SERVING | {"loraplex_training"},
    "loraplex_demo": WIRE | SERVING | {"loraplex_training", "loraplex_demo"},
    "loraplex_fleet": WIRE | {"loraplex", "loraplex_router", "loraplex_server", "loraplex_fleet"},
}
# Commands that start something of another package say so here; each import is inside the command's function.
COMMAND_EXCEPTIONS = {
    ("client/loraplex/cli/doctor.py", "loraplex_server"),
    ("client/loraplex/cli/adapters.py", "loraplex_server"),
    ("server/loraplex_server/cli/serve.py", "loraplex_router"),
    ("demo/loraplex_demo/cli.py", "loraplex"),
}
# The folders and modules of a package in the order in which they may use each other, ground floor first.
ORDER = {
    "loraplex_adapters": ("io", "weights", "formats", "sources", "store", "cache"),
    "loraplex_server": (
        *("config", "library_errors", "text", "grammars", "kv", "layers", "sampling", "backends", "model"),
        *("scheduler", "speculation", "engine", "frontend", "grpc", "cli"),
    ),
    "loraplex_router.http": (
        *("page", "metrics", "names", "errors", "faults", "streaming", "router_calls", "dialects", "fields"),
        *("grammars", "mixtures", "origins", "prompt_only", "openai", "tgi", "sglang", "shared_routes", "pooling"),
        *("admin", "operations", "middleware", "server", "app"),
    ),
}
TORCH_FREE = (
    "loraplex_contracts",
    "loraplex_proto",
    "loraplex_runtime",
    "loraplex",
    "loraplex_router",
    "loraplex_fleet",
)
TORCH_LIKE = {"torch", "transformers", "peft", "safetensors", "triton", "numpy"}


def modules_of(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
    return found


def sources(package: str) -> list[Path]:
    files = [p for p in PACKAGES[package].rglob("*.py") if "_pb2" not in p.name]
    assert files, package
    return files


@pytest.mark.parametrize("package", PACKAGES)
def test_import_direction(package: str) -> None:
    wrong: list[str] = []
    for path in sources(package):
        name = str(path.relative_to(ROOT))
        for module in modules_of(path):
            top = module.split(".")[0]
            if top not in PACKAGES or (name, top) in COMMAND_EXCEPTIONS:
                continue
            if not any(module == ok or module.startswith(ok + ".") for ok in ALLOWED[package]):
                wrong.append(f"{name} imports {module}")
    assert not wrong, wrong


@pytest.mark.parametrize("package", TORCH_FREE)
def test_client_and_router_need_no_torch(package: str) -> None:
    wrong = [f"{p}: {m}" for p in sources(package) for m in modules_of(p) if m.split(".")[0] in TORCH_LIKE]
    assert not wrong, wrong


def test_only_the_fleet_needs_ray() -> None:
    wrong = [
        f"{path}: {module}"
        for package in PACKAGES
        if package != "loraplex_fleet"
        for path in sources(package)
        for module in modules_of(path)
        if module.split(".")[0] == "ray" or module.startswith("loraplex_fleet")
    ]
    assert not wrong, wrong


def test_contracts_need_no_grpc() -> None:
    wrong = [
        f"{p}: {m}"
        for p in sources("loraplex_contracts")
        for m in modules_of(p)
        if m.split(".")[0] in {"grpc", "google"}
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("package", ORDER)
def test_folders_use_only_what_is_below_them(package: str) -> None:
    order = ORDER[package]
    top, *folders = package.split(".")
    root = PACKAGES[top].joinpath(*folders)
    wrong: list[str] = []
    for path in sources(top):
        if root not in path.parents or path == root / "__init__.py":
            continue
        here = path.relative_to(root).parts[0].removesuffix(".py")
        for module in modules_of(path):
            used = module.removeprefix(package + ".").split(".")[0]
            if module.startswith(package + ".") and order.index(used) > order.index(here):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_no_cycle_of_modules(package: str) -> None:
    names = {module_name(path, package): path for path in sources(package)}
    uses = {name: imported_names(path, names.keys()) - {name} for name, path in names.items()}
    while leaves := [name for name, used in uses.items() if not used]:
        for leaf in leaves:
            del uses[leaf]
        uses = {name: used - set(leaves) for name, used in uses.items()}
    assert not uses, uses


def module_name(path: Path, package: str) -> str:
    parts = path.relative_to(PACKAGES[package].parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path, modules: Collection[str]) -> set[str]:
    """Those of `modules` that a file imports. `from package import module` is an import of the module alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return found & set(modules)


def test_only_the_edges_touch_generated_code() -> None:
    wrong: list[str] = []
    for package in PACKAGES:
        for path in sources(package):
            name = str(path.relative_to(ROOT))
            if name.startswith(("proto/", "runtime/", "client/", "server/loraplex_server/grpc/")):
                continue
            if name.startswith("router/"):
                continue  # the router is one edge: it has nothing but gRPC
            if name == "fleet/loraplex_fleet/probe.py":
                continue
            wrong += [
                f"{name} imports {m}" for m in modules_of(path) if "_pb2" in m or m.startswith("loraplex_proto.v1")
            ]
    assert not wrong, wrong


def test_the_scheduler_is_pure() -> None:
    banned = {"torch", "grpc", "time", "asyncio", "threading", "random", "os"}
    folder = PACKAGES["loraplex_server"] / "scheduler"
    wrong = [f"{p.name}: {m}" for p in folder.glob("*.py") for m in modules_of(p) if m.split(".")[0] in banned]
    assert not wrong, wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_no_global_statement_and_no_environment_outside_config(package: str) -> None:
    wrong: list[str] = []
    for path in sources(package):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                wrong.append(f"{path}:{node.lineno} global")
            if (
                isinstance(node, ast.Attribute)
                and node.attr in {"environ", "getenv"}
                and path.name not in {"config.py", "__main__.py"}
            ):
                wrong.append(f"{path}:{node.lineno} reads the environment")
    assert not wrong, wrong
