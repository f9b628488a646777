"""guidellm 0.8.1: 32 streams over four adapters, a process for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import call, equal, facts, run

STREAMS, REQUESTS, PROMPT, OUTPUT = 8, 24, 32, 16  # of each adapter; tokens


def command(adapter: str, route: str, report: Path) -> list[str]:
    options = {
        "backend": f"kind=openai_http,target={facts.url},model={adapter},request_format={route}",
        "tokenizer": f"kind=huggingface_auto,model={facts.model_folder}",
        "profile": f"kind=concurrent,streams={STREAMS}",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "output": f"kind=json,path={report}",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [str(Path(sys.executable).parent / "guidellm"), "run", *flags, "--disable-console"]


def loaded(route: str) -> None:
    variables = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{name}.json" for name in facts.adapters]
        running = [
            subprocess.Popen(
                command(name, route, report),
                env=variables,
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, report in zip(facts.adapters, reports, strict=True)
        ]
        for one in running:
            _, errors = one.communicate()
            assert one.returncode == 0, errors[-1000:]
        for report in reports:
            (found,) = json.loads(report.read_text())["benchmarks"]
            requests = found["requests"]
            equal({kind: len(requests[kind]) for kind in ("errored", "incomplete")}, {"errored": 0, "incomplete": 0})
            equal(len(requests["successful"]), REQUESTS)
            for each in requests["successful"]:
                equal(each["output_tokens"], OUTPUT)


@call("run, /v1/completions")
def _() -> None:
    loaded("/v1/completions")


@call("run, /v1/chat/completions")
def _() -> None:
    loaded("/v1/chat/completions")


run()
