"""Blocks of docs/getting-started.md on an empty machine, with the built wheels."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.documents import ROOT, Block, blocks
from support.fleet import free_port

from loraplex_proto import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = ROOT / "docs/getting-started.md"
DISTRIBUTIONS = ("loraplex", "loraplex-server", "loraplex-demo")
ANSWER = "a person"
INSTALL, CLIENT, UVX, DEMO, BASE, ADAPTER, SERVE, COMMAND, SDK, CURL = range(10)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the wheels in dist/."""
    folder = tmp_path_factory.mktemp("machine")
    for name in DISTRIBUTIONS:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
        subprocess.run(build, cwd=ROOT / "packages" / name, check=True, capture_output=True)
    assert len(list((folder / "dist").iterdir())) == len(DISTRIBUTIONS)
    return folder


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Environment with nothing of the checkout, and with what `. env/bin/activate` does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "LORAPLEX"))}
    own = Path(sys.executable).parent
    path = [one for one in kept["PATH"].split(os.pathsep) if Path(one) != own]
    kept["PATH"] = os.pathsep.join([str(folder / "env/bin"), *path])
    # What is imported is compiled then; all of torch takes a minute longer.
    return {**kept, "PYTHONUNBUFFERED": "1", "PIP_NO_COMPILE": "1", **variables}


def command(block: Block) -> list[str]:
    return (
        ["python", "-c", block.text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", block.text]
    )


def run(block: Block, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    arguments = command(block)
    # PATH of `env` says where the program is, not PATH of this process.
    program = shutil.which(arguments[0], path=env["PATH"])
    assert program is not None, arguments[0]
    return subprocess.run([program, *arguments[1:]], cwd=folder, env=env, capture_output=True, text=True, timeout=900)


@contextmanager
def served(block: Block, folder: Path, env: dict[str, str], *flags: str) -> Generator[None]:
    """The server of the block, until the end."""
    log = folder / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {block.text.strip()} {' '.join(flags)}"], cwd=folder, env=env, stdout=out, stderr=out
        )
    try:
        while not re.search(r"ready on \S+", log.read_text()):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_the_page(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = blocks(PAGE)
    assert len(steps) == CURL + 1
    times: dict[str, float] = {}

    def step(name: str, block: Block, env: dict[str, str]) -> str:
        start = time.monotonic()
        done = run(block, machine, env)
        times[name] = time.monotonic() - start
        if name == "install" and re.search("No matching distribution|Connection|Temporary failure", done.stderr):
            pytest.skip(f"what the wheels need cannot be had here: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    env = environment(machine)
    step("install", steps[INSTALL], env)
    said = step("demo", steps[DEMO], env)
    assert "28 of 28 answers are right" in said
    step("copy the base", steps[BASE], env)
    step("train an adapter", steps[ADAPTER], env)

    port, http_port = free_port(), free_port()
    env = environment(machine, LORAPLEX_SERVER=f"127.0.0.1:{port}")
    at = {name: steps[name].text.replace("8000", str(http_port)) for name in (SERVE, CURL)}
    start = time.monotonic()
    serve = Block("", 0, "", at[SERVE])
    with served(serve, machine, env, f"--port {port}"):
        times["serve"] = time.monotonic() - start
        for name, block in (
            ("command", steps[COMMAND]),
            ("SDK", steps[SDK]),
            ("curl", Block("", 0, "", at[CURL])),
        ):
            assert ANSWER in step(name, block, env), name
    with capsys.disabled():
        print("\n" + "\n".join(f"| {name} | {seconds:.1f} s |" for name, seconds in times.items()))


def test_pipx_and_uvx_take_the_client(machine: Path) -> None:
    """Their own environments have nothing but the client and what it needs."""
    tools = machine / "tools"
    venv.create(tools, with_pip=True)
    pip = [str(tools / "bin/python"), "-m", "pip", "install", "-q", "pipx", "uv"]
    if (done := subprocess.run(pip, capture_output=True, text=True)).returncode:
        pytest.skip(f"pipx and uv cannot be had here: {done.stderr.splitlines()[-1]}")
    places = {"PIPX_HOME": str(machine / "pipx"), "PIPX_BIN_DIR": str(machine / "pipx/bin")}
    env = environment(machine, **places, UV_PYTHON=sys.executable)
    done = run(blocks(PAGE)[CLIENT], machine, {**env, "PATH": f"{tools / 'bin'}{os.pathsep}{env['PATH']}"})
    assert done.returncode == 0, done.stderr
    assert f"loraplex {__version__}" in done.stdout.splitlines()
    command = [str(machine / "pipx/bin/loraplex"), "serve", "base"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs loraplex-server" in done.stderr


def test_uvx(machine: Path) -> None:
    if shutil.which("uvx") is None:
        pytest.skip("uvx is not installed (pip install uv)")
    done = run(blocks(PAGE)[UVX], machine, environment(machine))
    if re.search("No solution found|Connection|Failed to fetch", done.stderr):
        pytest.skip(f"what the wheels need cannot be had here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert "28 of 28 answers are right" in done.stdout
