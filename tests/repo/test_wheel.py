"""Contents of the wheel in a user's site-packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.native import compiler_or_skip

from loraplex_server.backends.cpu.native.library import load

KERNELS = "loraplex_server/backends/cpu/native/_kernels.so"
PACKAGES = {
    "loraplex",
    "loraplex_contracts",
    "loraplex_proto",
    "loraplex_runtime",
    "loraplex_router",
    "loraplex_adapters",
    "loraplex_server",
    "loraplex_training",
    "loraplex_demo",
    "loraplex_fleet",
}
ROOT = Path(__file__).resolve().parents[2]


def build(out: Path, target: str = "wheel", root: Path = ROOT, **environment: str) -> tuple[Path, str]:
    """The file that comes out, and what was said on the way."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    env = {**os.environ, **environment}
    run = subprocess.run(command, cwd=root, env=env, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (made,) = out.iterdir()
    return made, run.stdout + run.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))[0]


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_only_our_prefixed_packages(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == PACKAGES


def test_typed_and_complete(wheel_names: list[str]) -> None:
    for package in PACKAGES:
        assert f"{package}/py.typed" in wheel_names
    assert "loraplex_proto/v1/inference_pb2.py" in wheel_names
    assert "loraplex_proto/v1/inference.proto" in wheel_names


def test_the_demo_world_travels_and_stays_small(wheel_names: list[str]) -> None:
    weights = [name for name in wheel_names if name.endswith(".safetensors")]
    assert weights, "the demo's weights are missing from the wheel"
    sizes = [(ROOT / "demo" / name).stat().st_size for name in weights]
    assert sum(sizes) <= 12 * 2**20


def test_the_native_kernels_travel(wheel: Path, tmp_path: Path) -> None:
    compiler_or_skip()
    zipped = zipfile.ZipFile(wheel)
    assert KERNELS in zipped.namelist()
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl"), "any Python of this platform"
    zipped.extractall(tmp_path)
    (described,) = tmp_path.glob("*.dist-info/WHEEL")
    assert "Root-Is-Purelib: false\nTag: py3-none-linux_x86_64" in described.read_text()
    status = load(tmp_path / KERNELS, tmp_path / "loraplex_server/backends/cpu/native/src").status
    assert status.usable or status.reason.startswith("this CPU has none"), status


def test_without_a_compiler_the_wheel_is_pure_python(tmp_path: Path, wheel_names: list[str]) -> None:
    wheel, said = build(tmp_path, CXX="/nowhere/g++")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert set(wheel_names) - set(zipfile.ZipFile(wheel).namelist()) <= {KERNELS}, "nothing else is missing"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    (line,) = [line for line in said.splitlines() if "native" in line]
    why = "the C++ compiler that CXX names does not run: /nowhere/g++"
    assert line == f"native CPU kernels not built, torch does their work: {why}"


def test_a_source_distribution_builds_too(tmp_path: Path, wheel_names: list[str]) -> None:
    sdist, _ = build(tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if name.endswith(".so")]
        archive.extractall(tmp_path / "tree", filter="data")
    (root,) = (tmp_path / "tree").iterdir()
    wheel, _ = build(tmp_path / "wheel", root=root, CXX="/nowhere/g++")
    assert set(zipfile.ZipFile(wheel).namelist()) == set(wheel_names) - {KERNELS}
