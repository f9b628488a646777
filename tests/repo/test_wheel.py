"""Distributions as users install them: contents, requirements, sources."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.native import compiler_or_skip

import loraplex_proto
from loraplex.cli.main import DISTRIBUTIONS
from loraplex_server.backends.cpu.native.library import load

pytestmark = pytest.mark.timeout(400)  # wheels compile the kernels, which takes two minutes beside other tests
KERNELS = "loraplex_server/backends/cpu/native/_kernels.so"
PACKAGES = {
    "loraplex": {
        "loraplex_contracts",
        "loraplex_proto",
        "loraplex_runtime",
        "loraplex",
        "loraplex_router",
        "loraplex_fleet",
    },
    "loraplex-server": {"loraplex_adapters", "loraplex_server", "loraplex_training"},
    "loraplex-demo": {"loraplex_demo"},
}
ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(project: Path, out: Path, target: str = "wheel", **environment: str) -> tuple[Path, str]:
    """The file that comes out, and what was said on the way."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    env = {**os.environ, **environment}
    run = subprocess.run(command, cwd=project, env=env, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (made,) = out.iterdir()
    return made, run.stdout + run.stderr


def names_in(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def metadata_of(wheel: Path) -> Message:
    (name,) = [name for name in names_in(wheel) if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(zipfile.ZipFile(wheel).read(name).decode())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: build(ROOT / "packages" / name, tmp_path_factory.mktemp("wheel"))[0] for name in PACKAGES}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout itself, which `pip install .` makes."""
    return build(ROOT, tmp_path_factory.mktemp("checkout"))[0]


def test_each_package_is_in_one_distribution(wheels: dict[str, Path], checkout: Path) -> None:
    found = {
        name: {name.split("/")[0] for name in names_in(wheel) if ".dist-info/" not in name}
        for name, wheel in wheels.items()
    }
    assert found == PACKAGES
    homes = {package: name for name, packages in PACKAGES.items() for package in packages if name != "loraplex"}
    assert homes == DISTRIBUTIONS, "`loraplex` names the distribution that a command needs"


def test_together_they_are_the_checkout(wheels: dict[str, Path], checkout: Path) -> None:
    parts = [name for wheel in wheels.values() for name in names_in(wheel) if ".dist-info/" not in name]
    assert sorted(parts) == sorted(name for name in names_in(checkout) if ".dist-info/" not in name)


def test_typed_and_complete(wheels: dict[str, Path]) -> None:
    for name, packages in PACKAGES.items():
        for package in packages:
            assert f"{package}/py.typed" in names_in(wheels[name])
    assert "loraplex_proto/v1/inference_pb2.py" in names_in(wheels["loraplex"])
    assert "loraplex_proto/v1/inference.proto" in names_in(wheels["loraplex"])


def test_the_client_stays_small(wheels: dict[str, Path]) -> None:
    assert wheels["loraplex"].name.endswith("-py3-none-any.whl")
    assert wheels["loraplex"].stat().st_size <= 1_000_000


def test_the_demo_world_travels_and_stays_small(wheels: dict[str, Path]) -> None:
    weights = [name for name in names_in(wheels["loraplex-demo"]) if name.endswith(".safetensors")]
    assert weights, "the demo's weights are missing from the wheel"
    sizes = [(ROOT / "demo" / name).stat().st_size for name in weights]
    assert sum(sizes) <= 12 * 2**20


# --- requirements -----------------------------------------------------------------------------------------------------


def requirements_of(wheel: Path) -> dict[str, set[str]]:
    """The wheel's requirements by extra; the name of those without one is empty."""
    found: dict[str, set[str]] = {}
    for line in metadata_of(wheel).get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        found.setdefault(extra[1] if extra else "", set()).add(requirement.strip())
    return found


def own(requirements: set[str]) -> set[str]:
    return {one for one in requirements if one.startswith("loraplex")}


def test_requirements_are_those_of_the_checkout(wheels: dict[str, Path]) -> None:
    extras = CHECKOUT["optional-dependencies"]
    found = {name: requirements_of(wheel) for name, wheel in wheels.items()}
    client = found["loraplex"]
    assert client.keys() == {"", *extras} - {"dev"}
    pairs = [(client[""], CHECKOUT["dependencies"]), (found["loraplex-server"][""], extras["server"])]
    pairs += [(client[extra], extras[extra]) for extra in ("router", "s3", "ray", "otel")]
    for requirements, listed in pairs:
        expected = {str(Requirement(one)) for one in listed}
        assert requirements - own(requirements) == expected - own(expected) != set()


def test_distributions_are_of_one_version(wheels: dict[str, Path]) -> None:
    version = loraplex_proto.__version__
    assert {metadata_of(wheel)["Version"] for wheel in wheels.values()} == {version}
    found = {name: requirements_of(wheel) for name, wheel in wheels.items()}
    server, demo = f"loraplex-server=={version}", f"loraplex-demo=={version}"
    assert own(found["loraplex-server"][""]) == {f"loraplex[router]=={version}"}
    assert own(found["loraplex-demo"][""]) == {server}
    assert {extra: own(wanted) for extra, wanted in found["loraplex"].items() if own(wanted)} == {
        "server": {server},
        "s3": {server},
        "ray": {server},
        "demo": {demo},
        "all": {server, demo},
    }


def test_addresses_of_the_project_are_taken_over(tmp_path: Path) -> None:
    """There is none yet (CONTRIBUTING.md, Make a release)."""
    text = re.sub(r"(?ms)^\[project\.urls\].*?(?=^\[)", "", (ROOT / "pyproject.toml").read_text())
    (tmp_path / "pyproject.toml").write_text(text + '\n[project.urls]\nSource = "https://example.org/source"\n')
    package = tmp_path / "packages/loraplex"
    package.mkdir(parents=True)
    hook = runpy.run_path(str(ROOT / "packages/hooks/metadata.py"))["CheckoutMetadata"]
    metadata: dict[str, Any] = {"version": "1"}
    hook(str(package), {"dependencies": ["dependencies"]}).update(metadata)
    assert metadata["urls"] == {"Source": "https://example.org/source"}


def test_what_an_index_shows(wheels: dict[str, Path], checkout: Path) -> None:
    private = "Private :: Do Not Upload"  # refused by the index
    assert private in metadata_of(checkout).get_all("Classifier", [])
    for wheel in wheels.values():
        metadata = metadata_of(wheel)
        assert set(metadata.get_all("Classifier", [])) == set(CHECKOUT["classifiers"]) - {private}
        assert metadata["Author"] == CHECKOUT["authors"][0]["name"]
        assert metadata["Requires-Python"] == CHECKOUT["requires-python"]
        assert metadata["License-Expression"] == CHECKOUT["license"]
        assert str(metadata.get_payload()).startswith("# Loraplex")
        (licence,) = [name for name in names_in(wheel) if name.endswith("/LICENSE")]
        assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()


# --- native kernels ---------------------------------------------------------------------------------------------------


def test_the_native_kernels_travel(wheels: dict[str, Path], tmp_path: Path) -> None:
    compiler_or_skip()
    wheel = wheels["loraplex-server"]
    assert KERNELS in names_in(wheel)
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl"), "any Python of this platform"
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (described,) = tmp_path.glob("*.dist-info/WHEEL")
    assert "Root-Is-Purelib: false\nTag: py3-none-linux_x86_64" in described.read_text()
    status = load(tmp_path / KERNELS, tmp_path / "loraplex_server/backends/cpu/native/src").status
    assert status.usable or status.reason.startswith("this CPU has none"), status


# Newest versions of symbols that auditwheel allows for manylinux_2_28, whose systems torch's own wheels need.
OLDEST_SYSTEM = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}


def test_the_native_kernels_load_on_older_systems(wheels: dict[str, Path]) -> None:
    compiler = compiler_or_skip()
    if not re.search(r"g\+\+.* (9|1[012])\.\d", compiler.version):
        pytest.skip(f"held for g++ up to 12 only, which releases are made with: {compiler.version}")
    library = zipfile.ZipFile(wheels["loraplex-server"]).read(KERNELS)
    found = re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI)_([\d.]+)(?=\0)", library)
    assert found
    needed = [(name.decode(), tuple(map(int, version.split(b".")))) for name, version in found]
    assert not [one for one in needed if one[1] > OLDEST_SYSTEM[one[0]]]


def test_without_a_compiler_the_wheel_is_pure_python(tmp_path: Path, wheels: dict[str, Path]) -> None:
    wheel, said = build(ROOT / "packages/loraplex-server", tmp_path, CXX="/nowhere/g++")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert set(names_in(wheels["loraplex-server"])) - set(names_in(wheel)) <= {KERNELS}, "nothing else is missing"
    assert not [name for name in names_in(wheel) if name.endswith(".so")]
    (line,) = [line for line in said.splitlines() if "native" in line]
    why = "the C++ compiler that CXX names does not run: /nowhere/g++"
    assert line == f"native CPU kernels not built, torch does their work: {why}"


def test_a_machine_without_kernels_gets_a_pure_wheel(tmp_path: Path) -> None:
    """The platform is sysconfig's, so that a build for another machine says so in its name."""
    platform = {"_PYTHON_HOST_PLATFORM": "linux-riscv64"}
    wheel, said = build(ROOT / "packages/loraplex-server", tmp_path, **platform)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert (
        "there are native kernels for linux x86_64, linux aarch64, darwin arm64 only, and this is linux riscv64" in said
    )


# --- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKAGES)
def test_a_source_distribution_builds_too(name: str, tmp_path: Path, wheels: dict[str, Path]) -> None:
    sdist, _ = build(ROOT / "packages" / name, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        assert all(one.isfile() or one.isdir() for one in archive), "links lead out of it"
        archive.extractall(tmp_path / "tree", filter="data")
    (root,) = (tmp_path / "tree").iterdir()
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    ours = {path for path in files if path.count("/") and path.split("/")[1] in PACKAGES[name]}
    rest = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"}
    assert files - ours == rest | {"hooks/kernels.py", "hooks/metadata.py"}, "no tests, no documents"
    assert not [path for path in files if path.endswith((".so", ".pyc"))]
    wheel, _ = build(root, tmp_path / "wheel", CXX="/nowhere/g++")
    assert set(names_in(wheel)) == set(names_in(wheels[name])) - {KERNELS}
    assert metadata_of(wheel).items() == metadata_of(wheels[name]).items()
