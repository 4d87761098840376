"""What others wrote reaches the terminal as text: no escape sequence, no turned line."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import mmadmin.cli
from mmadmin.cli import output
from mmadmin.cli.tables import Column, layout

WITH_OURS = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
HOSTILE = "two \x1b[31mRED\x1b[0m \u202e rtl \x1b]0;title\x07 [bold]no[/] \x9b2J\ttab é 北 😸"
TOLD = r"two RED \u202e rtl \x1b]0;title\x07 [bold]no[/] \x9b2J" + "\ttab é 北 😸"


def test_control_characters_are_named_and_words_stay() -> None:
    """Colours go, what a terminal would obey is shown by number, markup is no markup."""
    assert output.plain(HOSTILE) == TOLD
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=200, highlight=False)
    terminal.print(output.escape(HOSTILE))
    assert "\x1b]" not in shown.getvalue()
    assert r"\x1b]0;title\x07 [bold]no[/]" in shown.getvalue()
    line = layout([Column("reason")], [[output.escape(HOSTILE)]], None).lines[-1]
    assert line.plain.rstrip() == TOLD.replace("\t", " "), "a tab has no width of its own"


def test_logs_keep_their_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else; a pipe gets the bytes as they are."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert output.coloured(HOSTILE) == HOSTILE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert output.coloured("a\x1b[1mb\x1b[0m\x1b[2Jc") == "a\x1b[1mb\x1b[0m\\x1b[2Jc"
    assert output.coloured("progress 1\rprogress 2\n") == "progress 1\rprogress 2\n"


def test_json_is_the_same_text_and_turns_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters are escaped as JSON has it."""
    output.emit_json({"reason": HOSTILE})
    text = capsys.readouterr().out
    assert json.loads(text) == {"reason": HOSTILE}
    assert not output.CONTROL.search(text)
    assert "é 北 😸" in text


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_reason_to_fail(tmp_path: Path, closed: str) -> None:
    """As a daemon's child has them; no file gets their number and is written into."""
    look = "from mmadmin.cli.entry import main; main()"
    script = f'"$0" -c "$1" --version {closed}; echo "ended with $?" >> told'
    subprocess.run(
        ["sh", "-c", script, sys.executable, look], cwd=tmp_path, env=WITH_OURS, check=True
    )
    assert (tmp_path / "told").read_text() == "ended with 0\n"


def test_an_interrupt_while_the_command_is_loaded_is_quiet(tmp_path: Path) -> None:
    """130 and no traceback: an import is where the interrupt falls."""
    code = """
import sys
from mmadmin.cli import entry
class Finder:
    def find_spec(self, name, *_):
        if name == "mmadmin.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
entry.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=WITH_OURS, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")


def test_no_command_escapes_in_another_way() -> None:
    """Markup alone is not what must be escaped."""
    for path in Path(str(mmadmin.cli.__path__[0])).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "rich.markup":
                raise AssertionError(f"{path.name} takes escape from rich, not from output")
