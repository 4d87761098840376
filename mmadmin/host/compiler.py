"""Which compilers and tools this host has, and the Debian package that brings a missing one."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.errors import ToolMissing

VERSION_TIMEOUT_S = 20
CUDA_FOLDER = Path("/usr/local/cuda")

DEBIAN_PACKAGE = {
    "gcc": "gcc",
    "g++": "g++",
    "cc": "gcc",
    "c++": "g++",
    "ninja": "ninja-build",
    "nvcc": "nvidia-cuda-toolkit",
}
"""Program → Debian package; others are named as they are called."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """The host's C++ compiler as it enters a build's identity."""

    program: Path
    version: str
    """Full version, as `12.2.0`."""

    @property
    def label(self) -> str:
        """`gcc-12.2.0`."""
        return f"gcc-{self.version}"


def find(program: str) -> Path:
    """The absolute path of a program.

    cmake, ninja and python come from the Python environment we run in where it has them; all else
    from the system.
    Raises `ToolMissing` naming the package to install.
    """
    if program == "python":
        return Path(sys.executable)
    if program in ("cmake", "ninja") and (packaged := _from_package(program)) is not None:
        return packaged
    path = ":".join(("/usr/local/bin", "/usr/bin", "/bin", str(CUDA_FOLDER / "bin")))
    found = shutil.which(program, path=path)
    if found is None:
        package = DEBIAN_PACKAGE.get(program, program)
        raise ToolMissing(
            f"{program} is not installed on this host",
            remedy=f"apt-get install {package}",
            program=program,
            package=package,
        )
    return Path(found)


def _from_package(program: str) -> Path | None:
    """The program inside the Python package of the same name; None where there is none.

    Looked up in the package's file list: the import name `ninja` belongs to django-ninja too.
    """
    try:
        files = importlib.metadata.files(program) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    suffix = {"cmake": "data/bin/cmake", "ninja": "bin/ninja"}[program]
    for file in files:
        found = Path(str(file.locate())).resolve()
        if file.as_posix().endswith(suffix) and found.is_file():
            return found
    return None


def _says(*argv: str) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
    )
    return done.stdout


@functools.cache
def compiler() -> Compiler:
    """The C++ compiler that a build here would use; raises `ToolMissing`."""
    find("gcc")
    program = find("g++")
    return Compiler(program, _says(str(program), "-dumpfullversion", "-dumpversion").strip())


@functools.cache
def cuda_version() -> str:
    """The CUDA toolkit's version as `12.8`, or "" without a toolkit."""
    try:
        program = find("nvcc")
    except ToolMissing:
        return ""
    found = re.search(r"release (\d+\.\d+)", _says(str(program), "--version"))
    return found.group(1) if found else ""
