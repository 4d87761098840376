"""The walls between rooms: what each room's files may import, as the house style draws them.

import-linter (pyproject.toml) watches the rooms of `mmadmin`, through any chain of imports; here the
rooms of `deployments` are watched by what their files import themselves.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CORE_LIBRARIES = {"gguf", "jinja2", "numpy", "cryptography", "packaging", "tomlkit"}
"""Each is the one library that some module of core exists for."""

PROGRAMS = "programs"
"""Folders of programs that run in Python environments of their own."""

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
        if path.parent.name != PROGRAMS
        for module in imports(path)
        if module.split(".")[0] not in allowed
        or (
            inside(module, "mmadmin") and not inside(module, "mmadmin.core") and module != "mmadmin"
        )
    ]
    assert not wrong


def test_programs_of_other_environments_are_imported_by_nobody() -> None:
    """They need libraries that are not installed here, and import nothing of mmadmin."""
    for path in sorted((ROOT / "mmadmin").rglob("*.py")):
        for module in imports(path):
            assert PROGRAMS not in module.split("."), f"{path} imports {module}"
            assert path.parent.name != PROGRAMS or not inside(module, "mmadmin")


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


KNOWN_ONLY_INSIDE = re.compile(
    r"(?<!o)llama|gguf|mmproj|vllm|n_ctx|cache_prompt|--ctx-size|/props\b|/slots\b|/apply-template",
    re.IGNORECASE,
)
"""Words of one engine or one model format."""
INSIDE = ("mmadmin/core/engines/", "mmadmin/core/formats/", "deployments/catalog/", "/migrations/")
"""Where such words belong; of the first two only their folders, not the files beside them."""
STILL_SAID: dict[str, str] = {
    "mmadmin/core/catalog.py": "the engine of a file that names none",
    "mmadmin/core/fit/rules.py": "the table of rules names the engines and formats that they are about",
    "mmadmin/core/spec/lock.py": "the names in locks of format 1",
    "mmadmin/host/adopt.py": "models of other programs' caches, which are GGUF files",
}
"""Files outside that say one, and why; this list only gets shorter."""


def product_files() -> Iterator[Path]:
    """What is installed: code, templates and scripts of pages."""
    for room in ("mmadmin", "deployments", "templates", "static"):
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in {".py", ".html", ".js", ".css"}:
                yield path


def is_inside(name: str) -> bool:
    """True for a file in the folder of one engine or format."""
    return any(
        part in name and ("/core/" not in part or "/" in name.removeprefix(part)) for part in INSIDE
    )


def test_one_engine_and_one_format_are_known_in_their_own_folders_only() -> None:
    """The next engine touches nothing else: no file outside says a word of one."""
    said = {
        path.relative_to(ROOT).as_posix()
        for path in product_files()
        if not is_inside(path.relative_to(ROOT).as_posix())
        for line in path.read_text(encoding="utf-8").splitlines()
        if KNOWN_ONLY_INSIDE.search(line) and not line.strip().startswith("Example: ")
    }
    assert not said - set(STILL_SAID)
    assert not set(STILL_SAID) - said, "this file is clean now: take it off the list"
