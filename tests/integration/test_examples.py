"""Programs of `examples/`, run against one worker that serves the demo's models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import loraplex

from loraplex_demo.world import committed_world

pytestmark = pytest.mark.timeout(240)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}=>"
EXPECTED = {
    "quickstart.py": '{"person": {"name": "Ada Keller", "age": 36, "city": "London"}}',
    "streaming.py": "author: Mei Novak",
    "chat.py": "> And another one?",
    "adapters.py": "ADAPTER_NOT_FOUND",
    "speculation.py": "prompt lookup",
    "async_load.py": "48 of 48 answers",
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    world = committed_world()
    model = tmp_path_factory.mktemp("model")  # the demo's, with a chat template
    for path in world.base_path.iterdir():
        (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    draft = world.drafts[0].name
    flags = ["--port", "0", "--threads", "1", "--adapters", str(world.adapters_root)]
    flags += ["--draft-model", f"{draft}={world.draft_path(draft)}"]
    with loraplex("worker", str(model), *flags, timeout_s=200) as worker:
        yield worker.address


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
