"""What a command loads: `mm` answers at once because it leaves out what it does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mmadmin.cli.main import COMMANDS, app

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import atexit, sys

out = sys.argv.pop()


def note():
    with open(out, "w") as file:
        print(*sys.modules, sep="\\n", file=file)


atexit.register(note)
from mmadmin.cli.entry import main

main()
"""
SLOW = {
    "celery",
    "cryptography.hazmat",
    "httpx2",
    "huggingface_hub",
    "jinja2",
    "kombu",
    "ninja",
    "pydantic",
    "tomlkit",
    "django.contrib.admin",
}


def loaded(tmp_path: Path, *words: str) -> set[str]:
    """The modules in memory when a command ends."""
    out = tmp_path / "modules"
    subprocess.run(
        [sys.executable, "-c", RUN, *words, str(out)],
        cwd=ROOT,
        env={"MM_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin", "COLUMNS": "100"},
        capture_output=True,
        check=False,
    )
    return set(out.read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation with a database and nothing in it."""
    folder = tmp_path_factory.mktemp("start")
    loaded(folder, "init")
    assert (folder / "home" / "db.sqlite3").exists()
    return folder


def test_help_loads_no_framework(tmp_path: Path) -> None:
    """`mm --help` names every command and needs neither Django nor the store nor an engine."""
    found = loaded(tmp_path, "--help")
    assert found & (SLOW | {"django", "redis", "psutil", "mmadmin.core.store"}) == set()
    assert "mmadmin.cli.build" in found


@pytest.mark.parametrize(
    "words",
    [["status"], ["history", "none"], ["keys", "list"], ["keys", "issue", "--owner", "alice"]],
)
def test_a_question_to_the_records_loads_little(home: Path, words: list[str]) -> None:
    """Records are read without the panel, the queue, the store and the engines."""
    found = loaded(home, *words)
    assert "deployments.models" in found
    slow = SLOW | {"mmadmin.core.store", "mmadmin.core.catalog", "mmadmin.host.hub"}
    assert found & slow == set()


def test_a_command_loads_no_other(tmp_path: Path) -> None:
    """Only the module of the command that was typed is loaded."""
    assert "mmadmin.cli.store" not in loaded(tmp_path, "logs", "panel")


def test_every_command_is_there() -> None:
    """The table names what exists; `mm --help` loads each line of it."""
    import typer.main

    root = typer.main.get_command(app)
    assert [command.name for command in root.commands.values()] == list(COMMANDS)
