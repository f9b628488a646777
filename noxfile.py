"""Test sessions by version of Python, run by hand with nox.

    nox                              # the ordinary suite, with each version
    nox -s tests-3.13 -- tests/unit  # a part of it with one
    nox -s light                     # client, command and router without torch
    nox -s lowest                    # with the least version of each dependency that pyproject.toml allows

A version whose interpreter is missing here is skipped by name.
"""

import re
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["tests"]

PYTHONS = nox.project.python_versions(nox.project.load_toml("pyproject.toml"))
WITHOUT_TORCH = [f"tests/unit/{name}" for name in ("client", "contracts", "proto", "router", "runtime")]
# Files; single tests have the marker `server`.
NEEDS_SERVER = re.compile(r"\b(torch|transformers|support|loraplex_(server|adapters|training|demo))\b")
PYTEST = [
    "pytest>=8",
    "pytest-asyncio>=1",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis",
    "httpx2",
    "psutil",
]


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The ordinary suite, or what is named behind `--`."""
    session.install("-c", "constraints.txt", "-e", ".[dev]")
    session.run("python", "-m", "loraplex_server.backends.cpu.native.build", "--if-stale", "--optional")
    chosen = session.posargs or ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    session.run("python", "-m", "pytest", *chosen)


@nox.session(python=PYTHONS[0], venv_backend="uv")
def lowest(session: nox.Session) -> None:
    """Parts of the suite with the least versions of dependencies, but for torch's, which is that of the other tests."""
    torch = Path("constraints.txt").read_text().split("\n", 1)[0]
    session.install("--resolution", "lowest-direct", "-e", ".[dev]", torch)
    session.run("python", "-m", "loraplex_server.backends.cpu.native.build", "--if-stale", "--optional")
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/unit", "tests/parity/test_lora.py"]))


@nox.session(python=PYTHONS)
def light(session: nox.Session) -> None:
    """Client, command and router as they are installed without torch, which is gigabytes on some machines."""
    session.install("-c", "constraints.txt", "-e", "./packages/loraplex[router,otel]", *PYTEST)
    for folder in WITHOUT_TORCH:
        files = [path for path in Path(folder).rglob("test_*.py") if not NEEDS_SERVER.search(path.read_text())]
        session.run(
            *("python", "-m", "pytest", "-m", "not server"),
            f"--confcutdir={folder}",  # the fixtures of all tests, above the folder, need torch
            *map(str, files),
            env={"LORAPLEX_RETRIES": "0"},
        )
