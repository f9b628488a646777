"""What a user's `pip install` puts into site-packages."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_only_our_prefixed_packages(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == {
        "loraplex",
        "loraplex_proto",
        "loraplex_router",
        "loraplex_server",
        "loraplex_adapters",
    }


def test_typed_and_complete(wheel_names: list[str]) -> None:
    for package in ("loraplex", "loraplex_proto", "loraplex_router", "loraplex_server", "loraplex_adapters"):
        assert f"{package}/py.typed" in wheel_names
    assert "loraplex_proto/v1/inference_pb2.py" in wheel_names
    assert "loraplex_proto/v1/inference.proto" in wheel_names


def test_the_demo_world_travels_and_stays_small(wheel_names: list[str]) -> None:
    weights = [name for name in wheel_names if name.endswith(".safetensors")]
    assert weights, "the demo's weights are missing from the wheel"
    sizes = [(ROOT / "server" / name).stat().st_size for name in weights]
    assert sum(sizes) <= 12 * 2**20
