"""Hatchling hook: native CPU kernels in the wheel where a compiler exists.

A compiler that is missing or fails never fails an installation: torch then does the work. How the kernels are built is
not known here.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernelsHook(BuildHookInterface[Any]):
    """Editable: the library lies among the sources. Wheel: only in the wheel, whose name then says the platform.

    The platform is sysconfig's, which a build for another machine names in _PYTHON_HOST_PLATFORM: linux-aarch64."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        server = (Path(self.root) / "server").resolve()
        # The package is not installed where wheels are built.
        sys.path.insert(0, str(server))
        try:
            from loraplex_server.backends.cpu.native import build
        finally:
            del sys.path[0]
        platform = sysconfig.get_platform()
        self._scratch = tempfile.TemporaryDirectory()  # until the wheel is written
        target = build.LIBRARY if version == "editable" else Path(self._scratch.name) / build.LIBRARY.name
        try:
            if version != "editable" or build.built_from(target) != build.source_hash():
                # A checkout keeps its object files there (make native does too), and its wheels are made of them.
                objects = server.parent / "build" / "native"
                keeps = version == "editable" or objects.is_dir()
                compiler = build.find_compiler(machine=build.machine_of(platform))
                build.build(target, compiler=compiler, objects=objects if keeps else None)
        except build.BuildError as error:
            self.app.display_warning(f"native CPU kernels not built, torch does their work: {error}")
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
            build_data["force_include"][str(target)] = f"loraplex_server/backends/cpu/native/{target.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._scratch.cleanup()
