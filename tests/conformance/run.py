"""Conformance runs: other servers' clients against a live router and worker.

python tests/conformance/run.py [--ci] [CLIENT...]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "build" / "conformance"
sys.path.insert(0, str(HERE.parent))

BASE = "base"
PROMPT = "Once upon a time"
MAX_TOKENS = 24
MAX_CONTEXT = 4096
TOKEN, ADMIN_TOKEN = "conformance", "conformance-admin"
PROBE_TIMEOUT_S = 600
NUM_TOKENS = 5120  # of the vocabulary for vLLM's tests, which name token 5000
# What pip and npm say where the package index cannot be reached.
NO_INDEX = re.compile(
    r"name resolution|Name or service not known|NewConnectionError|ConnectTimeout|Network is unreachable|ProxyError|"
    r"No route to host|Connection refused|ENOTFOUND|ECONNREFUSED|ETIMEDOUT|EAI_AGAIN"
)


@dataclass(frozen=True, slots=True)
class Client:
    """One row of clients.toml."""

    name: str
    probe: Path
    requirements: Path
    is_in_ci: bool
    has_torch: bool  # sees the packages of this environment, torch among them, which would be gigabytes a second time


@dataclass(frozen=True, slots=True)
class Row:
    """A call, or several by a pattern, that differs or is left out."""

    client: str
    call: str
    reason: str
    error: str | None  # part of what the client raises; None: the call is not made

    def covers(self, client: str, call: str) -> bool:
        return fnmatch(client, self.client) and fnmatch(call, self.call)


class NoEnvironment(Exception):
    """The client cannot be installed here. The text says why."""


def clients() -> list[Client]:
    with (HERE / "clients.toml").open("rb") as file:
        rows: dict[str, dict[str, Any]] = tomllib.load(file)
    return [
        Client(
            name,
            HERE / "probes" / row["probe"],
            HERE / "requirements" / row["requirements"],
            row.get("ci", False),
            row.get("torch", False),
        )
        for name, row in rows.items()
    ]


def differences() -> list[Row]:
    with (HERE / "differences.toml").open("rb") as file:
        rows: list[dict[str, str]] = tomllib.load(file).get("row", [])
    return [Row(row["client"], row["call"], row["reason"], row.get("error")) for row in rows]


# --- environments -----------------------------------------------------------------------------------------------------


def environment(client: Client) -> Path:
    """The client's interpreter; installs what is pinned where that has changed. Raises NoEnvironment."""
    folder = ENVIRONMENTS / client.requirements.stem
    if client.probe.suffix == ".mjs":
        return _node(client, folder)
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = hashlib.sha256(client.requirements.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    _run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder)])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--retries", "1"]
    _run([*pip, "install", "--quiet", "--no-deps", "--requirement", str(client.requirements)])
    if client.has_torch:
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    stamp.write_text(wanted)
    return python


def _node(client: Client, folder: Path) -> Path:
    """Does what `environment` does, for Node, which looks for modules beside the probe's copy."""
    node = shutil.which("node")
    if node is None:
        raise NoEnvironment("node is not installed (Debian: nodejs)")
    folder.mkdir(parents=True, exist_ok=True)
    stamp, packages = folder / "installed", client.requirements.read_text()
    if not stamp.is_file() or stamp.read_text() != packages:
        npm = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]
        _run([*npm, *packages.split()])
        stamp.write_text(packages)
    for probe in (client.probe, client.probe.with_name("calls.mjs")):
        shutil.copy(probe, folder / probe.name)
    return Path(node)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        if NO_INDEX.search(said):
            raise NoEnvironment("the package index cannot be reached")
        raise RuntimeError(f"{' '.join(command)}\n{said}")


# --- the server -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(folder: Path) -> Iterator[dict[str, Any]]:
    """A worker, a router that is open, and one with credentials. Gives the facts for the probes."""
    from support.processes import loraplex
    from support.world import CHAT_SPECIALS, CHAT_TEMPLATE, make_world

    world = make_world(folder, 4, max_context=MAX_CONTEXT, chat_template=CHAT_TEMPLATE, special_tokens=CHAT_SPECIALS)
    credentials = [
        {"sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "tenant": "one", "adapters": [world.names[0]]},
        {"sha256": hashlib.sha256(ADMIN_TOKEN.encode()).hexdigest(), "tenant": "two", "roles": ["admin"]},
    ]
    (folder / "credentials.json").write_text(json.dumps({"credentials": credentials}))
    (folder / "token").write_text("router")
    guard = ("--auth-file", str(folder / "credentials.json"), "--worker-token-file", str(folder / "token"))
    names = ("--served-model-name", BASE, "--served-model-name", "dummy", "--served-model-name", "tgi")
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(
            loraplex("worker", str(world.model), "--adapters", str(world.adapters), "--port", "0", "--threads", "1")
        )
        to_worker = ("router", "--worker", worker.address, "--port", "0", "--http-port", "0", *names)
        router = stack.enter_context(loraplex(*to_worker))
        guarded = stack.enter_context(loraplex(*to_worker, *guard))
        facts = facts_of(router.address, _http_url(router.output), _http_url(guarded.output), world.names)
        yield {
            **facts,
            "model_folder": str(world.model),
            "adapters_folder": str(world.adapters),
            "command": [sys.executable, "-m", "loraplex"],
            "python_path": os.environ.get("PYTHONPATH", ""),
            "vllm_folder": str(_vllm_world(folder / "vllm")),
        }


def _vllm_world(folder: Path) -> Path:
    """A model and three adapters for vLLM's tests, which count the tokens of a prompt, name tokens by number, and wait
    for a random model to close its texts."""
    from support.world import CHAT_SPECIALS, CHAT_TEMPLATE, lean, make_world, word_tokenizer

    tokenizer = word_tokenizer("Hello, my name is", NUM_TOKENS, (*CHAT_SPECIALS, "</think>"))
    template = CHAT_TEMPLATE + "{%- if enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
    world = make_world(folder, 3, max_context=8192, chat_template=template, tokenizer=tokenizer)
    names = tokenizer.get_vocab()
    pairs = {number: -4.0 for name, number in names.items() if len(name) == 2 and number < NUM_TOKENS}
    ends = {names[name]: 3.0 for name in ('"', ",", "}", "]", "</think>")}
    lean(world.model, {**pairs, **ends, names["</s>"]: 1.0})
    return folder


def _http_url(output: str) -> str:
    found = re.search(r"HTTP on ([\d.:]+\d)", output)
    assert found, output
    return f"http://{found[1]}"


def facts_of(address: str, url: str, guarded_url: str, adapters: Sequence[str]) -> dict[str, Any]:
    """URLs, names, and the greedy texts that gRPC gives for the base and each adapter."""
    from loraplex import Client as Grpc

    asked = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    names = {BASE: "", **{name: name for name in adapters}}
    with Grpc(address) as grpc:
        return {
            "url": url,
            "guarded_url": guarded_url,
            "token": TOKEN,
            "admin_token": ADMIN_TOKEN,
            "base": BASE,
            "adapters": list(adapters),
            "prompt": PROMPT,
            "max_tokens": MAX_TOKENS,
            "prompt_ids": list(grpc.tokenize(PROMPT).token_ids),
            "texts": {name: grpc.generate(PROMPT, adapter_id=one, **asked).text for name, one in names.items()},
            "chats": {
                name: grpc.generate(messages=[{"role": "user", "content": PROMPT}], adapter_id=one, **asked).text
                for name, one in names.items()
            },
        }


# --- runs -------------------------------------------------------------------------------------------------------------


def results(client: Client, python: Path, facts: Mapping[str, Any], skipped: Sequence[str]) -> dict[str, str]:
    """The fault of each call, empty where there is none. Nothing but 127.0.0.1 can be reached: by a proxy that is not
    there, since huggingface_hub refuses every URL with HF_HUB_OFFLINE."""
    nowhere = "http://127.0.0.1:9"
    with tempfile.TemporaryDirectory() as home:
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1,localhost",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "LANGSMITH_TRACING": "false",
            "CONFORMANCE_FACTS": json.dumps(facts),
            "CONFORMANCE_SKIPPED": "\n".join(skipped),
        }
        done = subprocess.Popen(
            [python, _probe(client)],
            env=variables,
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        try:
            said, errors = done.communicate(timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            said = _ended(done)
            return {**_faults(said), "the probe itself": f"did not end within {PROBE_TIMEOUT_S} s"}
    found = _faults(said)
    if done.returncode or not found:
        found["the probe itself"] = f"ended with status {done.returncode}: {errors.strip()[-2000:]}"
    return found


def _ended(probe: subprocess.Popen[str]) -> str:
    """Output of a probe that is ended together with the servers that it started."""
    os.killpg(probe.pid, signal.SIGINT)
    try:
        return probe.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        os.killpg(probe.pid, signal.SIGKILL)
        return probe.communicate()[0]


def _probe(client: Client) -> Path:
    is_node = client.probe.suffix == ".mjs"
    return ENVIRONMENTS / client.requirements.stem / client.probe.name if is_node else client.probe


def _faults(output: str) -> dict[str, str]:
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"call"')]
    return {row["call"]: row["fault"] for row in rows}


def judged(client: str, call: str, fault: str, rows: Sequence[Row]) -> tuple[str, str]:
    """The word for a result, and what there is to say about it."""
    row = next((row for row in rows if row.covers(client, call)), None)
    if row is None:
        return ("FAILED", fault) if fault else ("ok", "")
    if row.error is None:
        return "FAILED", f"is to be left out, but was made: {fault or 'and works'}"
    if not fault:
        return "FAILED", f"works, but differences.toml says: {row.reason}"
    if row.error not in fault:
        return "FAILED", fault
    return "differs", row.reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", help="names in clients.toml; default: all")
    parser.add_argument("--ci", action="store_true", help="the subset for CI")
    asked = parser.parse_args()
    wanted = [
        one for one in clients() if (one.name in asked.clients if asked.clients else one.is_in_ci or not asked.ci)
    ]
    if unknown := set(asked.clients) - {one.name for one in wanted}:
        parser.error(f"there is no client {', '.join(sorted(unknown))}")
    rows, pythons = differences(), {}
    for client in wanted:
        try:
            pythons[client] = environment(client)
        except NoEnvironment as error:
            print(f"{client.name:22} skipped: {error}", flush=True)
    totals: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        if pythons:
            facts = stack.enter_context(served(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        for client, python in pythons.items():
            totals += _report(client, python, facts, rows)
    print(", ".join(f"{number} {word}" for word, number in sorted(totals.items())) or "nothing was run")
    return 1 if totals["FAILED"] else 0


def _report(client: Client, python: Path, facts: Mapping[str, Any], rows: Sequence[Row]) -> Counter[str]:
    """Runs one client and prints its calls."""
    start = time.monotonic()
    left_out = [row for row in rows if row.error is None and fnmatch(client.name, row.client)]
    found = results(client, python, facts, [row.call for row in left_out])
    lines = [(call, *judged(client.name, call, fault, rows)) for call, fault in found.items()]
    lines += [(row.call, "skipped", row.reason) for row in left_out]
    for call, word, why in lines:
        print(f"{client.name:22} {call:62} {word}{': ' if why else ''}{' '.join(why.split())[:400]}")
    counts = Counter(word for _, word, _ in lines)
    print(f"{client.name:22} {dict(counts)} in {time.monotonic() - start:.0f} s\n", flush=True)
    return counts


if __name__ == "__main__":
    sys.exit(main())
