"""What `mm … --help` says, of every command: one style, examples that are true, nothing unsaid."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mmadmin.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_JSON = {"mm run", "mm store serve"}
"""They run until they are told to stop, and print no data."""


def commands(command: Any, words: str = "mm") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    if hasattr(command, "commands"):
        for name, sub in command.commands.items():
            yield from commands(sub, f"{words} {name}")
    else:
        yield words, command


COMMANDS = dict(commands(typer.main.get_command(app)))


def examples(command: Any) -> list[str]:
    """The lines of a command's help that may be typed."""
    lines = [line.strip() for line in (command.help or "").splitlines()]
    return [line.removeprefix("Example: ") for line in lines if line.startswith("Example: ")]


@pytest.mark.parametrize("words", COMMANDS)
def test_one_style(words: str) -> None:
    """A sentence first, an example at the end; each argument and option is explained."""
    command = COMMANDS[words]
    first, *rest = command.help.split("\n\n")
    assert first.endswith("."), first
    assert "\n" not in first.strip()
    assert rest[-1].startswith("Example: ")
    for param in command.params:
        if param.name != "help":
            assert param.help, param.name
            assert param.help.endswith("."), param.help
        if param.param_type_name == "argument":
            assert param.metavar
            assert param.metavar == param.metavar.upper()
    options = {option for param in command.params for option in param.opts}
    assert ("--json" in options) == (words not in WITHOUT_JSON)


@pytest.mark.parametrize("words", COMMANDS)
def test_examples_can_be_typed(words: str) -> None:
    """Each example is one of its own command's, and parses: options, arguments and values."""
    command = COMMANDS[words]
    for line in examples(command):
        typed = [word for word in shlex.split(line) if "=" not in word or word.startswith("-")]
        count = len(words.split())
        assert " ".join(typed[:count]) == words
        if "…" not in line:
            command.make_context(words, typed[count:])


def test_the_shell_can_complete() -> None:
    """As the shell asks it: the commands that begin so, and the options of one."""
    for line, wanted in (
        ("mm hi", ["history"]),
        ("mm keys rev", ["revoke"]),
        ("mm diff --j", ["--json"]),
    ):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; sys.argv[0] = 'mm'\nfrom mmadmin.cli.entry import main; main()",
            ],
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "_MM_COMPLETE": "complete_bash",
                "COMP_WORDS": line,
                "COMP_CWORD": str(len(line.split()) - 1),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == wanted, done.stderr
