"""The import direction, and who may touch the generated code. Read from the source as text, nothing is imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "loraplex_proto": ROOT / "proto/loraplex_proto",
    "loraplex": ROOT / "client/loraplex",
    "loraplex_router": ROOT / "router/loraplex_router",
    "loraplex_server": ROOT / "server/loraplex_server",
    "loraplex_adapters": ROOT / "adapters/loraplex_adapters",
}
# Who may import whom, anywhere in a file (lazily too).
ALLOWED = {
    "loraplex_proto": {"loraplex_proto"},
    "loraplex": {"loraplex", "loraplex_proto"},
    "loraplex_router": {"loraplex_router", "loraplex_proto", "loraplex_adapters.key"},
    "loraplex_server": {"loraplex_server", "loraplex_proto", "loraplex_adapters"},
    "loraplex_adapters": {"loraplex_adapters", "loraplex_proto"},
}
# Commands that start something of another package say so here; each import is inside the command's function.
COMMAND_EXCEPTIONS = {
    ("client/loraplex/cli/doctor.py", "loraplex_adapters"),
    ("client/loraplex/cli/doctor.py", "loraplex_server"),
    ("client/loraplex/cli/adapters.py", "loraplex_server"),
    ("server/loraplex_server/cli/serve.py", "loraplex_router"),
    ("server/loraplex_server/cli/serving.py", "loraplex_router"),
    ("server/loraplex_server/cli/demo.py", "loraplex"),
}
TORCH_FREE = ("loraplex_proto", "loraplex", "loraplex_router")
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


def test_adapter_identity_needs_no_torch() -> None:
    assert not {m.split(".")[0] for m in modules_of(PACKAGES["loraplex_adapters"] / "key.py")} & TORCH_LIKE


def test_only_the_edges_touch_generated_code() -> None:
    wrong: list[str] = []
    for package in PACKAGES:
        for path in sources(package):
            name = str(path.relative_to(ROOT))
            if name.startswith(("proto/", "client/", "server/loraplex_server/grpc/")):
                continue
            if name.startswith("router/"):
                continue  # the router is one edge: it has nothing but gRPC
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
