"""schemathesis over the server's own description of its routes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from calls import facts
from server import Server

SEED = 15
NUM_EXAMPLES = 40  # of each operation
MAX_CONTEXT = 128  # chats fill the context where they say nothing else
# LoRAX and TGI answer 424 where something failed in the server.
CONFIG = """
[checks.not_a_server_error]
expected-statuses = [200, 400, 403, 404, 405, 413, 415, 422]
"""
# The checks of accepted and rejected bodies are left out: handlers refuse more than the description can say.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


def main() -> int:
    report = Path.cwd() / "report.xml"
    Path("schemathesis.toml").write_text(CONFIG)
    server = Server(
        Path(facts.model_folder), "--adapters", facts.adapters_folder, "--max-context", str(MAX_CONTEXT), "--http-admin"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--warnings", "off", "--no-color"),
            *("--max-examples", str(NUM_EXAMPLES), "--seed", str(SEED), "--generation-database", "none"),
            *("--continue-on-failure", "--request-timeout", "60", "--suppress-health-check", "all"),
            *("--report", "junit", "--report-junit-path", str(report)),
        ],
        capture_output=True,
        text=True,
    )
    server.end()
    sys.stderr.write(done.stdout + done.stderr)
    cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ()
    for case in cases:
        faults = [f"{row.tag}: {row.get('message') or ''} {row.text or ''}" for row in case if row.tag != "system-out"]
        print(json.dumps({"call": case.get("name"), "fault": "; ".join(faults)}), flush=True)
    return 0 if done.returncode in (0, 1) else done.returncode


if __name__ == "__main__":
    sys.exit(main())
