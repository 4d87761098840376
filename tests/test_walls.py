"""The walls between rooms: what each room's files may import, as the house style draws them.

import-linter (pyproject.toml) watches the rooms of `mmadmin`, through any chain of imports; here the
rooms of `deployments` are watched by what their files import themselves.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CORE_LIBRARIES = {"gguf", "jinja2", "numpy", "cryptography", "tomlkit"}
"""Each is the one library that some module of core exists for."""

FORBIDDEN: dict[str, set[str]] = {
    "models": {"deployments", "celery", "ninja", "mmadmin.host", "mmadmin.gate", "mmadmin.cli"},
    "actions": {"deployments.api", "deployments.views", "mmadmin.host", "mmadmin.gate"},
    "queries": {
        "deployments.actions",
        "deployments.api",
        "deployments.views",
        "deployments.tasks",
        "deployments.jobs",
        "mmadmin.host",
        "celery",
    },
    "api": {"deployments.tasks", "deployments.jobs", "deployments.views", "mmadmin.host"},
    "views": {"deployments.tasks", "deployments.jobs", "deployments.api", "mmadmin.host"},
    "panel": {"deployments.tasks", "deployments.jobs", "deployments.api", "mmadmin.host"},
    "tasks": {"deployments.actions", "deployments.api", "deployments.views"},
    "jobs": {"deployments.actions", "deployments.api", "deployments.views"},
}
EVERY_ROOM = {"mmadmin.cli", "mmadmin.gate"}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside its functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(module: str, room: str) -> bool:
    """True when `module` is `room` or lies in it."""
    return module == room or module.startswith(room + ".")


def files_of(room: str) -> list[Path]:
    """The files of a room of deployments: one module or a package."""
    folder = ROOT / "deployments" / room
    single = ROOT / "deployments" / f"{room}.py"
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [single] * single.exists()


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_rooms_of_deployments(room: str) -> None:
    """No file of a room imports what the table forbids to it."""
    files = files_of(room)
    assert files, f"deployments/{room} is gone: mend the table"
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in imports(path)
        for wall in FORBIDDEN[room] | EVERY_ROOM
        if inside(module, wall)
        and module != "deployments"
        and not inside(module, f"deployments.{room}")
    ]
    assert not wrong


def test_core_imports_only_the_standard_library_and_its_own_libraries() -> None:
    """Core knows no framework, no network, no process: only data."""
    allowed = sys.stdlib_module_names | CORE_LIBRARIES | {"mmadmin"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sorted((ROOT / "mmadmin" / "core").rglob("*.py"))
        for module in imports(path)
        if module.split(".")[0] not in allowed
        or (
            inside(module, "mmadmin") and not inside(module, "mmadmin.core") and module != "mmadmin"
        )
    ]
    assert not wrong


def test_the_package_itself_imports_nothing() -> None:
    """`mmadmin/__init__.py` imports nothing, so that core and gate load no framework."""
    assert not list(imports(ROOT / "mmadmin" / "__init__.py"))


@pytest.mark.parametrize("module", ["mmadmin.gateway", "mmadmin.core.snapshot", "mmadmin.cli.main"])
def test_loads_without_a_framework(module: str) -> None:
    """The gate, the core and `mm --help` start without Django and Celery in memory."""
    code = (
        f"import sys, {module}; sys.exit(bool({{'django', 'celery', 'ninja'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_names_that_say_nothing_are_not_used() -> None:
    """A file is named for what it is: no utils, helpers, manager, base, common."""
    empty = {"utils", "util", "helpers", "helper", "manager", "base", "common", "misc"}
    rooms = (ROOT / "mmadmin", ROOT / "deployments", ROOT / "tests")
    assert not [p for room in rooms for p in room.rglob("*.py") if p.stem in empty]
