"""Wire compatibility with the image that users' stubs were made from."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"
BASELINE = ROOT / "proto/baseline.yaml"
INFERENCE, WORKER = (f"proto/loraplex_proto/v1/{name}.proto" for name in ("inference", "worker"))


def complaints(tree: Path) -> list[str]:
    """Complaints of `buf breaking` about the .proto files in `tree`, one line for each break."""
    command = [str(BUF), "breaking", "--against", str(BASELINE)]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert run.returncode in (0, 100), run.stderr  # 100: it found something
    assert bool(run.returncode) == bool(run.stdout)
    return run.stdout.splitlines()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what buf reads."""
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    for path in ROOT.glob("proto/**/*.proto"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path


def edit(path: Path, pattern: str, replacement: str) -> None:
    text, num_edits = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    assert num_edits, f"{pattern!r} is not in {path.name}"
    path.write_text(text)


def test_users_stubs_fit_the_wire() -> None:
    assert not complaints(ROOT)


FIELD = r"^  string adapter_id = 4;"


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "said"),
    [
        (INFERENCE, FIELD, "", 'field "4" with name "adapter_id" on message "GenerateRequest" was deleted'),
        (
            INFERENCE,
            FIELD,
            '  reserved 4;\n  reserved "adapter_id";',
            'name "adapter_id" on message "GenerateRequest" was',
        ),
        (INFERENCE, FIELD, "  string adapter_id = 4000;", 'field "4" with name "adapter_id"'),
        (INFERENCE, FIELD, "  string adapter = 4;", 'changed name from "adapter_id" to "adapter"'),
        (INFERENCE, FIELD, "  bytes adapter_id = 4;", 'changed type from "string" to "bytes"'),
        (INFERENCE, r"^  rpc Tokenize\(.*\n", "", 'RPC "Tokenize" on service "InferenceService" was deleted'),
        (WORKER, r"returns \(stream WatchLoadResponse\)", "returns (WatchLoadResponse)", "from server streaming"),
        # The same bytes, but `from loraplex_proto.v1.worker_pb2 import ResidentAdapter` would end.
        (WORKER, r"\bResidentAdapter\b", "Resident", 'message "ResidentAdapter" was deleted'),
    ],
    ids=["deleted", "reserved", "renumbered", "renamed", "retyped", "method", "streaming", "message"],
)
def test_a_break_is_found(tree: Path, file: str, pattern: str, replacement: str, said: str) -> None:
    edit(tree / file, pattern, replacement)
    found = complaints(tree)
    assert any(said in line for line in found), found


def test_additions_pass(tree: Path) -> None:
    edit(tree / INFERENCE, FIELD, r"\g<0>\n  string added_later = 4000;")
    assert not complaints(tree)


def test_make_check_compares_with_the_same_image() -> None:
    makefile = (ROOT / "Makefile").read_text()
    check = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    assert f"buf breaking --against {BASELINE.relative_to(ROOT)}" in check
