"""Programs of `examples/`, run against one worker that serves the demo's models."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Running, loraplex

pytestmark = pytest.mark.timeout(240)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
HTTP_PROGRAMS = sorted(path.name for path in (EXAMPLES / "http").iterdir())
# Where `make conformance` installs clients.
ENVIRONMENTS = EXAMPLES.parent / "build" / "conformance"
EXPECTED = {
    "quickstart.py": '{"person": {"name": "Ada Keller", "age": 36, "city": "London"}}',
    "streaming.py": "author: Mei Novak",
    "chat.py": "> And another one?",
    "adapters.py": "ADAPTER_NOT_FOUND",
    "speculation.py": "prompt lookup",
    "async_load.py": "48 of 48 answers",
    "many.py": "AdapterNotFound",
}


@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
    with loraplex("demo", "--http", "--port", "0", "--http-port", "0", timeout_s=200) as running:
        yield running


@pytest.fixture
def address(demo: Running) -> str:
    return demo.address


@pytest.fixture
def url(demo: Running) -> str:
    found = re.search(r"HTTP on ([\d.:]+\d)", demo.output)
    assert found, demo.output
    return f"http://{found[1]}"


def test_every_program_is_expected() -> None:
    assert sorted(EXPECTED) == PROGRAMS
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_runs(name: str, address: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / name, address], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout
    assert not done.stderr


def with_client(name: str, package: str, environment: str | None = None) -> list[str]:
    """The command for an example in Python, in this environment or in that of `make conformance`."""
    if importlib.util.find_spec(package):
        return [sys.executable, str(EXAMPLES / "http" / name)]
    if environment is None:
        pytest.skip(f"{package} is not installed; the first line of examples/http/{name} says how")
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{package} is not installed; `make conformance` installs it")
    return [str(python), str(EXAMPLES / "http" / name)]


def with_node(name: str) -> list[str]:
    if shutil.which("node") is None:
        pytest.skip("node is not installed (Debian: nodejs)")
    modules = ENVIRONMENTS / "openai-node" / "node_modules"
    if not (modules / "openai").is_dir():
        pytest.skip("openai for Node is not installed; `make conformance` installs it")
    # Modules are looked for beside the file.
    copy = modules.parent / name
    copy.write_text((EXAMPLES / "http" / name).read_text())
    return ["node", str(copy)]


def with_shell(name: str) -> list[str]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (Debian: curl)")
    return ["sh", str(EXAMPLES / "http" / name)]


@pytest.mark.parametrize("name", HTTP_PROGRAMS)
def test_runs_over_http(name: str, url: str) -> None:
    commands = {
        "openai_client.py": lambda: with_client(name, "openai", "openai-3"),
        "huggingface_hub_client.py": lambda: with_client(name, "huggingface_hub", "huggingface-hub-2"),
        "lorax_client.py": lambda: with_client(name, "lorax", "lorax-client"),
        "text_generation_client.py": lambda: with_client(name, "text_generation", "text-generation"),
        "langchain_client.py": lambda: with_client(name, "langchain_openai", "langchain-openai"),
        "llamaindex_client.py": lambda: with_client(name, "llama_index"),
        "openai_client.mjs": lambda: with_node(name),
        "curl.sh": lambda: with_shell(name),
    }
    assert f"`http/{name}`" in (EXAMPLES / "README.md").read_text()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*commands[name](), url], capture_output=True, text=True, timeout=60, env=variables)
    assert done.returncode == 0, done.stderr
    # TGI's client names no adapters.
    parts = ("tokens; it ended by",) if name == "text_generation_client.py" else ("FG-8644", "INSERT INTO purchase")
    for part in parts:
        assert part in done.stdout
    assert not done.stderr
