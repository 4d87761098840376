"""Python environments as objects: what is in one, and why.

An environment is a folder `site` of installed packages without bytecode, dates or paths. It is
run as `PYTHONPATH=<site> python -P -s -m <module>` by the interpreter that it was made for: a
`sitecustomize` module in it refuses every other one. `python` is `isolated_python`, a virtual
environment without packages: no site folder of the host is read, and so no `.pth` file in one is
run, neither by the program nor by those that it starts. `.pth` files of the environment's own
packages are not run. `environment.json` beside it lists the packages, `sbom.cdx.json` is the same
as a CycloneDX bill of materials.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidInput, ToolMissing

SITE = "site"
LISTING = "environment.json"
SBOM = "sbom.cdx.json"
WRONG_INTERPRETER = 78
"""Exit code of an interpreter that the environment was not made for (`EX_CONFIG`)."""

SITECUSTOMIZE = '''"""Keeps this environment to its interpreter, and other packages out of it."""

import os
import sys

WANTED = "{interpreter}"
found = "{{}}-{{}}.{{}}-{{}}-{{}}".format(
    sys.implementation.name, *sys.version_info[:2], sys.platform, os.uname().machine
)
if found != WANTED:
    os.write(2, ("this environment is for %s, not for %s\\n" % (WANTED, found)).encode())
    os._exit({code})
sys.path[:] = [
    path for path in sys.path if os.path.basename(path) not in ("site-packages", "dist-packages")
]
'''


def interpreter() -> str:
    """The interpreter of this process, as environments name it: `cpython-3.11-linux-x86_64`."""
    major, minor = sys.version_info[:2]
    return f"{sys.implementation.name}-{major}.{minor}-{sys.platform}-{os.uname().machine}"


def python_program() -> Path:
    """The program of this process's interpreter, outside any virtual environment."""
    major, minor = sys.version_info[:2]
    return Path(sys.base_prefix) / "bin" / f"python{major}.{minor}"


def isolated_python() -> Path:
    """The interpreter that environments run on; made beside mmadmin's own at the first call.

    `sys.executable` of such a process is this program again, so its children are isolated as well.
    Raises `ToolMissing` when mmadmin does not run in a virtual environment that it may write to.
    """
    folder = Path(sys.prefix) / "isolated"
    program = folder / "bin" / python_program().name
    if not program.exists():
        _make_isolated(folder, program.name)
    return program


def _make_isolated(folder: Path, name: str) -> None:
    """Make what `python -m venv --without-pip` makes, or let whoever was faster win."""
    base = python_program()
    try:
        if sys.prefix == sys.base_prefix:
            raise PermissionError(f"{sys.prefix} is not a virtual environment")
        making = Path(tempfile.mkdtemp(prefix="isolated-", dir=folder.parent))
    except OSError as error:
        raise ToolMissing(
            f"the isolated Python at {folder} cannot be made: {error}",
            remedy=f"run once, as the owner of mmadmin's files: "
            f"{base} -m venv --without-pip {folder}",
        ) from error
    try:
        making.chmod(0o755)
        (making / "bin").mkdir()
        (making / "bin" / name).symlink_to(base)
        config = f"home = {base.parent}\ninclude-system-site-packages = false\n"
        (making / "pyvenv.cfg").write_text(config, encoding="utf-8")
        making.rename(folder)
    except OSError:
        shutil.rmtree(making)
        if not (folder / "bin" / name).exists():
            raise


def command(module: str, *arguments: str) -> list[str]:
    """Run a module of an environment; together with `variables`."""
    return [str(isolated_python()), "-P", "-s", "-m", module, *arguments]


def script(path: Path, *arguments: str) -> list[str]:
    """Run a script with an environment's packages; together with `variables`."""
    return [str(isolated_python()), "-P", "-s", str(path), *arguments]


def variables(environment: Path) -> dict[str, str]:
    """What makes an interpreter run in an environment object."""
    return {"PYTHONPATH": str(environment / SITE), "PYTHONNOUSERSITE": "1"}


@dataclass(frozen=True, slots=True)
class Package:
    """One package of an environment."""

    name: str
    """Normalised, as an index writes it."""
    version: str
    licence: str
    size_bytes: int
    """Installed."""
    wheel: str
    sha256: str
    """Of the wheel."""
    requires: tuple[str, ...] = ()
    """PEP 508, as the wheel says."""

    def as_json(self) -> dict[str, Json]:
        """A row of `environment.json`."""
        return {
            "name": self.name,
            "version": self.version,
            "licence": self.licence,
            "size_bytes": self.size_bytes,
            "wheel": self.wheel,
            "sha256": self.sha256,
            "requires": list(self.requires),
        }


@dataclass(frozen=True, slots=True)
class Environment:
    """What an environment consists of."""

    interpreter: str
    requirements: tuple[str, ...]
    """What was asked for."""
    packages: tuple[Package, ...]
    overlays: tuple[Mapping[str, str], ...] = ()
    """Corrections: `file` and `reason`."""
    clashes: tuple[Mapping[str, str], ...] = ()
    """Files that two wheels bring with other bytes: `file`, `kept` and `dropped` (packages)."""

    @property
    def size_bytes(self) -> int:
        """Of all packages."""
        return sum(package.size_bytes for package in self.packages)

    def as_json(self) -> dict[str, Json]:
        """The content of `environment.json`."""
        return {
            "format": 1,
            "interpreter": self.interpreter,
            "requirements": list(self.requirements),
            "packages": [package.as_json() for package in self.packages],
            "overlays": [dict(one) for one in self.overlays],
            "clashes": [dict(one) for one in self.clashes],
        }

    def edges(self) -> dict[str, tuple[str, ...]]:
        """The packages here that each package needs; "" = those that were asked for."""
        here = {package.name: package for package in self.packages}
        parsed = {name: _parsed(package.requires) for name, package in here.items()}
        roots = _parsed(self.requirements)
        marker = _marker_environment(self.interpreter)
        extras: dict[str, set[str]] = {name: set() for name in here}
        found: dict[str, set[str]] = {"": set(), **{name: set() for name in here}}
        open_ = [("", requirement) for requirement in roots]
        seen: set[tuple[str, str]] = set()
        while open_:
            owner, requirement = open_.pop()
            if not _applies(requirement, marker, extras.get(owner, set())):
                continue
            name = canonicalize_name(requirement.name)
            if name not in here:
                continue
            found[owner].add(name)
            key = (name, ",".join(sorted(requirement.extras | extras[name])))
            extras[name] |= requirement.extras
            if key not in seen:
                seen.add(key)
                open_ += [(name, one) for one in parsed[name]]
        return {owner: tuple(sorted(names)) for owner, names in found.items()}

    def why(self, name: str) -> list[str]:
        """The shortest chain of packages from what was asked for to `name`; empty = not here."""
        edges, paths = self.edges(), {"": [""]}
        queue = [""]
        for owner in queue:
            for needed in edges.get(owner, ()):
                if needed not in paths:
                    paths[needed] = [*paths[owner], needed]
                    queue.append(needed)
        return paths.get(canonicalize_name(name), [])[1:]

    def needed_by(self, name: str) -> list[str]:
        """The packages that need `name` directly; "" where it was asked for."""
        wanted = canonicalize_name(name)
        return sorted(owner for owner, needed in self.edges().items() if wanted in needed)


def _parsed(texts: Sequence[str]) -> list[Requirement]:
    """Requirements; what an old wheel writes in a form of its own is left out."""
    found = []
    for text in texts:
        try:
            found.append(Requirement(text))
        except InvalidRequirement:
            continue
    return found


def _applies(requirement: Requirement, marker: Mapping[str, str], extras: set[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(
        requirement.marker.evaluate({**marker, "extra": extra}) for extra in ("", *sorted(extras))
    )


def _marker_environment(text: str) -> dict[str, str]:
    """The markers of an interpreter, without asking this process's own."""
    implementation, version, system, machine = text.split("-", 3)
    names = {"cpython": "CPython", "pypy": "PyPy"}
    return {
        "implementation_name": implementation,
        "implementation_version": f"{version}.0",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_release": "",
        "platform_system": system.capitalize(),
        "platform_version": "",
        "python_full_version": f"{version}.0",
        "platform_python_implementation": names.get(implementation, implementation),
        "python_version": version,
        "sys_platform": system,
    }


def environment_from_json(data: Any) -> Environment:
    """The inverse of `Environment.as_json`. Raises `InvalidInput`."""
    try:
        return Environment(
            interpreter=str(data["interpreter"]),
            requirements=tuple(data["requirements"]),
            packages=tuple(
                Package(**{**row, "requires": tuple(row["requires"])}) for row in data["packages"]
            ),
            overlays=tuple(data["overlays"]),
            clashes=tuple(data["clashes"]),
        )
    except (KeyError, TypeError) as error:
        raise InvalidInput(
            f"{LISTING} is not readable: {error!r}", remedy="build the environment again"
        ) from error


def read_environment(folder: Path) -> Environment | None:
    """What an environment object holds; None when the object is not an environment."""
    try:
        text = (folder / LISTING).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return environment_from_json(json.loads(text))


def sbom(environment: Environment) -> dict[str, Json]:
    """The environment as a CycloneDX 1.6 document, without serial number and date."""
    edges = environment.edges()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "environment",
                "name": "python-environment",
                "version": environment.interpreter,
            }
        },
        "components": [_component(package) for package in environment.packages],
        "dependencies": [
            {
                "ref": _purl(environment, owner) if owner else "environment",
                "dependsOn": [_purl(environment, name) for name in needed],
            }
            for owner, needed in sorted(edges.items())
        ],
    }


def _component(package: Package) -> dict[str, Json]:
    reference = f"pkg:pypi/{package.name}@{package.version}"
    licences: list[Json] = [{"license": {"name": package.licence}}] if package.licence else []
    return {
        "type": "library",
        "bom-ref": reference,
        "name": package.name,
        "version": package.version,
        "purl": reference,
        "hashes": [{"alg": "SHA-256", "content": package.sha256}],
        "licenses": licences,
    }


def _purl(environment: Environment, name: str) -> str:
    version = next(p.version for p in environment.packages if p.name == name)
    return f"pkg:pypi/{name}@{version}"


@dataclass(frozen=True, slots=True)
class PackageChange:
    """A package that differs between two environments."""

    name: str
    before: str
    """Version; empty = it was not there."""
    after: str
    """Version; empty = it is gone."""


def package_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[PackageChange]:
    """Packages added, gone and changed, by name; both map names to versions."""
    for name in sorted({*before, *after}):
        change = PackageChange(name, before.get(name, ""), after.get(name, ""))
        if change.before != change.after:
            yield change
