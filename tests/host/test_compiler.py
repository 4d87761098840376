"""Finding compilers and tools, and naming the package that brings a missing one."""

from __future__ import annotations

import importlib.metadata
import subprocess

import pytest

from mmadmin.core.errors import ToolMissing
from mmadmin.host import compiler


def test_ninja_is_the_build_tool_not_the_web_framework() -> None:
    """The import name belongs to two packages; the program is found by the package's files."""
    said = subprocess.run(
        [compiler.find("ninja"), "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip()[0].isdigit()
    said = subprocess.run(
        [compiler.find("cmake"), "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith("cmake version")


def test_without_the_packages_the_systems_tools_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with Debian's cmake and without the Python package is fine, too."""

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    monkeypatch.setattr(compiler.shutil, "which", lambda name, **_options: f"/usr/bin/{name}")
    assert str(compiler.find("cmake")) == "/usr/bin/cmake"
    monkeypatch.setattr(compiler.shutil, "which", lambda _name, **_options: None)
    with pytest.raises(ToolMissing, match="apt-get install ninja-build"):
        compiler.find("ninja")
    with pytest.raises(ToolMissing, match=r"apt-get install g\+\+"):
        compiler.find("g++")
    with pytest.raises(ToolMissing, match="apt-get install nvidia-cuda-toolkit"):
        compiler.find("nvcc")


def test_the_compiler_says_its_full_version() -> None:
    """As it enters a build's identity."""
    found = compiler.compiler()
    assert found.label == f"gcc-{found.version}"
    assert found.version.count(".") == 2
