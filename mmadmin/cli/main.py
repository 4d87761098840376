"""The `mm` command: one word for each thing that a person does.

A command's module is loaded when the command is asked for, and a module loads Django, Celery and
the core where it needs them: `mm` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup
from typer.exceptions import TyperException

from mmadmin.cli.installation import load_environment
from mmadmin.cli.output import errors, escape, of_the_disk, report
from mmadmin.cli.parameters import take_as_given
from mmadmin.cli.settings_file import Problem
from mmadmin.core.errors import InvalidInput, MmError

RUNNING = "Running it"
SERVING = "Serving models"
STORE = "Building and the store"
ALONE = "One service at a time, for containers"


COMMANDS = {
    "up": ("up:up", RUNNING),
    "down": ("up:down", RUNNING),
    "status": ("status:status", RUNNING),
    "set": ("settings:set_", RUNNING),
    "unset": ("settings:unset", RUNNING),
    "backup": ("backup:backup", RUNNING),
    "restore": ("backup:restore", RUNNING),
    "migrate": ("migrate:migrate", RUNNING),
    "password": ("up:password", RUNNING),
    "token": ("token:token", RUNNING),
    "logs": ("logs:logs", RUNNING),
    "top": ("top:top", RUNNING),
    "doctor": ("doctor:doctor", RUNNING),
    "init": ("containers:init", ALONE),
    "run": ("containers:run", ALONE),
    "healthy": ("containers:healthy", ALONE),
    "deploy": ("deployments:deploy", SERVING),
    "activate": ("deployments:activate", SERVING),
    "rollback": ("deployments:rollback", SERVING),
    "stop": ("deployments:stop", SERVING),
    "trial": ("trial:trial", SERVING),
    "list": ("deployments:list_", SERVING),
    "archive": ("deployments:archive", SERVING),
    "follow": ("deployments:follow", SERVING),
    "cancel": ("deployments:cancel", SERVING),
    "history": ("history:history", SERVING),
    "diff": ("history:diff", SERVING),
    "mark": ("history:mark", SERVING),
    "pin": ("history:pin", SERVING),
    "request": ("history:request", SERVING),
    "new": ("new:new", STORE),
    "hub": ("fit:hub", STORE),
    "fit": ("fit:fit", STORE),
    "plan": ("build:plan", STORE),
    "build": ("build:build", STORE),
    "lock": ("build:lock", STORE),
    "eval": ("evaluation:app", STORE),
    "rebuild": ("rebuild:rebuild", STORE),
    "export": ("bundle:export", STORE),
    "import": ("bundle:import_", STORE),
    "keys": ("keys:app", SERVING),
    "policy": ("policy:app", SERVING),
    "secret": ("secret:app", SERVING),
    "usage": ("usage:usage", SERVING),
    "tunnel": ("tunnel:app", RUNNING),
    "template": ("template:app", STORE),
    "store": ("store:app", STORE),
    "env": ("environments:app", STORE),
}
"""Each command by its word: where it is, and under which heading `mm --help` lists it."""


class Commands(MutableMapping[str, Any]):
    """`COMMANDS` as typer wants them, each loaded when it is looked up."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, word: str) -> Any:
        if word not in self._loaded:
            where, panel = COMMANDS[word]
            module, _, name = where.partition(":")
            found = getattr(import_module(f"mmadmin.cli.{module}"), name)
            holder = typer.Typer(add_completion=False, rich_markup_mode="rich")
            if isinstance(found, typer.Typer):
                holder.add_typer(found, name=word, rich_help_panel=panel)
            else:
                holder.command(word, rich_help_panel=panel)(found)
            self._loaded[word] = typer.main.get_group(holder).commands[word]
        return self._loaded[word]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __setitem__(self, word: str, command: Any) -> None:
        self._loaded[word] = command

    def __delitem__(self, word: str) -> None:
        raise NotImplementedError


class Root(TyperGroup):
    """`mm` itself."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (typer's signature)
        """The words, without loading what they stand for."""
        return list(self.commands)


take_as_given()
app = typer.Typer(
    name="mm",
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Build, serve, share and roll back large open models, reproducibly.",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="State is kept in var/, or in the folder that MM_HOME names. "
    "Exit codes: 0 done, 1 failed, 2 invalid usage, 130 interrupted.",
)


def _version(value: bool) -> None:  # noqa: FBT001 (a callback's signature)
    if value:
        from importlib.metadata import version

        sys.stdout.write(f"mm {version('mmadmin')}\n")
        raise typer.Exit


@app.callback()
def options(
    *,
    acting_as: Annotated[
        str, typer.Option("--as", help="Act as this user; else the first administrator.")
    ] = "",
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command's word."""
    from mmadmin.cli.records import ACTING_AS

    ACTING_AS.set(acting_as)


def _warn_of_settings(problems: Iterable[Problem]) -> None:
    """Name the lines that cannot be used; the command goes on without them."""
    for problem in problems:
        errors.print(f"[yellow]warning[/]  {escape(problem.message)}")
        errors.print(f"[dim]→ {escape(problem.remedy)}[/]")


PRIVATE = 0o077
"""The umask: what commands write into `MM_HOME` is not for other users."""


def main() -> None:
    """Run `mm`; an expected failure is reported and ends with 1, invalid usage with 2."""
    as_json = "--json" in sys.argv
    try:
        os.umask(PRIVATE)
        problems = load_environment()
        if not as_json:
            _warn_of_settings(problems)
            app()
        done = app(standalone_mode=False)
        sys.exit(done if isinstance(done, int) else 0)
    except MmError as error:
        report(error, as_json=as_json)
        sys.exit(1)
    except TyperException as error:  # without --json typer printed it
        said = str(getattr(error, "format_message", error.__str__)())
        refused = InvalidInput(said, remedy="`mm COMMAND --help` shows the usage")
        report(refused, as_json=as_json)
        sys.exit(2)
    except Exception as error:
        from mmadmin.cli.doctor import of_the_database

        if (expected := of_the_disk(error) or of_the_database(error)) is None:
            raise
        report(expected, as_json=as_json)
        sys.exit(1)
